"""The best plan of each family ("tp=4", "no pipeline", "runs here"): why not something else, by a
number.

A family says which meshes, ways, schedules and recompute it takes. What the search drafted counts;
beyond that the most promising combinations of each family are cut and simulated, whatever the
chosen plan takes. Where nothing of a family fits, the answer is what it lacks; where the time ran
out, what it would take at least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from meshwright.costmodel.schedules.schedule import SCHEDULES
from meshwright.planner.plan.check import check_runs
from meshwright.planner.plan.expert_parallel import runs_experts
from meshwright.planner.plan.plan import RUNS, Plan, PlanError
from meshwright.planner.report.indivisible import Excluded, excluded
from meshwright.planner.search.candidates import PlanDraft
from meshwright.planner.search.equal_stages import (
    Combination,
    EqualStages,
    MeshChoice,
    StageDraft,
    StageSetup,
)
from meshwright.planner.search.least_memory import (
    MemoryNeed,
    least_memory,
    least_memory_choices,
    shortfall_bytes,
)
from meshwright.planner.search.search import OPTIMISM, OVERSHOOT, Search, SearchResult

T = TypeVar("T")

MAX_SLOTS = 16  # meshes looked at per family, those with the least bounds
MAX_USELESS = 20  # meshes on which nothing fits, likewise
MAX_CUTS = 24  # combinations cut per family, those with the least estimates
MAX_SIMULATED = 6  # of those, the best of each schedule
MAX_LEAN = 8  # meshes looked at for the least memory, those that divide weights most
RUNS_HERE = "runs here"
WITHOUT: Mapping[str, str] = {
    "tp": "no tensor parallelism", "cp": "no context parallelism", "ep": "no expert parallelism",
}  # fmt: skip


def _any(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans with something in common: `has` tells them, `slot`, `way` and `schedule` what they can
    be made of; `policies` restrict the recompute that is looked at, None for all; `tp` is the
    tensor-parallel degree that they have in common, if that is what it is about."""

    name: str
    has: Callable[[Plan], bool]
    slot: Callable[[MeshChoice], bool] = _any
    way: Callable[[StageSetup], bool] = _any
    schedule: Callable[[str], bool] = _any
    policies: tuple[str, ...] | None = None
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan found of a family; without one, the bytes that its leanest plan lacks on the
    fullest stage. Where the time ran out, the seconds that any plan of it takes at least.
    `excluded` is what can't be split as the family asks."""

    family: str
    draft: PlanDraft | None = None
    shortfall_bytes: float | None = None
    bound_s: float | None = None
    excluded: tuple[Excluded, ...] = ()


def alternatives(search: Search, result: SearchResult) -> tuple[Alternative, ...]:
    """The best of every family that the search could have chosen from and did not."""
    chosen = result.best.plan
    wanted = [family for family in families(search, chosen) if not family.has(chosen)]
    explorer = _Explorer(search=search, explores=result.complete)
    if result.complete:
        explorer.look(wanted)
    found = [explorer.best(family) for family in wanted]
    search.equal.forget()
    return tuple(
        replace(explorer.improved(a, f), excluded=excluded(search.graph, search.table, (f.tp,)))
        for a, f in zip(found, wanted, strict=True)
        if a
    )


# --- families ------------------------------------------------------------------------------------


def families(search: Search, chosen: Plan) -> Iterator[Family]:
    """What the space of a search offers, by kind of decision; one that leaves no choice is
    omitted."""
    yield from _meshes(search)
    yield from _pipelines(search, chosen)
    yield from _zeros(search)
    over = search.restrictions
    if not any(over.recompute):
        for policy, name in (("none", "no recompute"), ("full", "full recompute")):
            if policy in over.policies and len(over.policies) > 1:
                yield Family(
                    name=name,
                    policies=(policy,),
                    # what the first part of a backward computes again, the second would keep
                    schedule=lambda n, p=policy: p == "none" or not SCHEDULES[n].splits_backward,
                    has=lambda plan, p=policy: all(set(s.policies) == {p} for s in plan.stages),
                )
    if not search.executable and set(over.policies) & set(RUNS["recompute"]):
        yield _runs_here(search)


def _meshes(search: Search) -> Iterator[Family]:
    for axis in ("tp", "cp", "ep"):
        degrees = sorted({getattr(slot.mesh, axis) for slot in search.slots})
        for n in degrees if len(degrees) > 1 else ():
            yield Family(
                name=WITHOUT[axis] if n == 1 else f"{axis}={n}",
                tp=n if axis == "tp" else 1,
                has=lambda plan, a=axis, n=n: all(getattr(s, a) == n for s in plan.stages),
                slot=lambda slot, a=axis, n=n: getattr(slot.mesh, a) == n,
            )
    yield Family(name="equal meshes", has=_equal)


