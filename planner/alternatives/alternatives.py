"""The best plan of each family that the chosen one is not in: why not something else, by a number.

What the search drafted counts; beyond that each family is explored as the search explores the whole
space, best first, whatever the chosen plan takes. Where nothing of a family fits, the answer is the
bytes it lacks; where the time ran out, the seconds it takes at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from meshwright.planner.alternatives.families import Family, families
from meshwright.planner.drafts import Combination, EqualStages, MeshChoice, PlanDraft, Waiting
from meshwright.planner.report import Excluded, excluded
from meshwright.planner.search import (
    Effort,
    Explorer,
    MemoryNeed,
    Queue,
    Search,
    SearchResult,
    least_memory,
    least_memory_choices,
    shortfall_bytes,
)

_step = attrgetter("step_time_s")

MAX_MESHES = 16  # meshes priced anew for a family, the most promising
MAX_AGAIN = 800  # combinations estimated anew under a family's recompute
MAX_CUTS = 240  # combinations of a family that are cut, the most promising
FITS_NOT = 0.5  # of a cut is the effort to find that there is none
FIRST_CUTS = 6  # at most that wait for their simulation
TIGHT = 1.25  # assumed of stages that fit only in unequal shares: what they take above the estimate
FEW = 5  # families that a short report has plans of, where the search drafted fewer
FEW_CUTS = 2  # combinations cut for one of those
MAX_TRIED = 8  # of those that have none
MAX_LEAST = 8  # meshes looked at for the least memory, those that divide weights most


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan found of a family; without one, the bytes that its leanest plan lacks on the
    fullest stage. Where the time ran out, the seconds that any plan of it takes at least.
    `excluded` is what can't be split as the family asks, `instead` a faster plan outside of the
    family that an override of its decision would end with."""

    family: str
    draft: PlanDraft | None = None
    shortfall_bytes: float | None = None
    bound_s: float | None = None
    excluded: tuple[Excluded, ...] = ()
    instead: PlanDraft | None = None


def alternatives(search: Search, result: SearchResult) -> tuple[Alternative, ...]:
    """The best of every family that the search could have chosen from and did not; when the time is
    over nothing new is explored."""
    chosen = result.best.plan
    wanted = [family for family in families(search, result) if not family.has(chosen)]
    explorer = _Families(search=search, result=result, effort=Effort(search.programs.time))
    found = [explorer.best(family) for family in wanted]
    search.forget()
    graph, factors = search.problem.graph, search.problem.factors
    return tuple(
        replace(explorer.improved(a, f), excluded=excluded(graph, factors, (f.tp,)))
        for a, f in zip(found, wanted, strict=True)
        if a
    )


def known_alternatives(search: Search, result: SearchResult) -> tuple[Alternative, ...]:
    """Of each such family the best plan that the search drafted; where those are few, the most
    promising combinations that it priced are cut for others."""
    chosen = result.best.plan
    wanted = [family for family in families(search, result) if not family.has(chosen)]
    effort = Effort(search.programs.time)
    plain = replace(search.taste, robust=False)
    explorer = Explorer(drafter=search, equal=search.equal, effort=effort, taste=plain)
    known = {f.name: [d for d in result.drafts if d.fits and f.has(d.plan)] for f in wanted}
    few = FEW - sum(map(bool, known.values()))
    unknown = [family for family in wanted if not known[family.name]]
    for family, priced in _promising(search, result, unknown)[:MAX_TRIED]:
        if few <= 0 or effort.late():
            break
        for one in priced[:FEW_CUTS]:
            found = explorer.cut(one, math.inf)
            if found is not None:
                explorer.simulate(one, found[1])
        known[family.name] = [d for d in explorer.drafts if d.fits and family.has(d.plan)]
        few -= bool(known[family.name])
    search.forget()
    return tuple(
        Alternative(family=name, draft=min(drafts, key=_step))
        for name, drafts in known.items()
        if drafts
    )


def _promising(
    search: Search, result: SearchResult, wanted: Sequence[Family]
) -> list[tuple[Family, list[Combination]]]:
    """Families with what the search priced of them, the most promising first."""
    equal = search.equal
    priced = list(filter(equal.known, result.meshes))
    found = []
    for family in wanted:
        own = [
            one
            for choice in priced
            if family.policies is None and family.choice(choice)
            for one in equal.combinations(choice)
            if _accepts(family, one)
        ]
        if own:
            found.append((family, sorted(own, key=_promised_s)))
    return sorted(found, key=lambda item: _promised_s(item[1][0]))


