"""Families of plans by which a report compares ("tp=4", "no pipeline", "runs here"): decisions that
a search could have taken otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.schedules import SCHEDULES, in_flight
from meshwright.planner.drafts import MeshChoice, StageSetup
from meshwright.planner.plan import RUNS, Plan, PlanError, check_runs, runs_experts
from meshwright.planner.search import Search, SearchResult

RUNS_HERE = "runs here"
NEAR = 2  # numbers of device groups below the chosen one, and above, that are families
WITHOUT: Mapping[str, str] = {
    "tp": "no tensor parallelism", "cp": "no context parallelism", "ep": "no expert parallelism",
}  # fmt: skip


def _any(_: object) -> bool:
    return True


def _none(_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans with one decision in common: `has` recognises them; `choice`, `setup` and `schedule`
    are the meshes, stage setups and schedules that they can be made of; `policies` the recompute
    policies looked at, None for all; `forced` the one of all blocks, that a split backward does not
    have otherwise; `tp` their tensor-parallel degree, where that is the
    decision. `instead` recognises plans outside of it that an override of the decision allows."""

    name: str
    has: Callable[[Plan], bool]
    choice: Callable[[MeshChoice], bool] = _any
    setup: Callable[[StageSetup], bool] = _any
    schedule: Callable[[str], bool] = _any
    policies: tuple[str, ...] | None = None
    forced: str | None = None
    tp: int = 1
    instead: Callable[[Plan], bool] = _none


def families(search: Search, result: SearchResult) -> Iterator[Family]:
    """Families that a search offers, by kind of decision; a decision without a choice has none."""
    meshes, over = result.meshes, search.restrictions
    for axis in ("tp", "cp", "ep"):
        degrees = sorted({getattr(choice.mesh, axis) for choice in meshes})
        yield from (_degree(axis, n) for n in degrees if len(degrees) > 1)
    yield Family(name="equal meshes", has=_equal)
    yield from map(_device_groups, _near({c.groups for c in meshes}, result.best.plan))
    if any(choice.mesh.spread > 1 for choice in meshes):
        yield Family(
            name="pipeline inside the node",
            has=lambda plan: any(_strided(s.ranks, s.tp * s.cp) for s in plan.stages),
            choice=lambda choice: choice.mesh.spread > 1,
        )
    if len(result.best.plan.devices) > 1:
        offered = _schedules(search, meshes)
        yield from (_schedule(name) for name in offered if len(offered) > 1)
    if len(over.zeros) > 1 and over.uniform("zero") is None:
        yield from map(_zero, sorted(over.zeros))
    if not any(over.recompute) and len(over.policies) > 1:
        pipeline = len(result.best.plan.devices) > 1
        yield from (_recompute(p, pipeline) for p in ("none", "full") if p in over.policies)
    if not search.executable and set(over.policies) & set(RUNS["recompute"]):
        yield _runs_here(over.policies)


def _near(counts: Collection[int], plan: Plan) -> list[int]:
    """Of several numbers of device groups one, and those next to the plan's."""
    own, ordered = len(plan.devices), sorted(counts)
    fewer, more = [n for n in ordered if n < own], [n for n in ordered if n > own]
    near = {own, *ordered[:1], *fewer[-NEAR:], *more[:NEAR]}
    return sorted(near) if len(near) > 1 else []


def _degree(axis: str, n: int) -> Family:
    return Family(
        name=WITHOUT[axis] if n == 1 else f"{axis}={n}",
        tp=n if axis == "tp" else 1,
        has=lambda plan: all(getattr(s, axis) == n for s in plan.stages),
        choice=lambda choice: bool(getattr(choice.mesh, axis) == n),
    )


def _equal(plan: Plan) -> bool:
    return len({(s.dp, s.cp, s.tp, s.ep) for s in plan.stages}) == 1


def _device_groups(n: int) -> Family:
    return Family(
        name="no pipeline" if n == 1 else f"pp={n}",
        has=lambda plan: len(plan.devices) == n,
        choice=lambda choice: choice.groups == n,
    )


def _strided(ranks: tuple[int, ...], inner: int) -> bool:
    """Whether other stages lie between neighbours on a stage's data axis."""
    return len(ranks) > inner and ranks[inner] - ranks[0] > inner


def _schedules(search: Search, meshes: Sequence[MeshChoice]) -> list[str]:
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
        has=lambda plan: plan.schedule == name and len(plan.devices) > 1,
        choice=lambda choice: choice.groups > 1,
        schedule=lambda own: own == name,
        instead=lambda plan: _alone(name, plan),
    )


def _alone(schedule: str, plan: Plan) -> bool:
    """Whether a plan has no pipeline, and needs no more under this schedule."""
    m = plan.num_microbatches
    if len(plan.devices) > 1 or SCHEDULES[schedule].stages_per_device != 1:
        return False
    own, theirs = (
        in_flight(name, stage=0, num_stages=1, num_microbatches=m)
        for name in (schedule, plan.schedule)
    )
    return own <= theirs


def _zero(zero: int) -> Family:
    return Family(
        name=f"ZeRO-{zero}",
        has=lambda plan: _zero_of(plan) == zero,
        choice=lambda choice: not zero or choice.mesh.dp * choice.mesh.cp > 1,
        setup=lambda setup: setup.zero == zero,
    )


def _zero_of(plan: Plan) -> int | None:
    """The ZeRO stage of a plan, where there is one data rank counting as none; None for several."""
    found = {s.zero if s.dp * s.cp > 1 else 0 for s in plan.stages}
    return found.pop() if len(found) == 1 else None


def _recompute(policy: str, pipeline: bool) -> Family:
    """Backwards in two parts have it where the policy is forced; looked at beside pipelines."""
    splits = policy == "none" or pipeline
    return Family(
        name="no recompute" if policy == "none" else f"{policy} recompute",
        policies=(policy,),
        forced=policy if policy != "none" and pipeline else None,
        schedule=lambda name: splits or not SCHEDULES[name].splits_backward,
        has=lambda plan: all(set(s.policies) == {policy} for s in plan.stages),
    )


def _runs_here(policies: Sequence[str]) -> Family:
    return Family(
        name=RUNS_HERE,
        has=runs_here,
        choice=lambda choice: runs_experts(
            dp=choice.mesh.dp * choice.mesh.cp, tp=choice.mesh.tp, ep=choice.mesh.ep
        ),
        policies=tuple(p for p in policies if p in RUNS["recompute"]),
    )


def runs_here(plan: Plan) -> bool:
    """Whether this version's executor runs a plan."""
    try:
        check_runs(plan)
    except PlanError:
        return False
    return True
