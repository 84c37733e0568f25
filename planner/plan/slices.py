"""Token slices of a plan: their check, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import FactorTable, why_not_sliced
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError

WAY_OUT = "drop slices; cp splits tokens among ranks where it can"


def check_slices(plan: Plan, graph: Graph, factors: FactorTable) -> None:
    """Raise `PlanError` unless a plan's slices, if any, are of the model's sequences."""
    if not plan.slices:
        return
    if why := why_not_sliced(graph, factors):
        raise PlanError(
            f"={list(plan.slices)}: {why}", place="plan: slices", legal="none", way_out=WAY_OUT
        )
    length = factors.length
    if sum(plan.slices) != length or min(plan.slices) < 1 or len(plan.slices) == 1:
        raise PlanError(
            f"={list(plan.slices)} are {sum(plan.slices)} tokens in all",
            place="plan: slices",
            legal=f"two sizes from 1 or more, that add up to the model's {length} tokens",
        )
    multiple = tensor_multiple(stage.tp for stage in plan.stages)
    if any(size % multiple for size in plan.slices):
        raise PlanError(
            f"={list(plan.slices)}: the tensor axis splits the tokens of each",
            place="plan: slices",
            legal=f"multiples of {multiple}",
        )


def tensor_multiple(degrees: Iterable[int]) -> int:
    """The tokens of which each slice has a whole multiple, by the tensor-parallel degrees of
    stages."""
    return math.lcm(*degrees)


def slices_at(plan: Plan, length: int) -> tuple[int, ...]:
    """A plan's slices for sequences of another length: in the same proportion, without empty ones;
    none where one is left, or the tensor axis does not divide the tokens."""
    multiple, total = tensor_multiple(stage.tp for stage in plan.stages), sum(plan.slices)
    if length % multiple:
        return ()
    parts = length // multiple
    ends = (round(end * parts / total) for end in (0, *accumulate(plan.slices)))
    sizes = tuple(multiple * (b - a) for a, b in pairwise(dict.fromkeys(ends)))
    return sizes if len(sizes) > 1 else ()