@dataclass(slots=True, kw_only=True)
class _Families:
    """The best plan of each family, of what was `drafted` for any. Nothing new is looked at where
    the search ran out of time, or this does."""

    search: Search
    result: SearchResult
    effort: Effort
    drafted: list[PlanDraft] = field(default_factory=list)

    def best(self, family: Family) -> Alternative | None:
        """The best plan found, or why there is none; None where the space holds none anyway."""
        drafts = [d for d in self.result.drafts if d.fits and family.has(d.plan)]
        choices = [choice for choice in self.result.meshes if family.choice(choice)]
        if not self.result.complete or self.effort.late():
            bound_s = min((choice.bound_s for choice in choices), default=None)
            draft = min(drafts, key=_step, default=None)
            if draft is None and bound_s is None:
                return None
            return Alternative(family=family.name, draft=draft, bound_s=bound_s)
        drafts += [d for d in self.drafted if d.fits and family.has(d.plan)]
        equal, known_s = self._equal(family), min(map(_step, drafts), default=math.inf)
        queue = self._queue(family, equal, choices)
        if chosen_away := any(s.host or s.segmented for s in self.result.best.plan.stages):
            self._add_waiting(family, queue, choices)
        drafts += self._explored(family, equal, queue, known_s)
        if not drafts and not chosen_away:  # what the choice did without
            self._add_waiting(family, queue := Queue(), choices)
            drafts += self._explored(family, equal, queue, math.inf)
        need = None if drafts else self._least_memory(family, equal)
        if need is not None and need.excess_bytes <= 0:
            drafts += self._explored(family, equal, Queue([need.choice]), math.inf)
        if drafts:
            return Alternative(family=family.name, draft=min(drafts, key=_step))
        if need is None:
            return None
        lacks = shortfall_bytes(self.search.unequal, need)
        return Alternative(family=family.name, shortfall_bytes=lacks)

    def improved(self, found: Alternative, family: Family) -> Alternative:
        """With what was drafted for other families, too."""
        known = [d for d in (*self.result.drafts, *self.drafted) if d.fits]
        drafts = [found.draft] if found.draft else []
        best = min([*drafts, *(d for d in known if family.has(d.plan))], key=_step, default=None)
        if best is None:
            return found
        other = min((d for d in known if family.instead(d.plan)), key=_step, default=None)
        faster = other is not None and other.step_time_s < best.step_time_s
        return replace(found, draft=best, shortfall_bytes=None, instead=other if faster else None)

    def _least_memory(self, family: Family, equal: EqualStages) -> MemoryNeed | None:
        narrow = [
            choice for choice in least_memory_choices(self.search.space) if family.choice(choice)
        ]
        return least_memory(equal, narrow[:MAX_LEAST], family.setup, family.schedule)

    def _equal(self, family: Family) -> EqualStages:
        """Stages under the family's recompute; with all policies, the search's own."""
        own = family.policies
        if family.forced is not None:
            overrides = replace(self.search.overrides, recompute=family.forced)
            return self.search.like(overrides=overrides).equal
        return self.search.equal if own is None else self.search.equal_with(own)

    def _queue(self, family: Family, equal: EqualStages, choices: Sequence[MeshChoice]) -> Queue:
        """What the search priced by its estimates; of other meshes some, by their bounds."""
        queue, known = Queue(), self.search.equal.known
        for choice in filter(known, choices):
            for one in (equal if family.forced else self.search.equal).combinations(choice):
                if _accepts(family, one):
                    queue.add(_promised_s(one), one)
        others = sorted((c for c in choices if not known(c)), key=lambda choice: choice.bound_s)
        for choice in others[:MAX_MESHES]:
            queue.add(choice.bound_s, choice)
        return queue

    def _add_waiting(self, family: Family, queue: Queue, choices: Sequence[MeshChoice]) -> None:
        """What of a family may be relieved, of what the search priced."""
        for choice in filter(self.search.equal.known, choices):
            for own in self.search.equal.waiting(choice):
                if family.setup(own.setup):
                    queue.add(max(own.estimate_s, own.bound_s), own)

    def _explored(
        self, family: Family, equal: EqualStages, queue: Queue, known_s: float
    ) -> list[PlanDraft]:
        """Plans of a family that may take less than `known_s`: the most promising combinations are
        cut, and the best cuts simulated."""
        explorer = Explorer(
            drafter=self.search,
            equal=equal,
            effort=self.effort,
            taste=replace(self.search.taste, robust=False),
            accept=lambda one: _accepts(family, one),
            trust=1.0,
            known_s=known_s,
        )
        alone = [one for one in queue.combinations() if one.groups == 1]
        own = equal is self.search.equal
        for one in sorted(alone, key=_promised_s)[: int(own)]:  # whose estimate is exact
            found = explorer.cut(one, known_s)
            if found is not None:
                explorer.simulate(one, found[1])
        again: dict[int, Combination] = {}  # estimated under the family's policies
        cuts, tried = Queue(), 0.0
        while (queue or cuts) and not self.effort.late():
            limit = explorer.limit_s()
            left_s = queue.promised_s if queue and tried < MAX_CUTS else math.inf
            if cuts and (len(cuts) >= FIRST_CUTS or cuts.promised_s <= left_s):
                promised_s, _, what, cut = cuts.pop()
                if promised_s < limit and isinstance(what, Combination) and cut is not None:
                    explorer.simulate(what, cut)
                continue
            if left_s >= limit:
                break
            _, _, what, _ = queue.pop()
            if isinstance(what, Waiting):
                for one in (each for each in equal.relieved(what) if _accepts(family, each)):
                    again[id(one)] = one
                    queue.add(_promised_s(one), one)
            elif isinstance(what, Combination):
                if own or id(what) in again:
                    found = explorer.cut(what, limit)
                    tried += FITS_NOT if found is None else 1
                    if found is not None:
                        cuts.add(found[0], what, found[1])
                elif len(again) < MAX_AGAIN:
                    anew = equal.estimated(what)
                    again[id(anew or what)] = anew or what
                    if anew is not None and _accepts(family, anew):
                        queue.add(_promised_s(anew), anew)
            else:
                for one in equal.combinations(what):
                    again[id(one)] = one
                    if _accepts(family, one):
                        queue.add(_promised_s(one), one)
        self.drafted += explorer.drafts
        return [d for d in explorer.drafts if d.fits and family.has(d.plan)]


def _accepts(family: Family, one: Combination) -> bool:
    fits = one.groups > 1 or not one.tight
    return fits and family.setup(one.setup) and family.schedule(one.schedule)


def _promised_s(one: Combination) -> float:
    """The estimate of a combination; where equal stages don't fit it is too low."""
    return max(one.estimate_s * (TIGHT if one.tight else 1.0), one.bound_s)
