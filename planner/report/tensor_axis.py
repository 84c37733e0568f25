"""The tensor axis of a plan: the share of a model that a degree leaves whole, and why; Ulysses.

Of a stage with tp > 1 its ranks share out the FLOPs of the products that the plan splits by a
factor, and the elements of the parameters that it stores in parts; everything else each of them
does, or holds, in full. A product is *excluded* from a degree by a factor that its rule splits
(heads) and that so many ranks can't (25 heads on 8); it runs in full where no other factor of it
can be split instead. One with a weight counts where it runs in full alone: any dim of the weight is
as good as another.

Ulysses is attention whose ranks split the sequence before and after it, and its heads inside. The
intra-op program finds it without knowing the name: of what attention reads or gives, the tensor
axis moves from a dim that has tokens to one that has heads, or back, by an all-to-all (DeepSpeed
Ulysses, arXiv 2309.14509).
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
    indivisible,
    splitting_degrees,
    strategies,
)
from meshwright.planner.pricing import Entered, StageBlocks

TOKENS, HEADS = ("s", "t"), ("heads", "group")  # factors of attention, as its rule names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Products alike that can't be split `degrees` ways by some of their `factors` (name -> size).

    `operators` is their key, repeats as `*`, `count` their number, `flops` their share of the
    model's forward FLOPs; `legal` are degrees that could, `instead` the factors by which the
    degrees can split them otherwise: where there are none, they run in full on every rank.
    """

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
        return (
            f"tp {_either(self.degrees)}: {self.operators}{many}, {self.flops:.0%} of the FLOPs, "
            f"{effect}: {sizes}; degrees that divide: {', '.join(map(str, self.legal)) or 'none'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        lists = {name: list(getattr(self, name)) for name in ("degrees", "legal", "instead")}
        return asdict(self) | lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """Fractions of a stage's forward FLOPs and of its parameters' elements that its tensor axis
    divides."""

    tp: int
    flops: float
    parameters: float


def excluded(graph: Graph, table: FactorTable, degrees: Iterable[int]) -> tuple[Excluded, ...]:
    """Products that some of the tensor-parallel degrees can't split, most FLOPs first."""
    asked = tuple(d for d in degrees if d > 1)
    if not asked:
        return ()
    total = sum(op_flops(table, op) for op in graph.ops)
    found: list[Excluded] = []
    for pattern, ops in _alike(graph, table).items():
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
        weighted = any(value in graph.parameters for value in ops[0].operands)
        for degree in asked:
            factors = _refused(table, ops[0], degree)
            instead = _splits(graph, table, ops[0], degree)
            if factors and not (weighted and instead):
                groups[factors, instead].append(degree)
        for (factors, instead), refused in groups.items():
            legal = {d for f in factors for d in splitting_degrees(graph, table, ops[0], f)}
            found.append(
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
    return tuple(sorted(found, key=lambda e: (bool(e.instead), -e.flops, e.operators)))


def _refused(table: FactorTable, op: Op, degree: int) -> tuple[str, ...]:
    """The factors that so many ranks can't split, of dims none of whose factors they can."""
    made, sizes = table.ops[op.name], indivisible(table, op, degree)
    dims = [dim for tensor in (*made.results, *made.operands) for dim in tensor]
    return tuple(
        dict.fromkeys(
            letter
            for dim in dims
            for letter in dim
            if letter in sizes
            and letter in made.flop_factors
            and all(f in sizes or made.kinds[f] == "whole" for f in dim)
        )
    )


def divided(stages: Sequence[StageBlocks]) -> tuple[Divided, ...]:
    """Shares of each stage that its tensor axis divides."""
    found = []
    for own in stages:
        work = split = 0.0
        parts: dict[str, bool] = {}
        for each in own.blocks if own.stage.tp > 1 else ():
            chosen = each.assignment
            for op in each.block.ops:
                flops = op_flops(own.pricer.table, op)
                work += flops
                split += flops * bool(chosen.strategies[op.name].split_factor)
            parts |= {value: chosen.states[value].sharded for value in each.block.parameters}
        values = own.pricer.graph.values
        held = sum(values[v].numel for v in parts)
        shared = sum(values[v].numel for v, sharded in parts.items() if sharded)
        found.append(
            Divided(
                tp=own.stage.tp,
                flops=split / work if work else 0.0,
                parameters=shared / held if held else 0.0,
            )
        )
    return tuple(found)


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
            possible = any(
                _splits(graph, table, ops[0], tp) for ops in _alike(graph, table).values()
            )
            why = ": no size of a product can be split so many ways"
            if possible:
                why = ": the plan shards nothing"
                if searched:
                    why = ": on these links sharding costs more than it saves"
        notes.append(
            f"tp {tp} divides {flops} of the FLOPs and {parameters} of the parameters{why}"
        )
    return notes


def _alike(graph: Graph, table: FactorTable) -> Mapping[str, list[Op]]:
    """The products of a model, repeats of one size under one name."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[Op]] = defaultdict(list)
    for op in graph.ops:
        made = table.ops[op.name]
        if made.matmul:
            name = re.sub(r"(?<![^.])\d+(?=[.:])", "*", op.key)
            found[name, tuple(sorted(made.sizes.items()))].append(op)
    named: dict[str, list[Op]] = {}
    for (name, _), ops in found.items():
        named[name if name not in named else ops[0].key] = ops
    return named


def _splits(graph: Graph, table: FactorTable, op: Op, degree: int) -> tuple[str, ...]:
    """The factors by which so many ranks can split an operator."""
    options = strategies(graph, table, op, degree)
    return tuple(dict.fromkeys(o.split_factor for o in options if o.split_factor))


def _either(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _span(shares: Sequence[float]) -> str:
    low, high = (f"{share:.0%}" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


# --- Ulysses -------------------------------------------------------------------------------------


def ulysses_notes(stages: Sequence[StageBlocks]) -> list[str]:
    """A line for each tensor-parallel degree that moves attention between tokens and heads."""
    found: dict[int, list[bool]] = {}
    for own in stages:
        for each in own.blocks if own.stage.tp > 1 else ():
            if any(traits_of(op).kernel == "attention" for op in each.block.ops):
                found.setdefault(own.stage.tp, []).append(_exchanges(own.pricer.table, each))
    return [
        f"Ulysses on the tensor axis: tp {tp} splits the sequence around attention and the heads "
        f"inside, by all-to-all, in {sum(has)} of {len(has)} blocks with attention"
        for tp, has in sorted(found.items())
        if any(has)
    ]


def _exchanges(table: FactorTable, found: Entered) -> bool:
    """Whether a block moves a value from the tokens of its attention to the heads, or back."""
    tokens, heads = set[int](), set[int]()
    for op in found.block.ops:
        if traits_of(op).kernel == "attention":
            letters = table.letters[op.name]
            tokens.update(a for name in TOKENS for a in letters.get(name, ()))
            heads.update(a for name in HEADS for a in letters.get(name, ()))

    def split(move: Move, state: Placement) -> set[int]:
        return set(table.dims[move.value][state.dim]) if state.sharded else set()

    steps = (step for step in found.steps if isinstance(step, Move))
    ends = ((split(move, move.source), split(move, move.target)) for move in steps)
    return any(
        (not tokens.isdisjoint(a) and not heads.isdisjoint(b))
        or (not heads.isdisjoint(a) and not tokens.isdisjoint(b))
        for a, b in ends
    )
