"""Optimizers: what each keeps, moves and makes for a parameter.

torch runs Adam and AdamW kernel by kernel unless `fused=True` is said, on GPUs over all parameters
at once (`torch.optim.adamw._multi_tensor_adamw`): weights decay (2 words read or written), both
moments are updated (3; 2 and 3), the roots of the second are made and corrected (2, 2, 2), and
weights are updated (4), in all 20 words of fp32; and the roots of all parameters lie there at once.
The fused kernel reads weight, gradient and moments, and writes all but the gradient: 7 words, and
nothing beside. On a CPU the same goes on parameter by parameter, in 3 to 5 times the seconds of the
fused kernel. 8-bit states are updated by a kernel a tensor (bitsandbytes). Of
weights in bf16 all of these words are halves, but where an optimizer has a type of its own for
moments. LAMB, LARS and Muon are ours (`meshwright.optim`), and go parameter by parameter, as each
has a rate of its own.

Optimizers of matrices keep and do for a matrix of a rows and b columns what depends on both sides:

    muon       a moment (ab words); five times X <- cX + (dA + eA^2) X with A = X X^T, in bf16, of
               the matrix so turned that its rows are the fewer (Jordan et al. 2024, Muon, the
               Newton-Schulz iteration; arXiv 2502.16982); tables and the last product's weights
               are stepped by AdamW
    adafactor  means of squares by row and by column (a + b words; arXiv 1804.04235)
    shampoo    sums of G G^T and G^T G, their roots, and momentum (2a^2 + 2b^2 + ab words), of
               parts of at most `SHAMPOO_SIDE` (arXiv 2002.09018); roots every `SHAMPOO_EVERY`
               steps, by eigenvectors: 9 n^3 FLOPs (Golub, Van Loan, Matrix Computations, 8.3)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from meshwright.costmodel.precisions import FP32
from meshwright.profiles.inputs import ArgumentError

FUSED = "_fused"
DTENSOR_ISSUES = 3.0  # of an operator on distributed tensors, beside one on plain ones (20, 7 us)
_WORDS = 3  # of a weight that is read and written, and of its gradient
SHAMPOO_SIDE = 8192  # the longest side of a part (arXiv 2309.06497, section 4)
SHAMPOO_EVERY = 50  # steps between roots
NEWTON_SCHULZ = 5  # iterations of Muon


class Sides(NamedTuple):
    """A parameter as so many (`stacked`) matrices of `rows` and `columns`."""

    stacked: int
    rows: int
    columns: int

    @staticmethod
    def of(shape: Sequence[int], *, flat: bool = True) -> Sides | None:
        """Sides of a parameter of a shape, None for a vector, or nothing: of 3 dims a stack, of
        more the first dim by all others, or (not `flat`) a stack by the last two."""
        if len(shape) < 2 or 0 in shape:
            return None
        if flat and len(shape) != 3:
            return Sides(1, shape[0], math.prod(shape[1:]))
        return Sides(math.prod(shape[:-2]), shape[-2], shape[-1])


class Multiplied(NamedTuple):
    """`batch` products of m x k and k x n elements."""

    m: float
    n: float
    k: float
    batch: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForMatrices:
    """An optimizer's step of a matrix of so many rows and columns: what it keeps, its `states` in
    words, its `products`, in `dtype`, of one step; of an element the `moved` words that it reads
    and writes beside them, by so many `operators`, and the bytes that it makes at once (`made`, in
    fp32). With `but_ends` tables and the last product's weights are stepped as other
    parameters; of more than three dims it takes matrices as `Sides.of` says of `flat`."""

    states: Callable[[float, float], float]
    products: Callable[[float, float], Sequence[Multiplied]]
    dtype: str = "fp32"
    moved: float
    made: float
    operators: int
    but_ends: bool = False
    flat: bool = True


def _newton_schulz(rows: float, columns: float) -> Sequence[Multiplied]:
    few, many = sorted((rows, columns))
    return [
        Multiplied(few, few, many, NEWTON_SCHULZ),
        Multiplied(few, few, few, NEWTON_SCHULZ),
        Multiplied(few, many, few, NEWTON_SCHULZ),
    ]


def _shampoo_states(rows: float, columns: float) -> float:
    return rows * columns + sum(2 * n * min(n, SHAMPOO_SIDE) for n in (rows, columns))


def _shampoo(rows: float, columns: float) -> Sequence[Multiplied]:
    """Both sums, both roots on the gradient, and the roots themselves."""
    made = list[Multiplied]()
    for n, other in ((rows, columns), (columns, rows)):
        side = min(n, SHAMPOO_SIDE)
        made.append(Multiplied(side, side, other, n / side))
        made.append(Multiplied(side, other, side, n / side))
        made.append(Multiplied(side, side, 9 / 2 * side / SHAMPOO_EVERY, n / side))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes a parameter: its weight, and its gradient, each `kept_bytes`; its `moments`, of their
    type or (`typed`) of one of their own; what a step reads and writes (`moved`), and what it makes
    beside that on a GPU, of all parameters at once (`temporary`); on a CPU, or wherever it goes
    `one_by_one`, so many `tensors` of the size of one parameter, by so many `operators`.
    `matrices` are stepped otherwise, each whole by one of the ranks that hold parts of it. The step
    of a parameter in parts sums `norms` numbers over these."""

    moments: int
    moved: int
    temporary: int = 0
    tensors: int = 0
    operators: int = 0
    typed: bool = False
    one_by_one: bool = False
    norms: int = 0
    matrices: ForMatrices | None = None
    kept_bytes: int = FP32

    @property
    def state_bytes(self) -> int:
        """Bytes of weight and moments, which undo a wrong step."""
        return self.kept_bytes + self.moments

    def moment_bytes(self, numel: float, sides: Sides | None) -> float:
        """Bytes of the moments of a parameter of so many elements, a matrix of these sides."""
        if self.matrices is None or sides is None:
            return self.moments * numel
        each = self.matrices.states(sides.rows, sides.columns)
        return self.kept_bytes * sides.stacked * each

    def issues(self, device: str, *, alone: bool = False) -> float:
        """Operators that a step issues for one parameter; on a GPU a few kernels step all that it
        doesn't step `alone`."""
        each = device == "cpu" or alone or self.one_by_one
        return max(self.operators, 1 * alone) * DTENSOR_ISSUES if each else 0.0

    def temporary_bytes(self, numels: Sequence[float], device: str) -> float:
        """Bytes that a step makes beside its states for parameters of such sizes."""
        if device == "cuda" and not self.one_by_one:
            return self.temporary * sum(numels)
        return self.tensors * self.kept_bytes * max(numels, default=0.0)


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType({
    "adamw": Optimizer(moments=8, moved=80, temporary=4, tensors=2, operators=9),
    "adamw_fused": Optimizer(moments=8, moved=28),
    "adam": Optimizer(moments=8, moved=72, temporary=4, tensors=2, operators=8),
    "adam_fused": Optimizer(moments=8, moved=28),
    "adamw_bf16": Optimizer(moments=4, moved=20, typed=True),
    "adamw8bit": Optimizer(moments=2, moved=16, typed=True),
    "sgd": Optimizer(moments=0, moved=12, operators=1),
    "momentum": Optimizer(moments=4, moved=20, operators=2),
    "lion": Optimizer(moments=4, moved=20, operators=5),
    "adagrad": Optimizer(moments=4, moved=20, operators=5),
    "lamb": Optimizer(moments=8, moved=116, tensors=2, operators=15, one_by_one=True, norms=2),
    "lars": Optimizer(moments=4, moved=60, tensors=1, operators=9, one_by_one=True, norms=2),
    "muon": Optimizer(
        moments=8, moved=96, tensors=2, operators=11, one_by_one=True,
        matrices=ForMatrices(
            states=lambda rows, columns: rows * columns, products=_newton_schulz, dtype="bf16",
            moved=14.5, made=8.0, operators=24, but_ends=True,
        ),
    ),
    "adafactor": Optimizer(
        moments=4, moved=76, tensors=2, operators=11, one_by_one=True,
        matrices=ForMatrices(
            states=lambda rows, columns: rows + columns, products=lambda rows, columns: (),
            moved=17, made=4.0, operators=20, flat=False,
        ),
    ),
    "shampoo": Optimizer(
        moments=8, moved=60, tensors=2, operators=9, one_by_one=True,
        matrices=ForMatrices(
            states=_shampoo_states, products=_shampoo, moved=12, made=8.0, operators=12,
        ),
    ),
})  # fmt: skip


