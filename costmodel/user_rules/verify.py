"""Verification of a rule: the operator runs on shards, forward and backward, and is compared.

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
    """A split factor (or group of partial operands) whose parts do not give the whole."""

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
    tensors = iter(operands)
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda _: next(tensors))
    results = overload(op.target)(*args, **kwargs)
    return [results] if isinstance(results, torch.Tensor) else list(results)


def cut_dim(x: torch.Tensor, dim: int, split: int, parts: int, rank: int) -> torch.Tensor:
    """Part `rank` of a dim that is seen as (split, parts, rest)."""
    rest = x.shape[dim] // (split * parts)
    shape = (*x.shape[:dim], split, parts, rest, *x.shape[dim + 1 :])
    return x.reshape(shape).select(dim + 1, rank).flatten(dim, dim + 1)


def join_dim(pieces: Tensors, dim: int, split: int) -> torch.Tensor:
    """The inverse of `cut_dim`."""
    rows = [x.unflatten(dim, (split, x.shape[dim] // split)) for x in pieces]
    return torch.stack(rows, dim + 1).flatten(dim, dim + 2)


def partials(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Random parts that sum to `x`."""
    noise = [torch.randn_like(x) for _ in range(parts - 1)]
    return [x - sum(noise), *noise]


def perform(op: Op, operands: Tensors, cotangents: Tensors | None, needs: Sequence[bool]) -> Run:
    """One call, and its backward from `cotangents`, if any, to the operands that need gradients."""
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
        """The trial of a call and its backward to the operands in `needs`, or all that can."""
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

    def split_fault(self, rule: OpFactors, factor: str, parts: int = 2) -> Fault | None:
        """The fault of splitting a factor; None where the parts give the whole."""
        kind = rule.kinds[factor]
        summed = kind in ("sum", "mean")
        share = 1 / parts if kind == "mean" else 1.0
        held = [
            self._cut(x, dims, rule, factor, parts) or (
                partials(x, parts) if summed and i in rule.pinned else [x] * parts
            )
            for i, (x, dims) in enumerate(zip(self.operands, rule.operands, strict=True))
        ]  # fmt: skip
        seeds = [
            self._cut(g, dims, rule, factor, parts) or [g * share if summed else g] * parts
            for g, dims in zip(self.cotangents, rule.results, strict=True)
        ]
        local = {factor: rule.sizes[factor] // parts}
        args, kwargs = divided(self.op, rule, self.op.args, self.op.kwargs, local)
        op = replace(self.op, args=tuple(args), kwargs=kwargs)
        try:
            runs = [
                perform(op, [x[k] for x in held], [g[k] for g in seeds], self.needs)
                for k in range(parts)
            ]
        except Exception as error:  # noqa: BLE001 - the operator's own; it is the finding
            return Fault(factor=factor, kind=kind, what=f"a part does not run: {first_line(error)}")
        for what in self._differences(rule, factor, runs, share):
            return Fault(factor=factor, kind=kind, what=what)
        return None

    def partial_fault(self, rule: OpFactors, group: frozenset[int], parts: int = 2) -> Fault | None:
        """The fault of a set of partial operands; None where the parts give the whole."""
        name = "linear " + " ".join(map(str, sorted(group)))
        held = [
            partials(x, parts) if i in group or i in rule.pinned else [x] * parts
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
        for k, result in enumerate(self.whole.results):
            if off := self._error([_total([run.results[k] for run in runs])], result):
                return Fault(factor=name, kind="partial", what=f"result {k} {off}")
        for i, gradient in enumerate(self.whole.gradients):
            if gradient is None:
                continue
            parts_of = [run.gradients[i] for run in runs]
            free = i in group or i in rule.pinned
            if off := self._error(parts_of if free else [_total(parts_of)], gradient):
                what = f"the gradient of operand {i} {off}"
                return Fault(factor=name, kind="partial", what=what)
        return None

    def _cut(
        self, x: torch.Tensor, dims: Dims, made: OpFactors, factor: str, parts: int
    ) -> list[torch.Tensor]:
        place = made.place(dims, factor)
        return [cut_dim(x, *place, parts, k) for k in range(parts)] if place else []

    def _differences(
        self, rule: OpFactors, factor: str, runs: Sequence[Run], share: float
    ) -> Iterator[str]:
        summed = rule.kinds[factor] in ("sum", "mean")
        for k, (result, dims) in enumerate(zip(self.whole.results, rule.results, strict=True)):
            pieces: Sequence[torch.Tensor | None] = [run.results[k] for run in runs]
            if place := rule.place(dims, factor):
                pieces = [_joined(pieces, *place)]
            elif summed:
                total = _total(pieces)
                pieces = [None if total is None else total * share]
            if error := self._error(pieces, result):
                yield f"result {k} {error}"
        for i, (gradient, dims) in enumerate(zip(self.whole.gradients, rule.operands, strict=True)):
            if gradient is None:
                continue
            pieces = [run.gradients[i] for run in runs]
            if place := rule.place(dims, factor):
                pieces = [_joined(pieces, *place)]
            elif not (summed and i in rule.pinned):
                pieces = [_total(pieces)]
            if error := self._error(pieces, gradient):
                yield f"the gradient of operand {i} {error}"

    def _error(self, pieces: Sequence[torch.Tensor | None], full: torch.Tensor) -> str:
        """Largest difference of the joined pieces from the whole; empty where there is none."""
        for x in pieces:
            x = torch.zeros_like(full) if x is None else x
            if x.shape != full.shape:
                return f"is of shape {list(x.shape)} where the whole is of {list(full.shape)}"
            x, y = x.double(), full.double()
            same = (x == y) | (x.isnan() & y.isnan())  # also what is infinite on both sides
            gap = (x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
            off = float(gap.max()) if gap.numel() else 0.0
            scale = float(y.abs().nan_to_num(0.0, 0.0).max()) if y.numel() else 0.0
            if off > self.tolerance * max(scale, 1.0):
                return f"is off by up to {off:.3g} (its largest element is {scale:.3g})"
        return ""


def _differentiated(op: Op, operands: Tensors, cotangents: Tensors) -> tuple[tuple[bool, ...], Run]:
    """Operands that gradients flow to, and the whole call: all floating ones, or those that torch
    has a derivative for by itself."""
    floating = tuple(x.is_floating_point() for x in operands)

    def run(needs: Sequence[bool]) -> Run | None:
        with contextlib.suppress(RuntimeError):
            return perform(op, operands, cotangents, needs)
        return None

    if complete := run(floating):
        return floating, complete
    count = len(floating)
    able = tuple(
        floats and run([k == i for k in range(count)]) is not None
        for i, floats in enumerate(floating)
    )
    if complete := run(able):
        return able, complete
    none = (False,) * count
    return none, perform(op, operands, None, none)


def faults(trial: Trial, rule: OpFactors, degrees: Sequence[int] = (2,)) -> list[Fault]:
    """Faults of every split and of every partial form that a rule allows, at most one each."""
    wrong: list[Fault] = []
    for factor, parts in splits(rule, degrees).items():
        seen = (trial.split_fault(rule, factor, n) for n in parts)
        wrong += itertools.islice(filter(None, seen), 1)
    return wrong + list(filter(None, (trial.partial_fault(rule, group) for group in rule.linear)))


def splits(rule: OpFactors, degrees: Sequence[int]) -> dict[str, list[int]]:
    """Factors that the operator itself may be split by, each with the `degrees` that divide it."""
    return {
        factor: [n for n in degrees if rule.sizes[factor] % n == 0]
        for factor, kind in rule.kinds.items()
        if kind not in ("whole", "inner") and factor not in rule.implementations
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
    """Normal numbers of a dtype (None: their own), flags, and legal indices."""
    sizes = [s for m in metas if m.dtype.is_floating_point for s in m.shape if s > 1]
    below = min(sizes, default=2)
    operands = []
    for meta in metas:
        if meta.dtype == torch.bool:
            operands.append(torch.rand(meta.shape) < 0.5)
        elif meta.dtype.is_floating_point:
            operands.append(torch.randn(meta.shape, dtype=torch.float64).to(dtype or meta.dtype))
        else:
            operands.append(torch.randint(0, below, meta.shape, dtype=meta.dtype))
    return operands