def _equal(plan: Plan) -> bool:
    return len({(s.dp, s.cp, s.tp, s.ep) for s in plan.stages}) == 1


def _pipelines(search: Search, chosen: Plan) -> Iterator[Family]:
    counts = sorted({slot.groups for slot in search.slots})
    for n in counts if len(counts) > 1 else ():
        yield Family(
            name="no pipeline" if n == 1 else f"pp={n}",
            has=lambda plan, n=n: len(plan.devices) == n,
            slot=lambda slot, n=n: slot.groups == n,
        )
    if any(slot.mesh.spread > 1 for slot in search.slots):
        yield Family(
            name="pipeline inside the node",
            has=lambda plan: any(_strided(s.ranks, s.tp * s.cp) for s in plan.stages),
            slot=lambda slot: slot.mesh.spread > 1,
        )
    if len(chosen.devices) == 1:
        return
    offered = {
        name
        for s in search.slots
        for name, _ in search.space.schedules(s.groups, s.num_microbatches, 0)
    }
    for name in search.restrictions.schedules:
        if name in offered and len(offered) > 1:
            yield Family(
                name=name,
                has=lambda plan, n=name: plan.schedule == n and len(plan.devices) > 1,
                slot=lambda slot: slot.groups > 1,
                schedule=lambda own, n=name: own == n,
            )


def _strided(ranks: tuple[int, ...], inner: int) -> bool:
    return len(ranks) > inner and ranks[inner] - ranks[0] > inner


def _zeros(search: Search) -> Iterator[Family]:
    over = search.restrictions
    for zero in sorted(over.zeros) if len(over.zeros) > 1 and over.uniform("zero") is None else ():
        yield Family(
            name=f"ZeRO-{zero}",
            has=lambda plan, z=zero: _zero_of(plan) == z,
            slot=lambda slot, z=zero: not z or slot.mesh.dp * slot.mesh.cp > 1,
            way=lambda way, z=zero: way.zero == z,
        )


def _zero_of(plan: Plan) -> int | None:
    """The ZeRO stage of a plan, where there is one data rank counting as none; None for several."""
    found = {s.zero if s.dp * s.cp > 1 else 0 for s in plan.stages}
    return found.pop() if len(found) == 1 else None


def _runs_here(search: Search) -> Family:
    return Family(
        name=RUNS_HERE,
        has=runs_here,
        slot=lambda slot: (
            slot.mesh.cp in RUNS["cp"]
            and runs_experts(dp=slot.mesh.dp, tp=slot.mesh.tp, ep=slot.mesh.ep)
        ),
        policies=tuple(p for p in search.restrictions.policies if p in RUNS["recompute"]),
    )


def runs_here(plan: Plan) -> bool:
    """Whether this version's executor runs a plan."""
    try:
        check_runs(plan)
    except PlanError:
        return False
    return True


