"""Families of plans by which a report compares ("tp=4", "no pipeline", "runs here"): a decision
that the search could have taken otherwise, as the arguments that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from meshwright.planner.drafts import MeshChoice
from meshwright.planner.plan import PLACEMENTS, RUNS, Plan, PlanError, check_runs, spread_of
from meshwright.planner.search import Search, SearchResult

RUNS_HERE = "runs here"
NEAR = 2  # numbers of device groups below the chosen one, and above, that are families
WITHOUT: Mapping[str, str] = {
    "tp": "no tensor parallelism", "cp": "no context parallelism", "ep": "no expert parallelism",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans with one decision in common: `has` recognises them, `asks` are the overrides that ask
    for them, `executable` leaves only what the executor runs."""

    name: str
    has: Callable[[Plan], bool]
    asks: Mapping[str, Any] = field(default_factory=dict)
    executable: bool = False

    def within(self, search: Search) -> Search:
        """The search with this decision taken, all else as it was. Raises `OverrideError`."""
        given = search.overrides
        asks = dict(self.asks)
        if "forbid" in asks:
            asks["forbid"] = (*given.forbid, *asks["forbid"])
        executable = search.executable or self.executable
        return search.like(overrides=replace(given, **asks), executable=executable)


def families(search: Search, result: SearchResult) -> list[Family]:
    """Families that a search could have chosen from and did not."""
    given, plan = search.overrides.given(), result.best.plan
    return [
        family
        for family in _offered(search, result)
        if not family.has(plan) and given.keys().isdisjoint(family.asks.keys() - {"forbid"})
    ]


def _offered(search: Search, result: SearchResult) -> Iterator[Family]:
    """By kind of decision; one that the user took has none."""
    meshes, over, plan = result.meshes, search.restrictions, result.best.plan
    for axis in WITHOUT:
        yield from (_degree(axis, n) for n in sorted({getattr(c.mesh, axis) for c in meshes}))
    yield Family(name="equal meshes", asks={"forbid": ["unequal_meshes"]}, has=_equal)
    yield from map(_device_groups, _near({c.groups for c in meshes}, plan))
    if any(choice.mesh.spread > 1 for choice in meshes):
        yield Family(
            name="pipeline inside the node", asks={"placement": PLACEMENTS[1]}, has=_strided
        )
    if len(plan.devices) > 1:
        yield from map(_schedule, _schedules(search, meshes))
    if over.uniform("zero") is None:
        yield from map(_zero, sorted(over.zeros))
    if not any(over.recompute):
        yield from (_recompute(p) for p in ("none", "full") if p in over.policies)
    yield Family(
        name="nothing in host memory",
        asks={"forbid": ["offload"]},
        has=lambda plan: not any(s.offload for s in plan.stages) or search.overrides.offloads,
    )
    if not search.executable and set(over.policies) & set(RUNS["recompute"]):
        yield Family(name=RUNS_HERE, executable=True, has=runs_here)


def _near(counts: Collection[int], plan: Plan) -> list[int]:
    """Of several numbers of device groups one, and those next to the plan's."""
    own, ordered = len(plan.devices), sorted(counts)
    fewer, more = [n for n in ordered if n < own], [n for n in ordered if n > own]
    return sorted({*ordered[:1], *fewer[-NEAR:], *more[:NEAR]})


def _degree(axis: str, n: int) -> Family:
    return Family(
        name=WITHOUT[axis] if n == 1 else f"{axis}={n}",
        asks={axis: n},
        has=lambda plan: all(getattr(s, axis) == n for s in plan.stages),
    )


def _equal(plan: Plan) -> bool:
    return len({(s.dp, s.cp, s.tp, s.ep) for s in plan.stages}) == 1


def _device_groups(n: int) -> Family:
    return Family(
        name="no pipeline" if n == 1 else f"pp={n}",
        asks={"pp": n},
        has=lambda plan: len(plan.devices) == n,
    )


def _strided(plan: Plan) -> bool:
    return any(spread_of(stage) > 1 for stage in plan.stages)


def _schedules(search: Search, meshes: Collection[MeshChoice]) -> list[str]:
    """Schedules that some mesh offers."""
    offered = {
        name
        for choice in meshes
        for name, _ in search.space.schedules(choice.groups, choice.num_microbatches, 0)
    }
    return [name for name in search.restrictions.schedules if name in offered]


def _schedule(name: str) -> Family:
    return Family(
        name=name,
        asks={"schedule": name},
        has=lambda plan: plan.schedule == name and len(plan.devices) > 1,
    )


def _zero(zero: int) -> Family:
    return Family(name=f"ZeRO-{zero}", asks={"zero": zero}, has=partial(_has_zero, zero))


def _has_zero(zero: int, plan: Plan) -> bool:
    """Whether all stages have it; one data rank has nothing to divide."""
    return {s.zero if s.dp * s.cp > 1 else 0 for s in plan.stages} == {zero}


def _recompute(policy: str) -> Family:
    return Family(
        name="no recompute" if policy == "none" else f"{policy} recompute",
        asks={"recompute": policy},
        has=lambda plan: all(set(s.policies) == {policy} for s in plan.stages),
    )


def runs_here(plan: Plan) -> bool:
    """Whether this version's executor runs a plan."""
    try:
        check_runs(plan)
    except PlanError:
        return False
    return True
