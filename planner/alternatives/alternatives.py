"""Alternatives: the best plan of each family that the chosen one is not in ("tp=4", "no pipeline").

A family is a decision that the search could have taken otherwise, as the arguments that ask for it;
its plan is that of the same search with them: who forces it gets it again. Otherwise the answer is
the bytes that it lacks, a smaller memory margin with its plan, or that the time ran out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from meshwright.planner.drafts import Candidate
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import PLACEMENTS, InfeasibleError, Plan, margin_beside
from meshwright.planner.report import Excluded, excluded
from meshwright.planner.search import Search, SearchResult

NEAR = 2  # numbers of device groups below the chosen one, and above, that are families
WITHOUT: Mapping[str, str] = {
    "tp": "no tensor parallelism", "cp": "no context parallelism", "ep": "no expert parallelism",
}  # fmt: skip
MAX_MARGINS = 3  # tried, the largest
WORTH = 0.02  # of a step, from which on a faster plan is worth a line


# --- families ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans with one decision in common: `has` recognises them, `asks` are the overrides that ask
    for them."""

    name: str
    has: Callable[[Plan], bool]
    asks: Mapping[str, Any] = field(default_factory=dict)

    def within(self, search: Search) -> Search:
        """The search with this decision taken, all else as it was. Raises `OverrideError`."""
        asks = dict(self.asks)
        if "forbid" in asks:
            asks["forbid"] = (*search.overrides.forbid, *asks["forbid"])
        return search.like(overrides=replace(search.overrides, **asks))


def families(search: Search, result: SearchResult) -> list[Family]:
    """Families that a search could have chosen from and did not."""
    decided, plan = search.overrides.given().keys(), result.best.plan
    return [
        family
        for family in _offered(search, result)
        if not family.has(plan) and decided.isdisjoint(family.asks.keys() - {"forbid"})
    ]


def _offered(search: Search, result: SearchResult) -> Iterator[Family]:
    """Families by kind of decision; one that the user took has none."""
    meshes, over, plan = result.meshes, search.restrictions, result.best.plan
    for axis in WITHOUT:
        yield from (_degree(axis, n) for n in sorted({getattr(c.mesh, axis) for c in meshes}))
    yield Family(
        name="equal meshes",
        asks={"forbid": ["unequal_meshes"]},
        has=lambda plan: len({(s.dp, s.cp, s.tp, s.ep) for s in plan.stages}) == 1,
    )
    if branches := search.space.branches:
        yield _branches("branches one after the other", 1)
        yield _branches("branches apart", len(branches))
    yield from map(_device_groups, _near({c.groups for c in meshes}, plan))
    if any(choice.mesh.spread > 1 for choice in meshes):
        yield Family(
            name="pipeline inside the node",
            asks={"placement": PLACEMENTS[1]},
            has=lambda plan: any(stage.spread > 1 for stage in plan.stages),
        )
    if len(plan.devices) > 1:
        offers = (search.space.schedules(c.groups, c.num_microbatches) for c in meshes)
        offered = {pipeline.schedule for pipelines in offers for pipeline in pipelines}
        yield from (_schedule(name) for name in over.schedules if name in offered)
    if over.uniform("zero") is None:
        yield from map(_zero, sorted(over.zeros))
    if not any(over.recompute):
        yield from (_recompute(p) for p in ("none", "full") if p in over.policies)
    yield Family(
        name="nothing in host memory",
        asks={"forbid": ["offload"]},
        has=lambda plan: not any(s.host for s in plan.stages) or bool(search.space.reliefs[0].host),
    )


def _near(counts: Collection[int], plan: Plan) -> list[int]:
    """The least number of device groups, and the numbers next to the plan's."""
    groups, ordered = len(plan.devices), sorted(counts)
    fewer, more = [n for n in ordered if n < groups], [n for n in ordered if n > groups]
    return sorted({*ordered[:1], *fewer[-NEAR:], *more[:NEAR]})


def _degree(axis: str, n: int) -> Family:
    return Family(
        name=WITHOUT[axis] if n == 1 else f"{axis}={n}",
        asks={axis: n},
        has=lambda plan: all(getattr(s, axis) == n for s in plan.stages),
    )


def _branches(name: str, count: int) -> Family:
    asks, apart = {"branches": count}, count > 1
    return Family(name=name, asks=asks, has=lambda plan: bool(plan.branches) == apart)


