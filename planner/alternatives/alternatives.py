"""The best plan of each family that the chosen one is not in: why not something else, by a number.

What the search drafted counts; beyond that each family is explored as the search explores the whole
space, best first, whatever the chosen plan takes. Where nothing of a family fits, the answer is the
bytes it lacks; where the time ran out, the seconds it takes at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.alternatives.families import Family, families
from meshwright.planner.drafts import Combination, EqualStages, MeshChoice, PlanDraft
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

MAX_MESHES = 16  # meshes priced anew for a family, the most promising
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
    explorer = _Families(search=search, result=result)
    found = [explorer.best(family) for family in wanted]
    search.forget()
    graph, factors = search.problem.graph, search.problem.factors
    return tuple(
        replace(explorer.improved(a, f), excluded=excluded(graph, factors, (f.tp,)))
        for a, f in zip(found, wanted, strict=True)
        if a
    )


@dataclass(slots=True, kw_only=True)
class _Families:
    """The best plan of each family, of what was `drafted` for any. Nothing new is looked at where
    the search ran out of time."""

    search: Search
    result: SearchResult
    drafted: list[PlanDraft] = field(default_factory=list)

    def best(self, family: Family) -> Alternative | None:
        """The best plan found, or why there is none; None where the space holds none anyway."""
        drafts = [d for d in self.result.drafts if d.fits and family.has(d.plan)]
        choices = [choice for choice in self.result.meshes if family.choice(choice)]
        if not self.result.complete:
            bound_s = min((choice.bound_s for choice in choices), default=None)
            draft = min(drafts, key=_step, default=None)
            if draft is None and bound_s is None:
                return None
            return Alternative(family=family.name, draft=draft, bound_s=bound_s)
        equal, known_s = self._equal(family), min(map(_step, drafts), default=math.inf)
        drafts += self._explored(family, equal, self._queue(family, equal, choices), known_s)
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
        drafts = [d for d in self.drafted if d.fits and family.has(d.plan)]
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

    def _queue(self, family: Family, equal: EqualStages, choices: Sequence[MeshChoice]) -> Queue:
        """What the search priced by its estimates; of other meshes some, by their bounds."""
        queue, known = Queue(), self.search.equal.known
        for choice in filter(known, choices):
            own = [n for n in self.search.equal.combinations(choice) if _accepts(family, n)]
            if equal is self.search.equal:
                for one in own:
                    queue.add(max(one.estimate_s, one.bound_s), one)
            elif own:  # under other policies
                queue.add(min(one.estimate_s for one in own), choice)
        others = sorted((c for c in choices if not known(c)), key=lambda choice: choice.bound_s)
        for choice in others[:MAX_MESHES]:
            queue.add(choice.bound_s, choice)
        return queue

    def _explored(
        self, family: Family, equal: EqualStages, queue: Queue, known_s: float
    ) -> list[PlanDraft]:
        """Plans of a family that may take less than `known_s`."""
        explorer = Explorer(
            drafter=self.search,
            equal=equal,
            effort=Effort(),
            accept=lambda one: _accepts(family, one),
            trust=1.0,
            known_s=known_s,
        )
        explorer.explore(queue)
        self.drafted += explorer.drafts
        return [d for d in explorer.drafts if d.fits and family.has(d.plan)]


def _accepts(family: Family, one: Combination) -> bool:
    return family.setup(one.setup) and family.schedule(one.schedule)


def _step(draft: PlanDraft) -> float:
    return draft.step_time_s
