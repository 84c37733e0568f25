"""Strategies: what one mesh axis may do to one operator, and what moving between layouts costs.

Per mesh axis a tensor, value and gradient together, is in one of the states

    R   (replicated, replicated)      Rp  (replicated, partial): the gradient is still to be summed
    P   (partial, replicated)         S   (split, split) along one atom of one dim

An operator's strategies are: replicated; split along one atom of one factor; or partial, where it
is linear.

n ranks split an atom of s elements evenly where n divides s. Where it doesn't, as 50,257 words, an
atom that is `FactorTable.alone` is cut as by torch's `Shard`: ⌈s/n⌉ elements each, the rest for the
last rank, not none. Prices count the largest part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import Dims, traits_of
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.profiles.inputs import MeshwrightError


class ShardingError(MeshwrightError):
    """A sharding that an operator or a tensor can't have."""

    CODE = "MW207"
    PLACE = "a sharding of a plan, or of an override"
    LEGAL = "the decisions that the message lists for the operator"
    WAY_OUT = "name one of them, or leave it free"


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """State of a tensor on one mesh axis. For `S`, dim `dim` is seen as (split, n, rest) and n is
    divided: `split == 1` is torch's `Shard(dim)`, else a shard inside each of `split` parts (fused
    projections)."""

    kind: str
    dim: int = -1
    split: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.split == 1 else f"S({self.dim}/{self.split})"

    @staticmethod
    def parse(text: str) -> Placement:
        """`R`, `P`, `Rp`, `S(dim)` or `S(dim/parts)`."""
        match = re.fullmatch(r"(R|P|Rp)|S\((\d+)(?:/(\d+))?\)", text.strip())
        if not match:
            raise ShardingError(
                " can't be read",
                place=f"placement {text!r:.80}",
                legal="R, P, S(dim) or S(dim/parts)",
            )
        if match[1]:
            return Placement(match[1])
        return Placement("S", int(match[2]), int(match[3] or 1))

    @property
    def sharded(self) -> bool:
        return self.kind == "S"


