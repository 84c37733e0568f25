"""Runs an operator on shards, forward and backward, and compares: does a rule hold?

With a factor split into n parts, part k runs on what it would hold, and the whole is put together:

    has the factor      the parts, joined            gradient: the parts, joined
    has it not          operand: the same for all    gradient: Σ of the parts'
                        result: Σ of the parts'      gradient: the same for all (share of a mean)
    pinned, factor      random parts that sum to     gradient: the same for all
    is summed           the whole

No process group is needed. Factors whose implementation exchanges data by itself are not run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.costmodel.graph import Op, TensorMeta, map_refs
from meshwright.costmodel.rules import Dims, OpFactors, divided, leaf_of, overload, traits_of

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A split that does not give the whole: which factor (or group of partial operands), and what
    was seen."""

    factor: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.factor!r} ({self.kind}): {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results of one call, and gradients of its operands (None where none flows)."""

    results: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]


def meta_of(x: torch.Tensor) -> TensorMeta:
    return TensorMeta(shape=tuple(x.shape), dtype=x.dtype, requires_grad=x.requires_grad)


def called(op: Op, operands: Tensors) -> list[torch.Tensor]:
    """The operator itself; a leaf's own forward."""
    if traits_of(op).leaf:
        return list(leaf_of(op).program(operands))
    given = iter(operands)
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda _: next(given))
    made = overload(op.target)(*args, **kwargs)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def cut_dim(x: torch.Tensor, dim: int, split: int, parts: int, rank: int) -> torch.Tensor:
    """Part `rank` of a dim that is seen as (split, parts, rest)."""
    each = x.shape[dim] // (split * parts)
    shape = (*x.shape[:dim], split, parts, each, *x.shape[dim + 1 :])
    return x.reshape(shape).select(dim + 1, rank).flatten(dim, dim + 1)