# --- the best of one -----------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Explorer:
    """What the families look at together: the combinations of `MAX_SLOTS` meshes of each, and what
    was simulated, by the recompute that was allowed. Nothing new where it no longer `explores`."""

    search: Search
    explores: bool
    nodes: dict[MeshChoice, Sequence[Combination]] = field(default_factory=dict)
    drafts: dict[tuple[tuple[str, ...], Combination], PlanDraft] = field(default_factory=dict)

    def look(self, offered: Sequence[Family]) -> None:
        """Fill `nodes`; a mesh on which nothing fits does not count."""
        for family in offered:
            useful = 0
            for slot in self.slots(family)[: MAX_USELESS + MAX_SLOTS]:
                if slot not in self.nodes:
                    self.nodes[slot] = self.search.equal.combinations(slot)
                useful += bool(self.nodes[slot])
                if useful >= MAX_SLOTS:
                    break

    def slots(self, family: Family) -> list[MeshChoice]:
        """Meshes that may hold plans of a family, the least bound of each number of micro-batches
        first: with few of them bounds know no bubble, and some schedules have one."""
        slots = filter(family.slot, self.search.slots)
        return _diverse(slots, lambda s: s.bound_s, lambda s: s.num_microbatches)

    def best(self, family: Family) -> Alternative | None:
        """The best plan found, or why there is none; None where the space holds none anyway."""
        drafts = [d for d in self.search.drafts if d.fits and family.has(d.plan)]
        if not self.explores:
            bound_s = min((s.bound_s for s in self.slots(family)), default=None)
            draft = min(drafts, key=_step, default=None)
            if draft is None and bound_s is None:
                return None
            return Alternative(family=family.name, draft=draft, bound_s=bound_s)
        equal, known_s = self._equal(family), min(map(_step, drafts), default=math.inf)
        drafts += self._explored(family, equal, self._nodes(family, equal), known_s)
        lean = None if drafts else self._leanest(family, equal)
        if lean is not None and lean.excess_bytes <= 0:
            drafts += self._explored(
                family, equal, _of(family, equal.combinations(lean.choice)), math.inf
            )
        if drafts:
            return Alternative(family=family.name, draft=min(drafts, key=_step))
        if lean is None:
            return None
        lacks = shortfall_bytes(self.search.unequal, lean)
        return Alternative(family=family.name, shortfall_bytes=lacks)

    def improved(self, found: Alternative, family: Family) -> Alternative:
        """With what was drafted for other families, too."""
        drafts = [d for d in self.drafts.values() if d.fits and family.has(d.plan)]
        best = min([*drafts, *([found.draft] if found.draft else [])], key=_step, default=None)
        return found if best is None else replace(found, draft=best, shortfall_bytes=None)

    def _leanest(self, family: Family, equal: EqualStages) -> MemoryNeed | None:
        narrow = [slot for slot in least_memory_choices(self.search.space) if family.slot(slot)]
        return least_memory(equal, narrow[:MAX_LEAN], family.way, family.schedule)

    def _equal(self, family: Family) -> EqualStages:
        """Stages under the family's recompute; with all policies, the search's own."""
        space, own = self.search.space, family.policies
        if own is None or own == space.restrictions.policies:
            return self.search.equal
        restricted = replace(space.restrictions, policies=own)
        return EqualStages(replace(space, restrictions=restricted), self.search.programs)

    def _explored(
        self, family: Family, equal: EqualStages, nodes: Iterable[Combination], known_s: float
    ) -> list[PlanDraft]:
        """Of the most promising combinations those that may take less than `known_s`: many are
        cut, few simulated."""
        cuts: list[tuple[float, Combination, list[StageDraft]]] = []
        for node in _diverse(nodes, lambda n: n.estimate_s, _shape)[:MAX_CUTS]:
            if max(node.bound_s, node.estimate_s * OPTIMISM) < known_s:
                found = equal.solve(node, known_s * OVERSHOOT)
                if found is not None:
                    cuts.append((found[0], node, found[1]))
        drafts: list[PlanDraft] = []
        promising = _diverse(cuts, lambda cut: cut[0], lambda cut: cut[1].schedule)
        for objective_s, node, stages in promising[:MAX_SIMULATED]:
            if objective_s >= known_s:
                continue
            key = equal.space.restrictions.policies, node
            if key not in self.drafts:
                self.drafts[key] = self.search.draft(node, stages)
            draft = self.drafts[key]
            if draft.fits and family.has(draft.plan):
                drafts.append(draft)
                known_s = min(known_s, draft.step_time_s)
        return drafts

    def _nodes(self, family: Family, equal: EqualStages) -> list[Combination]:
        """Combinations of a family; under its own recompute, on the meshes that promise most."""
        found = {
            slot: of
            for slot, nodes in self.nodes.items()
            if family.slot(slot) and (of := _of(family, nodes))
        }
        if equal is self.search.equal:
            return [node for nodes in found.values() for node in nodes]
        promising = sorted(found, key=lambda slot: min(n.estimate_s for n in found[slot]))
        return [n for slot in promising[:MAX_SLOTS] for n in _of(family, equal.combinations(slot))]


def _of(family: Family, nodes: Iterable[Combination]) -> list[Combination]:
    return [node for node in nodes if family.way(node.setup) and family.schedule(node.schedule)]


def _diverse(
    items: Iterable[T], seconds: Callable[[T], float], kind: Callable[[T], Any]
) -> list[T]:
    """The fastest of each kind, then the second of each, and so on: estimates of one kind err
    alike."""
    rank: Counter[Any] = Counter()
    ranked = []
    for k, item in enumerate(sorted(items, key=seconds)):
        ranked.append((rank[kind(item)], k, item))
        rank[kind(item)] += 1
    return [item for _, _, item in sorted(ranked, key=lambda entry: entry[:2])]


def _shape(node: Combination) -> tuple[int, int]:
    return node.groups, node.setup.mesh.tp


def _step(draft: PlanDraft) -> float:
    return draft.step_time_s