R, RP, P = Placement("R"), Placement("Rp"), Placement("P")
REPLICATE, PARTIAL = "replicate", "partial"
COPY_DIMS = 3  # batch, sequence, copy: they stand in front of what experts work on
# the field's names for the two ways to split a matrix product
ALIASES = {"colwise": "out", "rowwise": "in"}
DISPLAY = {factor: alias for alias, factor in ALIASES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run an operator on one mesh axis. `name` is the `split_factor` (with `.k` for the
    k-th atom of a factor that has several), `replicate` or `partial`."""

    name: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    split_factor: str = ""
    implementation: str = ""


def largest_part(size: int, degree: int) -> int:
    """Elements of the largest of `degree` parts of a dim."""
    return -(-size // degree)


def divides(table: FactorTable, atom: int, degree: int) -> bool:
    """Whether `degree` ranks can split an atom, each getting a part."""
    size = table.sizes[atom]
    if size % degree == 0:
        return size > 0
    return atom in table.alone and (degree - 1) * largest_part(size, degree) < size


def can_hold(graph: Graph, table: FactorTable, value: str, state: Placement, degree: int) -> bool:
    """Whether `degree` ranks can hold a value in a state."""
    if not state.sharded:
        return True
    shape = graph.values[value].shape
    if state.dim >= len(shape):
        return False
    atoms = table.dims[value][state.dim]
    if state.split == 1 and len(atoms) == 1:
        return divides(table, atoms[0], degree)
    return shape[state.dim] % (state.split * degree) == 0


def strategies(
    graph: Graph, table: FactorTable, op: Op, degree: int, *, only: int | None = None
) -> list[Strategy]:
    """The legal strategies of `op` on an axis of `degree` ranks, replicated first. `only` keeps the
    splits of one atom (the data axis passes the batch); else the batch is not split."""
    factors = table.ops[op.name]
    options = [replicated(op)]
    if degree == 1:
        return options
    for letter, atoms in table.letters[op.name].items():
        if factors.kinds[letter] == "whole":
            continue
        # numbered without the batch, which a micro-batch of one row does not have
        named = [a for a in atoms if a != table.batch]
        for atom in atoms:
            wanted = atom == only if only is not None else atom != table.batch
            if not wanted or not divides(table, atom, degree):
                continue
            split = _split(graph, table, op, letter, atom)
            if split is None or (split.implementation and atom != atoms[0]):
                continue
            numbered = atom in named and len(named) > 1
            shown = DISPLAY.get(letter, letter) + (f".{named.index(atom)}" if numbered else "")
            options.append(replace(split, name=shown))
    options += _partial(graph, table, op)
    return options


def replicated(op: Op) -> Strategy:
    """Every rank runs the whole operator."""
    return Strategy(
        name=REPLICATE, operands=(R,) * len(op.operands), results=(R,) * len(op.results)
    )


def indivisible(table: FactorTable, op: Op, degree: int) -> dict[str, int]:
    """Factors that a rule could split but that the degree can't divide: name -> size."""
    factors = table.ops[op.name]
    sizes = {}
    for letter, atoms in table.letters[op.name].items():
        splittable = factors.kinds[letter] != "whole" and table.batch not in atoms
        if splittable and not any(divides(table, a, degree) for a in atoms):
            sizes[letter] = factors.sizes[letter]
    return sizes


def splitting_degrees(
    graph: Graph, table: FactorTable, op: Op, letter: str, *, most: int = 8
) -> tuple[int, ...]:
    """The least degrees, at `most` so many, that can split an operator by a factor."""
    factors = table.ops[op.name]
    if factors.kinds.get(letter, "whole") == "whole":
        return ()
    atoms = [a for a in table.letters[op.name].get(letter, ()) if a != table.batch]
    able = [a for a in atoms if _split(graph, table, op, letter, a) is not None]
    tried = range(2, max((table.sizes[a] for a in able), default=0) + 1)
    return tuple(islice((d for d in tried if any(divides(table, a, d) for a in able)), most))


def _split(graph: Graph, table: FactorTable, op: Op, letter: str, atom: int) -> Strategy | None:
    """Split of one atom of a factor; None where a tensor has the atom at no place, or several."""
    factors = table.ops[op.name]
    kind = factors.kinds[letter]
    summed = kind in ("sum", "mean")

    def state(value: str, dims: Dims, without: Placement | None) -> Placement | None:
        """Split at the atom; `without`, where the tensor does not have the factor."""
        for d, names in enumerate(dims):
            if letter in names:
                atoms = table.dims[value][d]
                before = math.prod(table.sizes[a] for a in takewhile(lambda a: a != atom, atoms))
                return Placement("S", d, before) if atoms.count(atom) == 1 else None
        return without

    alone = kind == "inner" and traits_of(op).loss is None  # their gradients are whole
    needed = [R if alone else _whole(graph, value) for value in op.operands]
    if summed:
        needed = [P if i in factors.pinned else at for i, at in enumerate(needed)]
    otherwise = [None if kind == "map" else P if summed else R] * len(op.results)
    operands = [*map(state, op.operands, factors.operands, needed)]
    placed = [*operands, *map(state, op.results, factors.results, otherwise)]
    states = tuple(at for at in placed if at is not None)
    if len(states) < len(placed):
        return None
    return Strategy(
        name=letter,
        operands=states[: len(operands)],
        results=states[len(operands) :],
        split_factor=letter,
        implementation=factors.implementations.get(letter, ""),
    )


def _whole(graph: Graph, value: str) -> Placement:
    """State of an unsplit operand of an operator of which each rank runs a part."""
    return RP if graph.values[value].requires_grad else R


def _partial(graph: Graph, table: FactorTable, op: Op) -> list[Strategy]:
    """Strategies of a linear operator that takes partial operands and gives a partial result."""
    factors = table.ops[op.name]
    options = []
    for k, group in enumerate(factors.linear):
        operands = tuple(
            P if i in group or i in factors.pinned else _whole(graph, value)
            for i, value in enumerate(op.operands)
        )
        name = PARTIAL if k == 0 else f"{PARTIAL}.{k}"
        options.append(Strategy(name=name, operands=operands, results=(P,) * len(op.results)))
    return options


# --- moving between states -----------------------------------------------------------------------

# (from, to) -> collectives in the forward, in the backward; "S!" is a split of another atom
TRANSITIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("R", "R"): ("", ""),
    ("R", "Rp"): ("", "all_reduce"),
    ("R", "P"): ("", ""),
    ("R", "S"): ("", "all_gather"),
    ("P", "P"): ("", ""),
    ("P", "R"): ("all_reduce", ""),
    ("P", "Rp"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "S"): ("", ""),
    ("S", "S!"): ("all_to_all", "all_to_all"),
    ("S", "R"): ("all_gather", ""),
    ("S", "Rp"): ("all_gather", "reduce_scatter"),
    ("Rp", "Rp"): ("", ""),
    ("Rp", "R"): ("", ""),
}


def transition(source: Placement, target: Placement) -> tuple[str, str] | None:
    """Collectives (forward, backward) of a re-shard; None where it makes no sense."""
    kind = "S!" if source.sharded and target.sharded and source != target else target.kind
    return TRANSITIONS.get((source.kind, kind))


def stays_with_experts(
    table: FactorTable, value: str, source: Placement, target: Placement
) -> bool:
    """Whether a move has no meaning on an expert axis: copies of tokens stay with their experts."""
    by_copy = any(p.sharded and p.dim < COPY_DIMS for p in (source, target))
    return by_copy and source != target and value in table.copies


def least_communication(
    table: FactorTable,
    op: Op,
    options: Sequence[Strategy],
    at: Mapping[str, Placement],
    *,
    gradients: Collection[str] | None = None,
    splitting: bool = False,
) -> Strategy:
    """The strategy with the least communication of the operands `at` their states (others are free)
    and of their `gradients`, by default of all; of as much, where `splitting` one that splits, then
    that which keeps most shards. Partial results are not carried through matrix products."""
    matmul = table.ops[op.name].matmul

    def effort(item: tuple[int, Strategy]) -> tuple[int, bool, int, int]:
        order, option = item
        collectives = 99 * (matmul and option.name.startswith(PARTIAL))
        agreeing = 0
        for value, target in zip(op.operands, option.operands, strict=True):
            if value not in at:
                continue
            kinds = transition(at[value], target)
            backward = gradients is None or value in gradients
            collectives += 99 if kinds is None else bool(kinds[0]) + bool(kinds[1] and backward)
            agreeing += at[value].sharded and at[value] == target
        return (collectives, splitting and not option.split_factor, -agreeing, order)

    return min(enumerate(options), key=effort)[1]