def join_dim(pieces: Tensors, dim: int, split: int) -> torch.Tensor:
    """The inverse of `cut_dim`."""
    rows = [
        x.reshape(*x.shape[:dim], split, x.shape[dim] // split, *x.shape[dim + 1 :]) for x in pieces
    ]
    return torch.stack(rows, dim + 1).flatten(dim, dim + 2)


def partials(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Random parts that sum to `x`."""
    noise = [torch.randn_like(x) for _ in range(parts - 1)]
    return [x - sum(noise), *noise]


def perform(op: Op, operands: Tensors, cotangents: Tensors | None, needs: Sequence[bool]) -> Run:
    """One call, and its backward to the operands that need gradients, where there are gradients of
    the results."""
    leaves = [
        x.detach().clone().requires_grad_(need) for x, need in zip(operands, needs, strict=True)
    ]
    results = called(op, [x.view_as(x) if x.requires_grad else x for x in leaves])
    roots = [(y, g) for y, g in zip(results, cotangents or (), strict=False) if y.requires_grad]
    if roots:
        torch.autograd.backward([y for y, _ in roots], [g for _, g in roots])
    return Run(results=tuple(y.detach() for y in results), gradients=tuple(x.grad for x in leaves))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A call on given operands, and the whole to compare with."""

    op: Op
    operands: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]
    needs: tuple[bool, ...]
    whole: Run
    tolerance: float

    @staticmethod
    def of(op: Op, operands: Tensors, needs: Sequence[bool] | None = None) -> Trial:
        """The trial of a call and its backward to the operands that are in `needs`; by default to
        all that torch has a derivative for."""
        shapes = called(op, operands)
        cotangents = tuple(
            torch.randn_like(y) if y.is_floating_point() else y for y in map(torch.detach, shapes)
        )
        if needs is None:
            needs, whole = _differentiated(op, operands, cotangents)
        else:
            whole = perform(op, operands, cotangents, needs)
        dtypes = [x.dtype for x in operands if x.is_floating_point()]
        return Trial(
            op=op,
            operands=tuple(operands),
            cotangents=cotangents,
            needs=tuple(needs),
            whole=whole,
            tolerance=max((TOLERANCES.get(d, 1e-9) for d in dtypes), default=1e-9),
        )

    def repeats(self) -> bool:
        """Whether an equal call gives the same: neither random numbers nor unwritten memory."""
        again = called(self.op, self.operands)
        return all(
            torch.equal(x.detach().nan_to_num(), y.nan_to_num())
            for x, y in zip(again, self.whole.results, strict=True)
        )

    def split_fault(self, made: OpFactors, factor: str, parts: int = 2) -> Fault | None:
        """The fault of splitting a factor; None where the parts give the whole."""
        kind = made.kinds[factor]
        summed = kind in ("sum", "mean")
        share = 1 / parts if kind == "mean" else 1.0
        held = [
            self._cut(x, dims, made, factor, parts) or (
                partials(x, parts) if summed and i in made.pinned else [x] * parts
            )
            for i, (x, dims) in enumerate(zip(self.operands, made.operands, strict=True))
        ]  # fmt: skip
        seeds = [
            self._cut(g, dims, made, factor, parts) or [g * share if summed else g] * parts
            for g, dims in zip(self.cotangents, made.results, strict=True)
        ]
        local = {factor: made.sizes[factor] // parts}
        args, kwargs = divided(self.op, made, self.op.args, self.op.kwargs, local)
        op = replace(self.op, args=tuple(args), kwargs=kwargs)
        try:
            runs = [
                perform(op, [x[k] for x in held], [g[k] for g in seeds], self.needs)
                for k in range(parts)
            ]
        except Exception as error:  # noqa: BLE001 - the operator's own; it is the finding
            return Fault(factor=factor, kind=kind, what=f"a part does not run: {first_line(error)}")
        for what in self._differences(made, factor, runs, share):
            return Fault(factor=factor, kind=kind, what=what)
        return None

    def partial_fault(self, made: OpFactors, group: frozenset[int], parts: int = 2) -> Fault | None:
        """The fault of a set of partial operands; None where the parts give the whole."""
        name = "linear " + " ".join(map(str, sorted(group)))
        held = [
            partials(x, parts) if i in group or i in made.pinned else [x] * parts
            for i, x in enumerate(self.operands)
        ]
        try:
            runs = [
                perform(self.op, [x[k] for x in held], self.cotangents, self.needs)
                for k in range(parts)
            ]
        except Exception as error:  # noqa: BLE001 - the operator's own; it is the finding
            return Fault(
                factor=name, kind="partial", what=f"a part does not run: {first_line(error)}"
            )
        for k, whole in enumerate(self.whole.results):
            if off := self._error([_total([run.results[k] for run in runs])], whole):
                return Fault(factor=name, kind="partial", what=f"result {k} {off}")
        for i, gradient in enumerate(self.whole.gradients):
            if gradient is None:
                continue
            found = [run.gradients[i] for run in runs]
            free = i in group or i in made.pinned
            if off := self._error(found if free else [_total(found)], gradient):
                what = f"the gradient of operand {i} {off}"
                return Fault(factor=name, kind="partial", what=what)
        return None

    def _cut(
        self, x: torch.Tensor, dims: Dims, made: OpFactors, factor: str, parts: int
    ) -> list[torch.Tensor]:
        place = made.place(dims, factor)
        return [cut_dim(x, *place, parts, k) for k in range(parts)] if place else []

    def _differences(
        self, made: OpFactors, factor: str, runs: Sequence[Run], share: float
    ) -> Iterator[str]:
        summed = made.kinds[factor] in ("sum", "mean")
        for k, (result, dims) in enumerate(zip(self.whole.results, made.results, strict=True)):
            found: Sequence[torch.Tensor | None] = [run.results[k] for run in runs]
            if place := made.place(dims, factor):
                found = [_joined(found, *place)]
            elif summed:
                total = _total(found)
                found = [None if total is None else total * share]
            if error := self._error(found, result):
                yield f"result {k} {error}"
        for i, (whole, dims) in enumerate(zip(self.whole.gradients, made.operands, strict=True)):
            if whole is None:
                continue
            found = [run.gradients[i] for run in runs]
            if place := made.place(dims, factor):
                found = [_joined(found, *place)]
            elif not (summed and i in made.pinned):
                found = [_total(found)]
            if error := self._error(found, whole):
                yield f"the gradient of operand {i} {error}"

    def _error(self, found: Sequence[torch.Tensor | None], whole: torch.Tensor) -> str:
        """By how much what was put together misses the whole; empty where it does not."""
        for x in found:
            x = torch.zeros_like(whole) if x is None else x
            if x.shape != whole.shape:
                return f"is of shape {list(x.shape)} where the whole is of {list(whole.shape)}"
            x, y = x.double(), whole.double()
            same = (x == y) | (x.isnan() & y.isnan())  # also what is infinite on both sides
            gap = (x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
            off = float(gap.max()) if gap.numel() else 0.0
            scale = float(y.abs().nan_to_num(0.0, 0.0).max()) if y.numel() else 0.0
            if off > self.tolerance * max(scale, 1.0):
                return f"is off by up to {off:.3g} (its largest element is {scale:.3g})"
        return ""


def _differentiated(op: Op, operands: Tensors, cotangents: Tensors) -> tuple[tuple[bool, ...], Run]:
    """The operands that gradients flow to, and the whole call: all that are floating, or all of
    those that torch has a derivative for by itself."""
    floating = tuple(x.is_floating_point() for x in operands)

    def run(needs: Sequence[bool]) -> Run | None:
        with contextlib.suppress(RuntimeError):
            return perform(op, operands, cotangents, needs)
        return None

    if whole := run(floating):
        return floating, whole
    count = len(floating)
    able = tuple(
        floats and run([k == i for k in range(count)]) is not None
        for i, floats in enumerate(floating)
    )
    if whole := run(able):
        return able, whole
    none = (False,) * count
    return none, perform(op, operands, None, none)


def faults(trial: Trial, made: OpFactors, degrees: Sequence[int] = (2,)) -> list[Fault]:
    """Every split, into as many parts as one of `degrees`, and every partial form that a rule
    allows and that does not hold: at most one fault for each."""
    found: list[Fault] = []
    for factor, parts in splits(made, degrees).items():
        seen = (trial.split_fault(made, factor, n) for n in parts)
        found += itertools.islice(filter(None, seen), 1)
    return found + list(filter(None, (trial.partial_fault(made, group) for group in made.linear)))


def splits(made: OpFactors, degrees: Sequence[int]) -> dict[str, list[int]]:
    """The factors that the operator itself may be split by, each with the `degrees` that divide
    it."""
    return {
        factor: [n for n in degrees if made.sizes[factor] % n == 0]
        for factor, kind in made.kinds.items()
        if kind not in ("whole", "inner") and factor not in made.implementations
    }


def _joined(pieces: Sequence[torch.Tensor | None], dim: int, split: int) -> torch.Tensor | None:
    if any(piece is None for piece in pieces):
        return None
    return join_dim([piece for piece in pieces if piece is not None], dim, split)


def _total(pieces: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [piece for piece in pieces if piece is not None]
    return torch.stack(there).sum(0) if there else None


def first_line(error: Exception) -> str:
    """An operator's own error, for a message."""
    line = (str(error).strip().splitlines() or ["-"])[0]
    return f"{type(error).__name__}: {line[:200]}"


def random_operands(metas: Sequence[TensorMeta], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Normal numbers of a dtype (None: each of its own), flags, and integers that are legal indices
    of any floating dim."""
    sizes = [s for m in metas if m.dtype.is_floating_point for s in m.shape if s > 1]
    below = min(sizes, default=2)
    made = []
    for meta in metas:
        if meta.dtype == torch.bool:
            made.append(torch.rand(meta.shape) < 0.5)
        elif meta.dtype.is_floating_point:
            made.append(torch.randn(meta.shape, dtype=torch.float64).to(dtype or meta.dtype))
        else:
            made.append(torch.randint(0, below, meta.shape, dtype=meta.dtype))
    return made
