"""The best plan of each family that the chosen one is not in: why not something else, by a number.

What the search drafted counts; beyond that the most promising combinations of each family are cut
and simulated, whatever the chosen plan takes. Where nothing of a family fits, the answer is the
bytes it lacks; where the time ran out, the seconds it takes at least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from meshwright.planner.alternatives.families import Family, families
from meshwright.planner.report import Excluded, excluded
from meshwright.planner.search import (
    OPTIMISM,
    OVERSHOOT,
    Combination,
    EqualStages,
    MemoryNeed,
    MeshChoice,
    PlanDraft,
    Search,
    SearchResult,
    StageDraft,
    least_memory,
    least_memory_choices,
    shortfall_bytes,
)

T = TypeVar("T")

MAX_MESHES = 16  # meshes looked at per family, those with the least bounds
MAX_USELESS = 20  # meshes on which nothing fits, likewise
MAX_CUTS = 24  # combinations cut per family, those with the least estimates
MAX_SIMULATED = 6  # of those, the best of each schedule
MAX_LEAST = 8  # meshes looked at for the least memory, those that divide weights most


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
    wanted = [family for family in families(search, result) if not family.has(chosen)]
    explorer = _Explorer(search=search, result=result)
    if result.complete:
        explorer.look(wanted)
    found = [explorer.best(family) for family in wanted]
    search.forget()
    graph, factors = search.problem.graph, search.problem.factors
    return tuple(
        replace(explorer.improved(a, f), excluded=excluded(graph, factors, (f.tp,)))
        for a, f in zip(found, wanted, strict=True)
        if a
    )


@dataclass(slots=True, kw_only=True)
class _Explorer:
    """Shared by all families: the combinations of `MAX_MESHES` meshes of each, and the drafts that
    were simulated, by the recompute policies that were allowed. Nothing new is looked at where the
    search ran out of time."""

    search: Search
    result: SearchResult
    combinations: dict[MeshChoice, Sequence[Combination]] = field(default_factory=dict)
    drafts: dict[tuple[tuple[str, ...], Combination], PlanDraft] = field(default_factory=dict)

    def look(self, offered: Sequence[Family]) -> None:
        """Fill `combinations`; a mesh on which nothing fits does not count."""
        for family in offered:
            useful = 0
            for choice in self.choices(family)[: MAX_USELESS + MAX_MESHES]:
                if choice not in self.combinations:
                    self.combinations[choice] = self.search.equal.combinations(choice)
                useful += bool(self.combinations[choice])
                if useful >= MAX_MESHES:
                    break

    def choices(self, family: Family) -> list[MeshChoice]:
        """Meshes that may hold plans of a family, the least bound of each number of micro-batches
        first: with few of them bounds know no bubble, and some schedules have one."""
        choices = filter(family.choice, self.result.meshes)
        return _diverse(choices, lambda s: s.bound_s, lambda s: s.num_microbatches)

    def best(self, family: Family) -> Alternative | None:
        """The best plan found, or why there is none; None where the space holds none anyway."""
        drafts = [d for d in self.result.drafts if d.fits and family.has(d.plan)]
        if not self.result.complete:
            bound_s = min((s.bound_s for s in self.choices(family)), default=None)
            draft = min(drafts, key=_step, default=None)
            if draft is None and bound_s is None:
                return None
            return Alternative(family=family.name, draft=draft, bound_s=bound_s)
        equal, known_s = self._equal(family), min(map(_step, drafts), default=math.inf)
        drafts += self._explored(family, equal, self._combinations(family, equal), known_s)
        need = None if drafts else self._least_memory(family, equal)
        if need is not None and need.excess_bytes <= 0:
            drafts += self._explored(
                family, equal, _of(family, equal.combinations(need.choice)), math.inf
            )
        if drafts:
            return Alternative(family=family.name, draft=min(drafts, key=_step))
        if need is None:
            return None
        lacks = shortfall_bytes(self.search.unequal, need)
        return Alternative(family=family.name, shortfall_bytes=lacks)

    def improved(self, found: Alternative, family: Family) -> Alternative:
        """With what was drafted for other families, too."""
        drafts = [d for d in self.drafts.values() if d.fits and family.has(d.plan)]
        best = min([*drafts, *([found.draft] if found.draft else [])], key=_step, default=None)
        return found if best is None else replace(found, draft=best, shortfall_bytes=None)

    def _least_memory(self, family: Family, equal: EqualStages) -> MemoryNeed | None:
        narrow = [
            choice for choice in least_memory_choices(self.search.space) if family.choice(choice)
        ]
        return least_memory(equal, narrow[:MAX_LEAST], family.setup, family.schedule)

    def _equal(self, family: Family) -> EqualStages:
        """Stages under the family's recompute; with all policies, the search's own."""
        own = family.policies
        return self.search.equal if own is None else self.search.equal_with(own)

    def _explored(
        self,
        family: Family,
        equal: EqualStages,
        combinations: Iterable[Combination],
        known_s: float,
    ) -> list[PlanDraft]:
        """Of the most promising combinations those that may take less than `known_s`: many are
        cut, few simulated."""
        cuts: list[tuple[float, Combination, list[StageDraft]]] = []
        for combination in _diverse(combinations, lambda n: n.estimate_s, _shape)[:MAX_CUTS]:
            if max(combination.bound_s, combination.estimate_s * OPTIMISM) < known_s:
                found = equal.solve(combination, known_s * OVERSHOOT)
                if found is not None:
                    cuts.append((found[0], combination, found[1]))
        drafts: list[PlanDraft] = []
        promising = _diverse(cuts, lambda cut: cut[0], lambda cut: cut[1].schedule)
        for objective_s, combination, stages in promising[:MAX_SIMULATED]:
            if objective_s >= known_s:
                continue
            key = equal.space.restrictions.policies, combination
            if key not in self.drafts:
                self.drafts[key] = self.search.draft(combination, stages)
            draft = self.drafts[key]
            if draft.fits and family.has(draft.plan):
                drafts.append(draft)
                known_s = min(known_s, draft.step_time_s)
        return drafts

    def _combinations(self, family: Family, equal: EqualStages) -> list[Combination]:
        """Combinations of a family; under its own recompute, on the meshes that promise most."""
        found = {
            choice: of
            for choice, combinations in self.combinations.items()
            if family.choice(choice) and (of := _of(family, combinations))
        }
        if equal is self.search.equal:
            return [combination for combinations in found.values() for combination in combinations]
        promising = sorted(found, key=lambda choice: min(n.estimate_s for n in found[choice]))
        return [
            n for choice in promising[:MAX_MESHES] for n in _of(family, equal.combinations(choice))
        ]


def _of(family: Family, combinations: Iterable[Combination]) -> list[Combination]:
    return [
        combination
        for combination in combinations
        if family.setup(combination.setup) and family.schedule(combination.schedule)
    ]


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


def _shape(combination: Combination) -> tuple[int, int]:
    return combination.groups, combination.setup.mesh.tp


def _step(draft: PlanDraft) -> float:
    return draft.step_time_s
