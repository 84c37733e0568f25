"""Token slices of a plan: their check, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import FactorTable, why_not_sliced
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError


def check_slices(plan: Plan, graph: Graph, factors: FactorTable) -> None:
    """Raise `PlanError` unless a plan's slices, if any, are of the model's sequences."""
    if not plan.slices:
        return
    if why := why_not_sliced(graph, factors):
        raise PlanError(
            f"={list(plan.slices)}: {why}",
            place="plan: slices",
            legal="none",
            way_out="drop slices; cp splits tokens among ranks where it can",
        )
    assert factors.sequence is not None
    length = factors.sizes[factors.sequence]
    if sum(plan.slices) != length:
        raise PlanError(
            f"={list(plan.slices)} are {sum(plan.slices)} tokens in all",
            place="plan: slices",
            legal=f"sizes that add up to the model's {length} tokens",
        )


def equal_slices(length: int, count: int) -> tuple[int, ...]:
    """The tokens of so many slices, as equal as they can be; none where one is asked for."""
    return slices_at((1,) * count, length)


def slices_at(sizes: Sequence[int], length: int) -> tuple[int, ...]:
    """The slices of sequences of another length in the same proportion, without empty ones; none
    where one is left."""
    whole = sum(sizes)
    bounds = dict.fromkeys(round(end * length / whole) for end in (0, *accumulate(sizes)))
    found = tuple(b - a for a, b in pairwise(bounds))
    return found if len(found) > 1 else ()