def _device_groups(n: int) -> Family:
    return Family(
        name="no pipeline" if n == 1 else f"pp={n}",
        asks={"pp": n},
        has=lambda plan: len(plan.devices) == n,
    )


def _schedule(name: str) -> Family:
    return Family(
        name=name,
        asks={"schedule": name},
        has=lambda plan: plan.schedule == name and len(plan.devices) > 1,
    )


def _zero(zero: int) -> Family:
    return Family(
        name=f"ZeRO-{zero}",
        asks={"zero": zero},
        # one data rank has nothing to divide
        has=lambda plan: {s.zero if s.holders > 1 else 0 for s in plan.stages} == {zero},
    )


def _recompute(policy: str) -> Family:
    return Family(
        name="no recompute" if policy == "none" else f"{policy} recompute",
        asks={"recompute": policy},
        has=lambda plan: all(set(s.policies) == {policy} for s in plan.stages),
    )


# --- the plan of a family ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerMargin:
    """A memory margin, and the best plan with it."""

    memory_margin: float
    best: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The `best` plan of a family, under the overrides `asks`, or the bytes that the closest one
    lacks on its fullest stage; neither where the time ran out, only the seconds that any plan of it
    takes at least. `excluded` are the products that can't be split as the family asks."""

    family: str
    asks: Mapping[str, Any]
    best: Candidate | None = None
    shortfall_bytes: float | None = None
    bound_s: float = 0.0
    smaller: SmallerMargin | None = None
    excluded: tuple[Excluded, ...] = ()

    @property
    def searched(self) -> bool:
        """Whether the time was enough."""
        return self.best is not None or self.shortfall_bytes is not None


def alternative(search: Search, family: Family) -> Alternative | None:
    """The best of a family; None where the space holds none of it anyway."""
    graph, factors = search.problem.graph, search.problem.factors
    refused = excluded(graph, factors, (family.asks.get("tp", 1),))
    answer = partial(Alternative, family=family.name, asks=family.asks, excluded=refused)
    limit = search.programs.time
    if limit.over():
        return answer()
    try:
        result = family.within(search).run()
    except InfeasibleError as error:
        lacks = max(error.shortfall_bytes, default=0.0)
        return answer() if limit.over() else answer(shortfall_bytes=lacks)
    except OverrideError:
        return None
    if limit.ends_s < math.inf and not result.complete:
        return answer(bound_s=result.bound_s)
    return answer(best=result.best)


def with_margin(
    other: Alternative, search: Search, family: Family, below_s: float | None
) -> Alternative:
    """An alternative with the margin that its family needs to fit, or to take less than `below_s`,
    where that is smaller than the search's."""
    memory_bytes, lacks = search.problem.cluster.device.memory_bytes, other.shortfall_bytes
    if lacks is not None:
        below_s = math.inf if lacks <= search.memory_margin * memory_bytes else None
    if not other.searched or below_s is None:
        return other
    return replace(other, smaller=smaller_margin(family.within(search), below_s))


def smaller_margin(search: Search, below_s: float) -> SmallerMargin | None:
    """The largest margin below a search's with which it finds a plan that takes less than
    `below_s`, of the plans that fit without any; None where there is none."""
    memory_bytes = search.problem.cluster.device.memory_bytes
    if not search.memory_margin or search.programs.time.over():
        return None
    without = search.like(memory_margin=0.0)
    try:
        without.run()
    except (InfeasibleError, OverrideError):
        return None
    drafts = [d for d in without.drafts if d.fits and d.step_time_s < below_s]
    peaks = {d.evaluation.prediction.fullest_bytes for d in drafts}
    margins = sorted({margin_beside(peak, memory_bytes) for peak in peaks}, reverse=True)
    for margin in [m for m in margins if m < search.memory_margin][:MAX_MARGINS]:
        if search.programs.time.over():
            return None
        try:
            best = search.like(memory_margin=margin).run().best
        except (InfeasibleError, OverrideError):
            continue
        if best.step_time_s < below_s:
            return SmallerMargin(memory_margin=margin, best=best)
    return None


def worth_s(step_s: float) -> float:
    """Seconds below which another plan is worth a line beside one of `step_s`."""
    return step_s / (1 + WORTH)