@lru_cache
def _in_bytes(fp32: Optimizer, kept_bytes: int) -> Optimizer:
    """Fp32's record for weights and gradients of so many bytes an element."""
    part = kept_bytes / FP32
    own = fp32.moved - _WORDS * FP32  # of moments
    return replace(
        fp32,
        moments=fp32.moments if fp32.typed else int(part * fp32.moments),
        moved=_WORDS * kept_bytes + own if fp32.typed else int(part * fp32.moved),
        temporary=int(part * fp32.temporary),
        kept_bytes=kept_bytes,
    )


def optimizer_named(name: str, kept_bytes: int = FP32) -> Optimizer:
    """An optimizer by its name, on weights of so many bytes an element; ValueError for one whose
    states are unknown."""
    try:
        return _in_bytes(OPTIMIZERS[name], kept_bytes)
    except (KeyError, TypeError):  # unknown, or no name at all
        way_out = "name the one with as many moments as yours, which may be any torch optimizer"
        legal = sorted(OPTIMIZERS)
        raise ArgumentError.refused("optimizer", name, legal=legal, way_out=way_out) from None


def fused(name: str) -> str:
    """The fused kernel of an optimizer, where torch has one, else the optimizer."""
    return name + FUSED if name + FUSED in OPTIMIZERS else name
