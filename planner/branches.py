"""Branches of a model: heavy parts that don't depend on each other until they meet, as towers.

An operator joins the parts that its operands come from. If two of these have `LEAST` of the model's
work each, they are branches, and the operator and all that depends on it is the trunk:

    part(o) = o and the parts of its operands     if at most one of them is heavy
    trunk   = o and all that depends on it         else

A branch is a run of blocks, from its first operator to that of the next branch, or to the first
block of the trunk; what it computes after that (an early tower's projection) is in the trunk. Where
one branch reads another one nevertheless, as of operators that a forward mixes, there are none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators import is_per_row, op_flops
from meshwright.costmodel.sharding import FactorTable

LEAST = 0.05  # of the model's work, with which a part is a branch
ROWS = 8  # at which work is compared, so that it is the same for any batch
TRUNK = -1


class Shape(NamedTuple):
    """Stages of each branch, and of the trunk, which is one stage beside the last one of its
    `host`, by number, where it has one."""

    branches: tuple[int, ...]
    trunk: int
    host: int | None

    @property
    def depths(self) -> tuple[int, ...]:
        """The device groups from each stage to the end."""
        behind = [self.trunk - (b == self.host) for b in range(len(self.branches))]
        chains = zip(behind, self.branches, strict=True)
        of_branches = (range(after + count, after, -1) for after, count in chains)
        return (*itertools.chain(*of_branches), *range(self.trunk, 0, -1))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share `total` out among so many parts, 1 to each at least."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, total)))


def shapes_of(depths: Sequence[int], branches: int) -> list[Shape]:
    """The shapes of so many branches and a trunk that are as deep."""
    return [
        shape
        for *counts, trunk in compositions(len(depths), branches + 1)
        for host in (None, *range(branches if trunk == 1 else 0))
        if (shape := Shape(tuple(counts), trunk, host)).depths == tuple(depths)
    ]


def op_work(graph: Graph, factors: FactorTable, op: Op) -> float:
    """FLOPs of an operator's forward on `ROWS` rows."""
    flops = op_flops(factors, op)
    return flops / graph.batch_size * ROWS if is_per_row(factors, op) else flops


def branch_starts(graph: Graph, work: Sequence[float]) -> list[int]:
    """The first operator of each branch, ascending, and the first of the trunk behind the last one;
    nothing where there are no two branches. `work` is FLOPs of each operator."""
    parts = _parts(graph, work)
    loads = dict.fromkeys(parts, 0.0)
    for part, load in zip(parts, work, strict=True):
        loads[part] += load
    heavy = {part for part, load in loads.items() if part != TRUNK and load >= LEAST * sum(work)}
    starts = sorted(parts.index(part) for part in heavy)
    if len(starts) < 2:
        return []
    elsewhere = {TRUNK, *(heavy - {parts[starts[-1]]})}
    trunk = (k for k in range(starts[-1], len(parts)) if parts[k] in elsewhere)
    return [*starts, next(trunk, len(parts))]


def _parts(graph: Graph, work: Sequence[float]) -> list[int]:
    """(n,): the part of each operator, named by one of its operators, or the trunk."""
    owner: dict[str, int] = {}
    parent = list(range(len(graph.ops)))
    load, trunk = list(work), set[int]()
    least = LEAST * sum(work)

    def part_of(op: int) -> int:
        while parent[op] != op:
            parent[op] = op = parent[parent[op]]
        return op

    for k, op in enumerate(graph.ops):
        sources = {part_of(owner[name]) for name in op.operands if name in owner}
        owner |= dict.fromkeys(op.results, k)
        if sources & trunk or sum(load[part] >= least for part in sources) > 1:
            trunk.add(k)
            continue
        for part in sources:
            parent[part] = k
            load[k] += load[part]
    return [TRUNK if (part := part_of(k)) in trunk else part for k in range(len(graph.ops))]


def branches_of(graph: Graph, factors: FactorTable) -> tuple[range, ...]:
    """The blocks of each branch, in the order of the model; the trunk's are behind them. Empty
    where the model has no two."""
    work = [op_work(graph, factors, op) for op in graph.ops]
    starts = branch_starts(graph, work)
    begins = {at: k for k, at in enumerate(_block_starts(graph))}
    if not starts or any(at not in begins for at in starts[:-1]):
        return ()
    trunk = max(k for at, k in begins.items() if at <= starts[-1])
    firsts = [begins[at] for at in starts[:-1]]
    runs = tuple(itertools.starmap(range, itertools.pairwise([*firsts, trunk])))
    if firsts[0] or any(_is_light(graph, run, work) for run in runs) or _meet(graph, runs):
        return ()
    return runs


def _block_starts(graph: Graph) -> list[int]:
    """(K+1,): the first operator of each block, and their number."""
    return [*itertools.accumulate((len(block.ops) for block in graph.blocks), initial=0)]


def _is_light(graph: Graph, run: range, work: Sequence[float]) -> bool:
    """Whether the blocks of a run have less of the work than a branch."""
    starts = _block_starts(graph)
    return not run or sum(work[starts[run.start] : starts[run.stop]]) < LEAST * sum(work)


def _meet(graph: Graph, runs: Sequence[range]) -> bool:
    """Whether a block of a run reads what another run makes."""
    owner = {name: run for run in runs for k in run for name in graph.blocks[k].outputs}
    return any(
        owner.get(name, run) != run for run in runs for k in run for name in graph.blocks[k].inputs
    )
