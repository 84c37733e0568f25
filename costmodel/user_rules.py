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
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from meshwright.costmodel.graph import Graph, Op, TensorMeta, map_refs
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.rules import (
    Dims,
    OpFactors,
    RuleError,
    UserRule,
    divided,
    leaf_of,
    named_in,
    overload,
    place_of,
    traits_of,
)
from meshwright.costmodel.rules import registry as rules
from meshwright.profiles.inputs.limits import checked_booleans

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


def make_known(
    ops: Iterable[Op], values: dict[str, torch.Tensor], known: Mapping[str, torch.Tensor]
) -> bool:
    """Whether operators make what is `known` of these values, to which their results are added as
    far as that holds. Operators that can't run on them make something else."""
    if not all(_same(values[n], x) for n, x in known.items() if n in values):
        return False
    for op in ops:
        try:
            with torch.no_grad():
                results = called(op, [values[n] for n in op.operands])
        except (RuntimeError, IndexError, ValueError):
            return False
        values |= dict(zip(op.results, results, strict=True))
        if not all(_same(values[n], known[n]) for n in op.results if n in known):
            return False
    return True


def _same(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have the same elements, numbers or not."""
    if x.shape != other.shape:
        return False
    return bool(((x == other) | ((x != x) & (other != other))).all())


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
        same = {*group, *rule.pinned}
        for what in self.gradient_differences(runs, [None] * len(self.operands), same):
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
        places = [rule.place(dims, factor) for dims in rule.operands]
        yield from self.gradient_differences(runs, places, rule.pinned if summed else ())

    def gradient_differences(
        self, runs: Sequence[Run], places: Sequence[Place | None], same: Collection[int]
    ) -> Iterator[str]:
        """Gradients of operands that differ from the whole's: of those with a place the parts are
        joined there, of those in `same` each is the whole, of others the parts are summed."""
        for i, (gradient, place) in enumerate(zip(self.whole.gradients, places, strict=True)):
            if gradient is None:
                continue
            pieces: Sequence[torch.Tensor | None] = [run.gradients[i] for run in runs]
            if place:
                pieces = [_joined(pieces, *place)]
            elif i not in same:
                pieces = [_total(pieces)]
            if error := self._error(pieces, gradient):
                yield f"the gradient of operand {i} {error}"

    def relation(self, whole: torch.Tensor, pieces: Tensors) -> Relation:
        """A result beside those of parts of the rows."""
        if not self._error(pieces, whole):
            return "constant"
        part = pieces[0].shape
        if len(part) != whole.dim():
            return "met"
        for dim in (d for d, size in enumerate(whole.shape) if size != part[d]):
            for before in (n for n in range(1, part[dim] + 1) if part[dim] % n == 0):
                if not self._error([join_dim(pieces, dim, before)], whole):
                    return dim, before
        if part != whole.shape:
            return "met"
        total = torch.stack([*pieces]).double().sum(0)
        if not self._error([total], whole.double()):
            return "sum"
        return "met" if self._error([total / len(pieces)], whole.double()) else "mean"

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


# --- rows of calls without a rule -----------------------------------------------------------------

Place = tuple[int, int]  # of rows in a tensor: the dim, and its major parts before them
Relation = Place | Literal["sum", "mean", "constant", "met"]

LARGEST_TRIAL = 2**22  # elements of all operands together
MOST_PARTS = 7


def relations_of_rows(
    op: Op, operands: Sequence[TensorMeta], rows: Mapping[int, Place], count: int
) -> tuple[Relation, ...]:
    """The results of a call on `count` rows beside those of its parts, by trial on random numbers.

    `rows` has the places of rows in operands, by position. Of each result: the place of its rows,
    each made of its own row alone, forward and backward; whether it is the sum or the mean of the
    parts'; the same in each; or none of it. Empty where the call can't be tried: more than
    `LARGEST_TRIAL` elements, random draws, random numbers or parts that it does not take.
    """
    parts = next((n for n in range(2, MOST_PARTS + 1) if count % n == 0), 0)
    if not parts or sum(meta.numel for meta in operands) > LARGEST_TRIAL:
        return ()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for dtype in (torch.float64, torch.float32, None):
            with contextlib.suppress(Exception):  # the operator's own: another may run
                return _relations(op, random_operands(operands, dtype), rows, parts)
    return ()


def _relations(
    op: Op, operands: Tensors, rows: Mapping[int, Place], parts: int
) -> tuple[Relation, ...]:
    trial = Trial.of(op, operands)
    if not trial.repeats():
        return ()
    held = [
        [cut_dim(x, *rows[i], parts, k) if i in rows else x for i, x in enumerate(operands)]
        for k in range(parts)
    ]
    pieces = [[y.detach() for y in called(op, of_part)] for of_part in held]
    columns = zip(trial.whole.results, zip(*pieces, strict=True), strict=True)
    relations = tuple(trial.relation(whole, of_parts) for whole, of_parts in columns)
    if not all(isinstance(relation, tuple) for relation in relations):
        return relations
    places = [relation for relation in relations if isinstance(relation, tuple)]
    runs = []
    for k, of_part in enumerate(held):
        pairs = zip(trial.cotangents, places, strict=True)
        seeds = [cut_dim(g, *place, parts, k) for g, place in pairs]
        runs.append(perform(op, of_part, seeds, trial.needs))
    given = [rows.get(i) for i in range(len(operands))]
    if any(trial.gradient_differences(runs, given, ())):
        return tuple("met" for _ in relations)
    return relations


# --- rules added ----------------------------------------------------------------------------------

# `meshwright.rule`: a sharding rule for an operator, added in one line and verified before use.


logger = logging.getLogger(__name__)

_TRIED = Memo[str, str]()  # rules on calls: why they were not verified, empty where they hold

SMALL = 6  # elements of a factor in a trial: two odd parts, three even ones; none broadcasts
DEGREES = (2, 3, 5, 7)  # parts tried, where they divide a factor
DISCOVER = "scripts/discover_rule proposes a rule"


@checked_booleans
def rule(
    operator: Any,
    spec: str,
    *,
    whole: str = "",
    mean: str = "",
    pinned: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    flops: float = 0.0,
    uncounted: str = "",
    counts: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    override: bool = False,
    verify: bool = True,
) -> None:
    """Say how an operator can be split: `rule("mylib::op", "b s h, h o -> b s o", flops=2.0)`.

    `operator` is a name, with or without the overload, or the operator. `spec` names the dims of
    every tensor taken and made (its language: `costmodel/rules/language.py`): a factor splits in
    all tensors that have it; one that no result has is summed, or averaged if `mean` lists it;
    those listed in `whole` are never split, nor is `_`, nor tensors whose terms at the end are left
    out. `pinned` operands are added once to a sum (biases),
    those of a set in `linear` may be partial together. Forward FLOPs are `flops` times the product
    of all factors but the `uncounted`. `counts` maps integer arguments to the factor that they
    count.

    The rule is verified on small random tensors in two and in three parts, forward and backward,
    where a model that has the operator is planned, unless `verify` is False; factors are only split
    into equal parts. A rule that is shipped is replaced only with `override`. Raises RuleError.
    """
    target = target_of(operator)
    added = UserRule(
        target=target,
        spec=spec,
        options={
            "whole": whole,
            "mean": mean,
            "pinned": tuple(pinned),
            "linear": tuple(map(tuple, linear)),
            "flops": flops,
            "uncounted": uncounted,
            "counts": dict(counts or {}),
            "sizes": dict(sizes or {}),
        },
        verify=verify,
    )
    _check_spec(added)
    if not override and rules.shipped_rule_for(_bare(target)) is not None:
        raise RuleError(
            "there is one already",
            place=f"rule of {target}",
            legal="one rule",
            way_out="pass override=True to use yours in its place",
        )
    rules.GIVEN[target] = added


def target_of(operator: Any) -> str:
    """`mylib.op` or `mylib.op.overload`."""
    if isinstance(operator, torch._ops.OpOverload):
        return str(operator)
    name = getattr(operator, "_qualname", None) or getattr(operator, "_qualified_op_name", operator)
    if not isinstance(name, str):
        raise RuleError(
            f"{operator!r:.60} is no operator", place="rule", legal="'namespace::name' or it"
        )
    parts = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None) if len(parts) in (2, 3) else None
    if packet is None or (len(parts) == 3 and parts[2] not in packet.overloads()):
        known = ", ".join(packet.overloads()) if packet is not None else "registered operators"
        raise RuleError(
            f"no operator {name!r}",
            place="rule",
            legal=f"{known}, as 'namespace::name'",
            way_out="Register it with torch.library.custom_op before its rule is given",
        )
    return ".".join(parts)


def overload_of(target: str) -> str:
    """`mylib.op` -> `mylib.op.default`, or the first overload there is."""
    parts = target.split(".")
    if len(parts) == 3:
        return target
    names = getattr(getattr(torch.ops, parts[0]), parts[1]).overloads()
    return f"{target}.{'default' if 'default' in names else names[0]}"


def _bare(target: str) -> Op:
    """A call of an operator without arguments."""
    return Op(name="", target=overload_of(target), args=(), kwargs={}, results=())


def _check_spec(added: UserRule) -> None:
    """Raise RuleError for a spec that fits no call: syntax, names, operand numbers, counts."""
    place = f"rule of {added.target}, {added.spec!r}"
    named = named_in(added.spec, f"rule of {added.target}")
    left = added.spec.split("->")[0].split(",")
    stars = {name[1:] for name in named if name.startswith("*")}
    patterns = {name: added.options.get(name, "") for name in ("whole", "mean", "uncounted")}
    for option, listed in patterns.items():
        for pattern in str(listed).split():
            _check_pattern(pattern, f"{place}: {option}={pattern!r}")
            hits = any(re.fullmatch(pattern, name) for name in named)
            if not hits and not any(pattern.startswith(star) for star in stars):
                raise RuleError(
                    f"={pattern!r} is no factor", place=f"{place}: {option}", legal=sorted(named)
                )
    most = _most_operands(added.target)
    if most is not None and len(left) > most:
        raise RuleError(
            f"{len(left)} operands, but the operator takes {most} at most",
            place=place,
            legal=f"up to {most} operands",
        )
    indices = {*added.options["pinned"], *(i for g in added.options["linear"] for i in g)}
    if wrong := [i for i in indices if not 0 <= i < len(left)]:
        raise RuleError(
            f"operand {wrong[0]} of pinned or linear", place=place, legal=f"below {len(left)}"
        )
    for name, factor in added.options["counts"].items():
        try:
            place_of(_bare(added.target), name)
        except ValueError as error:
            raise RuleError(f"counts: {error}", place=place) from None
        if factor not in named:
            raise RuleError(f"counts: {factor!r} is no factor", place=place, legal=sorted(named))


def _check_pattern(pattern: str, place: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise RuleError(
            f" is no regular expression: {error}", place=place, legal="a regular expression"
        ) from None


def _most_operands(target: str) -> int | None:
    """The most tensors that an operator takes; None where it takes lists of them."""
    namespace, name, *overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    most = 0
    for version in overload or packet.overloads():
        types = [str(a.type) for a in getattr(packet, version)._schema.arguments]
        if any("List[" in t and "Tensor" in t for t in types):
            return None
        most = max(most, sum("Tensor" in t for t in types))
    return most


# --- verification --------------------------------------------------------------------------------


def verified(graph: Graph) -> Graph:
    """The graph, with notes of users' rules that could not be tried; RuleError for a wrong one."""
    notes: dict[str, None] = {}
    for op in (*graph.derived, *graph.ops):
        added = rules.given_for(op.target)
        if added is None:
            continue
        operands = [graph.values[v] for v in op.operands]
        factors = added.rule(op, operands, [graph.values[v] for v in op.results])
        if not added.verify:
            continue
        call = map_refs((op.args, op.kwargs), lambda _: "")
        key = repr((added, op.target, call, operands, factors))
        if why := _TRIED.of(key, partial(verify_call, added, op, operands, factors)):
            notes[f"the rule of {added.target} was not verified in full: {why}"] = None
    return replace(graph, notes=(*graph.notes, *notes)) if notes else graph


def verify_call(added: UserRule, op: Op, operands: Sequence[TensorMeta], factors: OpFactors) -> str:
    """Try a rule on random tensors shaped like one call's, small where the operator allows it; the
    part that can't be tried, and why. The numbers are the same on every rank, not the caller's."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return _verify_call(added, op, operands, factors)


def _verify_call(
    added: UserRule, op: Op, operands: Sequence[TensorMeta], factors: OpFactors
) -> str:
    why = ""
    needs = [meta.requires_grad for meta in operands]
    for sizes in _trial_sizes(factors, added.options["sizes"]):
        pairs = zip(operands, factors.operands, strict=True)
        small = [_resized(meta, dims, sizes) for meta, dims in pairs]
        if sum(meta.numel for meta in small) > LARGEST_TRIAL:
            why = why or f"it does not run on less than {LARGEST_TRIAL} elements"
            continue
        args, kwargs = divided(op, factors, op.args, op.kwargs, sizes)
        call = replace(op, args=tuple(args), kwargs=kwargs)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            try:
                trial = Trial.of(call, random_operands(small, dtype), needs)
            except Exception as error:  # noqa: BLE001 - any: the next trial may run
                why = first_line(error)
                continue
            return _judge(added, call, trial)
    return why


def _judge(added: UserRule, call: Op, trial: Trial) -> str:
    """The part of a rule that was not tried, in words; RuleError where it does not hold."""
    metas = [meta_of(x) for x in trial.operands]
    local = added.rule(call, metas, [meta_of(y) for y in trial.whole.results])
    if wrong := faults(trial, local, DEGREES):
        raise RuleError(wrong_rule(added, local, wrong))
    logger.debug("rule of %s holds: %s", added.target, added.spec)
    for factor, parts in splits(local, DEGREES).items():
        if not parts:
            return f"factor {factor!r} of {local.sizes[factor]} elements was not split"
    gradients = any(gradient is not None for gradient in trial.whole.gradients)
    floating = any(y.is_floating_point() for y in trial.whole.results)
    return "no gradient flows to its operands" if floating and not gradients else ""


def wrong_rule(added: UserRule, factors: OpFactors, wrong: Sequence[Fault]) -> str:
    bad = {fault.factor for fault in wrong}
    good = [f for f, kind in factors.kinds.items() if kind != "whole" and f not in bad]
    return (
        f"rule of {added.target}, {added.spec!r}, does not hold: split, factor "
        f"{'; factor '.join(map(str, wrong))}. Factors that hold: {', '.join(good) or 'none'}. "
        f"List the wrong ones in whole=, or correct the spec; {DISCOVER}"
    )


def _trial_sizes(factors: OpFactors, spec_sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes of the factors to try, the smallest first; some operators want those they have."""
    unsplit = {n: size for n, size in factors.sizes.items() if factors.kinds[n] == "whole"}
    small = {n: spec_sizes.get(n, min(unsplit.get(n, SMALL), SMALL)) for n in factors.sizes}
    return [small, {**small, **unsplit}, dict(factors.sizes)]


def _resized(meta: TensorMeta, dims: Dims, sizes: Mapping[str, int]) -> TensorMeta:
    return replace(meta, shape=tuple(math.prod(sizes[name] for name in dim) for dim in dims))
