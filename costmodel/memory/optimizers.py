"""Optimizers: what each keeps, moves and makes for a parameter.

torch runs Adam and AdamW kernel by kernel unless `fused=True` is said, on GPUs over all parameters
at once (`torch.optim.adamw._multi_tensor_adamw`): weights decay (2 words read or written), both
moments are updated (3; 2 and 3), the roots of the second are made and corrected (2, 2, 2), and
weights are updated (4), in all 20 words of fp32; and the roots of all parameters lie there at once.
The fused kernel reads weight, gradient and moments, and writes all but the gradient: 7 words, and
nothing beside. On a CPU the same goes on parameter by parameter, in 3 to 5 times the seconds of the
fused kernel. 8-bit states are updated by a kernel a tensor (bitsandbytes). Of
weights in bf16 all of these words are halves, but where an optimizer has a type of its own for
moments. LAMB and LARS are ours (`meshwright.optim`), and go parameter by parameter, as each has a
rate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from meshwright.costmodel.precisions import FP32
from meshwright.profiles.inputs import ArgumentError

FUSED = "_fused"
DTENSOR_ISSUES = 3.0  # of an operator on distributed tensors, beside one on plain ones (20, 7 us)
_WORDS = 3  # of a weight that is read and written, and of its gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes a parameter: its weight, and its gradient, each `kept_bytes`; its `moments`, of their
    type or (`typed`) of one of their own; what a step reads and writes (`moved`), and what it makes
    beside that on a GPU, of all parameters at once (`temporary`); on a CPU, or wherever it goes
    `one_by_one`, so many `tensors` of the size of one parameter, by so many `operators`."""

    moments: int
    moved: int
    temporary: int = 0
    tensors: int = 0
    operators: int = 0
    typed: bool = False
    one_by_one: bool = False
    kept_bytes: int = FP32

    @property
    def state_bytes(self) -> int:
        """Bytes of weight and moments, which undo a wrong step."""
        return self.kept_bytes + self.moments

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
    "lamb": Optimizer(moments=8, moved=116, tensors=2, operators=15, one_by_one=True),
    "lars": Optimizer(moments=4, moved=60, tensors=1, operators=9, one_by_one=True),
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
