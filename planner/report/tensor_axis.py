"""The tensor axis of a plan: the share of a model that it divides, and what it can't; Ulysses.

The ranks of a tensor axis share out the FLOPs of the products that the plan splits by a factor, and
the elements of the parameters that it stores in parts. A product is *excluded* from a degree by a
factor that its rule splits (heads) and that so many ranks can't (25 heads on 8); it runs in full
where no other factor of it can be split instead. One with a weight counts only where it runs in
full: any dim of the weight is as good as another.

Ulysses (DeepSpeed, arXiv 2309.14509) is attention whose ranks split the sequence before and after
it, and its heads inside: an all-to-all from a dim with tokens to one with heads, or back.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators import op_flops
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import (
    FactorTable,
    Move,
    Placement,
    Step,
    indivisible,
    splitting_degrees,
    strategies,
)
from meshwright.planner.pricing import StageBlocks

TOKENS, HEADS = ("s", "t"), ("heads", "group")  # factors of attention, as its rule names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Equal products that can't be split `degrees` ways by some of their `factors` (name -> size):
    their key, repeats as `*`, their number and share of the model's forward FLOPs, the `legal`
    degrees, and the factors by which the degrees can split them `instead`; where there are none,
    they run in full on every rank."""

    operators: str
    count: int
    flops: float
    factors: Mapping[str, int]
    degrees: tuple[int, ...]
    legal: tuple[int, ...]
    instead: tuple[str, ...]

    def __str__(self) -> str:
        many = f", {self.count} times" if self.count > 1 else ""
        effect = "runs in full on every rank"
        if self.instead:
            effect = f"is split by {', '.join(self.instead)} or not at all"
        sizes = ", ".join(f"{name} = {size}" for name, size in self.factors.items())
        *first, last = map(str, self.degrees)
        degrees = f"{', '.join(first)} or {last}" if first else last
        return (
            f"tp {degrees}: {self.operators}{many}, {self.flops:.0%} of the FLOPs, "
            f"{effect}: {sizes}; degrees that divide: {', '.join(map(str, self.legal)) or 'none'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        data = asdict(self)
        return data | {name: list(data[name]) for name in ("degrees", "legal", "instead")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """Fractions of a stage's forward FLOPs and of its parameters' elements that its tensor axis
    divides."""

    tp: int
    flops: float
    parameters: float


def excluded(graph: Graph, table: FactorTable, degrees: Iterable[int]) -> tuple[Excluded, ...]:
    """Products that some of the tensor-parallel degrees can't split, most FLOPs first."""
    degrees = [degree for degree in degrees if degree > 1]
    if not degrees:
        return ()
    total = sum(op_flops(table, op) for op in graph.ops)
    products: list[Excluded] = []
    for pattern, ops in _alike(graph, table).items():
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
        weighted = any(value in graph.parameters for value in ops[0].operands)
        for degree in degrees:
            factors = _refused(table, ops[0], degree)
            instead = _splits(graph, table, ops[0], degree)
            if factors and not (weighted and instead):
                groups[factors, instead].append(degree)
        for (factors, instead), refused in groups.items():
            legal = {d for f in factors for d in splitting_degrees(graph, table, ops[0], f)}
            products.append(
                Excluded(
                    operators=pattern,
                    count=len(ops),
                    flops=sum(op_flops(table, op) for op in ops) / total,
                    factors={f: table.ops[ops[0].name].sizes[f] for f in factors},
                    degrees=tuple(refused),
                    legal=tuple(sorted(legal)),
                    instead=instead,
                )
            )
    return tuple(sorted(products, key=lambda e: (bool(e.instead), -e.flops, e.operators)))


def _refused(table: FactorTable, op: Op, degree: int) -> tuple[str, ...]:
    """The factors that so many ranks can't split, of dims none of whose factors they can."""
    factors, sizes = table.ops[op.name], indivisible(table, op, degree)
    dims = [dim for tensor in (*factors.results, *factors.operands) for dim in tensor]
    unsplit = [dim for dim in dims if all(f in sizes or factors.kinds[f] == "whole" for f in dim)]
    letters = dict.fromkeys(letter for dim in unsplit for letter in dim)
    return tuple(f for f in letters if f in sizes and f in factors.flop_factors)


def divided(stages: Sequence[StageBlocks]) -> tuple[Divided, ...]:
    """Shares of each stage that its tensor axis divides."""
    shares = []
    for priced in stages:
        work = split = 0.0
        sharded: dict[str, bool] = {}
        for entered in priced.blocks if priced.stage.tp > 1 else ():
            assignment, block = entered.assignment, entered.block
            for op in block.ops:
                flops = op_flops(priced.pricer.table, op)
                work += flops
                split += flops * bool(assignment.strategies[op.name].split_factor)
            sharded |= {value: assignment.states[value].sharded for value in block.parameters}
        numel = {value: priced.pricer.graph.values[value].numel for value in sharded}
        total, part = sum(numel.values()), sum(numel[v] for v in sharded if sharded[v])
        shares.append(
            Divided(
                tp=priced.stage.tp,
                flops=split / work if work else 0.0,
                parameters=part / total if total else 0.0,
            )
        )
    return tuple(shares)


def divided_notes(
    shares: Sequence[Divided], graph: Graph, table: FactorTable, *, searched: bool
) -> list[str]:
    """A line for each tensor-parallel degree of a plan; of one that divides nothing, why."""
    notes = []
    for tp in sorted({share.tp for share in shares} - {1}):
        of = [share for share in shares if share.tp == tp]
        flops, parameters = _span([s.flops for s in of]), _span([s.parameters for s in of])
        why = ""
        if not any(share.flops or share.parameters for share in of):
            products = _alike(graph, table).values()
            why = ": no size of a product can be split so many ways"
            if any(_splits(graph, table, ops[0], tp) for ops in products):
                why = ": the plan shards nothing"
                if searched:
                    why = ": on these links sharding costs more than it saves"
        notes.append(
            f"tp {tp} divides {flops} of the FLOPs and {parameters} of the parameters{why}"
        )
    return notes


def _alike(graph: Graph, table: FactorTable) -> Mapping[str, list[Op]]:
    """The products of a model, repeats of one size under one name."""
    by_size: dict[tuple[str, tuple[tuple[str, int], ...]], list[Op]] = defaultdict(list)
    for op in graph.ops:
        factors = table.ops[op.name]
        if factors.matmul:
            name = re.sub(r"(?<![^.])\d+(?=[.:])", "*", op.key)
            by_size[name, tuple(sorted(factors.sizes.items()))].append(op)
    named: dict[str, list[Op]] = {}
    for (name, _), ops in by_size.items():
        named[name if name not in named else ops[0].key] = ops
    return named


def _splits(graph: Graph, table: FactorTable, op: Op, degree: int) -> tuple[str, ...]:
    """The factors by which so many ranks can split an operator."""
    options = strategies(graph, table, op, degree)
    return tuple(dict.fromkeys(o.split_factor for o in options if o.split_factor))


def _span(shares: Sequence[float]) -> str:
    low, high = (f"{share:.0%}" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


# --- Ulysses -------------------------------------------------------------------------------------


def ulysses_notes(stages: Sequence[StageBlocks]) -> list[str]:
    """A line for each tensor-parallel degree that moves attention between tokens and heads."""
    by_degree = defaultdict[int, list[bool]](list)
    for priced in stages:
        for entered in priced.blocks if priced.stage.tp > 1 else ():
            attention = [op for op in entered.block.ops if traits_of(op).kernel == "attention"]
            if attention:
                exchanges = _exchanges(priced.pricer.table, attention, entered.steps)
                by_degree[priced.stage.tp].append(exchanges)
    return [
        f"Ulysses on the tensor axis: tp {tp} splits the sequence around attention and the heads "
        f"inside, by all-to-all, in {sum(has)} of {len(has)} blocks with attention"
        for tp, has in sorted(by_degree.items())
        if any(has)
    ]


def _exchanges(table: FactorTable, attention: Sequence[Op], steps: Sequence[Step]) -> bool:
    """Whether some step moves a value from the tokens of attention to its heads, or back."""
    tokens, heads = (
        {a for op in attention for name in names for a in table.letters[op.name].get(name, ())}
        for names in (TOKENS, HEADS)
    )

    def split(move: Move, state: Placement) -> set[int]:
        return set(table.dims[move.value][state.dim]) if state.sharded else set()

    moves = (step for step in steps if isinstance(step, Move))
    ends = ((split(move, move.source), split(move, move.target)) for move in moves)
    return any((tokens & a and heads & b) or (heads & a and tokens & b) for a, b in ends)
