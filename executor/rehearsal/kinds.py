"""Which ranks of a plan do the same: one of each is rehearsed.

Ranks of a device group run the same program. What differs is the length of their parts of dims that
an axis doesn't divide, how many keys attention reads of a split sequence, and what an axis' first
rank does for others. So ranks are alike that have the same tokens, with parts as long of each split
dim, and that are both, or neither, first on each axis where they have a part, on equal meshes; and
so are the first ranks of the groups in which they are, so that a group's members are of the same
kinds for all that are alike, and one of each can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.sharding import Assignment, Placement, Strategy, data_layout
from meshwright.executor.ranks import StageMesh
from meshwright.executor.resharding import part_of
from meshwright.executor.stages import CheckedPlan

# lengths of the dims that are split on the data axis, and on the tensor axis
Splits = tuple[frozenset[int], frozenset[int]]
NONE: Splits = (frozenset(), frozenset())


def splits_of(checked: CheckedPlan, meshes: Sequence[StageMesh]) -> Splits:
    """The lengths of the dims that a plan splits on each axis."""
    graph, on_data, on_tensor = checked.graph, set[int](), set[int]()
    for dp in {mesh.outer[0] for mesh in meshes}:
        layout = data_layout(graph, checked.factors, dp)
        for op in graph.ops:
            on_data |= _split(graph, _states(op, layout.strategies[op.name]))
    ops = {op.name: op for op in graph.ops}
    for assignment in _distinct(checked.assignments):
        on_tensor |= _split(graph, assignment.states.items())
        for name, strategy in assignment.strategies.items():
            on_tensor |= _split(graph, _states(ops[name], strategy))
    return frozenset(on_data), frozenset(on_tensor)


def _distinct(assignments: Sequence[Mapping[str, Assignment]]) -> Iterable[Assignment]:
    return {id(x): x for chosen in assignments for x in chosen.values()}.values()


def _states(op: Op, strategy: Strategy) -> Iterable[tuple[str, Placement]]:
    yield from zip(op.operands, strategy.operands, strict=True)
    yield from zip(op.results, strategy.results, strict=True)


def _split(graph: Graph, states: Iterable[tuple[str, Placement]]) -> set[int]:
    found = set()
    for value, placement in states:
        shape = graph.values[value].shape
        if placement.sharded and placement.dim < len(shape):  # others are of copies at experts
            found.add(shape[placement.dim])
    return found


def kinds_of_ranks(
    meshes: Sequence[StageMesh], splits: Splits = NONE, *, every: bool = False
) -> Mapping[int, int]:
    """Rank -> the lowest rank that does the same; each rank itself with `every`."""
    equal = len({(m.dp, m.cp, m.tp, m.shards, m.experts, m.folded) for m in meshes}) == 1
    if every or not equal:
        return {rank: rank for mesh in meshes for rank in mesh.ranks}

    @cache
    def parts(axis: int, size: int, position: int) -> tuple[int, ...]:
        uneven = sorted(length for length in splits[axis] if length % size)
        return tuple(part_of(length, size, position)[1] for length in uneven)

    found = {}
    for mesh in {m.ranks: m for m in reversed(meshes)}.values():
        first: dict[tuple[object, ...], int] = {}
        for place, rank in enumerate(mesh.ranks):
            d, t = divmod(place, mesh.tp)
            row, *tokens = mesh.outer_coordinate(d)
            heads = [d, *(d - d % n for n in mesh.cuts)]
            firsts = tuple(head % n == 0 for head in heads for n in mesh.cuts)
            tokens += [row == 0] * bool(tokens)  # all of one row's ranks stand for others'
            kind = (firsts, *tokens, t == 0, parts(0, mesh.outer[0], row), parts(1, mesh.tp, t))
            found[rank] = first.setdefault(kind, rank)
    return found
