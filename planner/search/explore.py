"""Best-first exploration of plans with equal stages: price meshes, estimate, cut and simulate."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshwright.planner.drafts import (
    Combination,
    Drafter,
    MeshChoice,
    PlanDraft,
    StageDraft,
    Waiting,
)
from meshwright.planner.intra_op import TimeLimit
from meshwright.planner.plan import seconds, slower
from meshwright.planner.search.taste import Taste

T = TypeVar("T")
Unexplored = MeshChoice | Combination | Waiting

progress = logging.getLogger("meshwright.progress")  # heard where somebody watches

OPTIMISM = 0.95  # estimates are trusted to be no more than this much too high
LATE_TRIES = 16  # meshes, combinations and cuts looked at for a first plan when the time is over
UNUSED = 0.01  # of a device's memory, with which a draft may run fewer blocks again
FREE = (0.05, 0.1)  # parts of memory that a plan may leave free, beside the margin
# of a simulated step, by which the objective of its cut may exceed it at most: always, and more
# with as many device groups as micro-batches, or more groups
OVERSHOOT, OVERSHOOT_OF_FEW = 0.03, 0.07


def overshoot(groups: int, m: int) -> float:
    """Ratio of a cut's objective to its simulated step, at most."""
    return 1 + OVERSHOOT + OVERSHOOT_OF_FEW * min(1.0, groups / m) * (groups > 1)


class Effort:
    """CPU seconds spent by phase, and the time limit: `complete` until it cut something short."""

    def __init__(self, limit: TimeLimit) -> None:
        self.phases_s: dict[str, float] = {}
        self.limit = limit
        self.complete = True

    def timed(self, phase: str, work: Callable[..., T], *args: Any) -> T:
        started = time.process_time()
        try:
            return work(*args)
        finally:
            spent = time.process_time() - started
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + spent

    def late(self) -> bool:
        late = self.limit.over()
        self.complete &= not late
        return late


class Queue:
    """Candidates, the most promising first, some with a cut; meshes without a bound last."""

    def __init__(self, choices: Sequence[MeshChoice] = ()) -> None:
        # (seconds promised, number, candidate, its cut)
        self._heap: list[tuple[float, int, Unexplored, list[StageDraft] | None]] = []
        self._count = itertools.count()
        last_s = max((choice.bound_s for choice in choices), default=0.0)
        for choice in choices:
            self.add(choice.bound_s or last_s, choice)

    def __len__(self) -> int:
        return len(self._heap)

    def add(
        self, promised_s: float, candidate: Unexplored, cut: list[StageDraft] | None = None
    ) -> None:
        heapq.heappush(self._heap, (promised_s, next(self._count), candidate, cut))

    def pop(self) -> tuple[Unexplored, list[StageDraft] | None]:
        return heapq.heappop(self._heap)[2:]

    @property
    def promised_s(self) -> float:
        """Seconds of the most promising one."""
        return self._heap[0][0]


@dataclass(slots=True, kw_only=True)
class Explorer:
    """Drafts of the best plans with equal stages, compared as the `taste` weighs them."""

    drafter: Drafter
    effort: Effort
    taste: Taste
    drafts: list[PlanDraft] = field(default_factory=list)
    _known: dict[Any, PlanDraft] = field(default_factory=dict)  # by their decisions
    _limit_s: float = math.inf  # of the first so many `_weighed` drafts
    _weighed: int = 0

    def limit_s(self) -> float:
        """Weighed step time to beat: of the drafts that fit the least that leaves no better one."""
        for draft in self.drafts[self._weighed :]:
            if draft.fits and self.taste.weight(draft) * draft.step_time_s < self._limit_s:
                self._limit_s = min(self._limit_s, self.taste.limit_s(draft))
        self._weighed = len(self.drafts)
        return self._limit_s

    def explore(self, queue: Queue, tries: int = LATE_TRIES) -> None:
        """Draft the most promising candidates until none in the queue can be faster. When the time
        is over without a plan so many more are tried."""
        while queue:
            limit_s = self.limit_s()
            late = self.effort.late()
            if queue.promised_s >= limit_s or (late and (limit_s < math.inf or tries == 0)):
                break
            tries -= late
            if progress.isEnabledFor(logging.DEBUG):
                # it ends where no candidate promises less than the best takes
                share = queue.promised_s / limit_s
                progress.debug(self._standing(limit_s, queue), extra={"share": share})
            candidate, cut = queue.pop()
            if candidate.bound_s >= limit_s:
                continue
            if isinstance(candidate, MeshChoice):
                self.expand(candidate, queue)
            elif isinstance(candidate, Waiting):
                self.relieve(candidate, queue, limit_s)
            elif cut is not None:
                self.simulate(candidate, cut)
            elif (solved := self.cut(candidate, limit_s)) is not None:
                promised_s, cut = solved
                weight = self.taste.ahead(candidate)
                queue.add(weight * max(promised_s, candidate.bound_s), candidate, cut)

    def _standing(self, limit_s: float, queue: Queue) -> str:
        """Progress of the exploration: the best plan, and the gap to the most promising one."""
        counts = f"searching: {len(self.drafts)} plans priced, {len(queue)} left to look at"
        if limit_s == math.inf or not queue.promised_s:
            return counts
        gap = slower(limit_s / queue.promised_s - 1).removeprefix("+")
        return f"{counts}, best {seconds(limit_s)}, gap {gap}"

    def expand(self, choice: MeshChoice, queue: Queue) -> None:
        """Queue the combinations of a mesh."""
        equal = self.drafter.equal
        combinations = self.effort.timed("price stages", equal.combinations, choice)
        candidates: list[Combination | Waiting] = [*combinations, *equal.waiting(choice)]
        for one in candidates:
            queue.add(self.promised_s(one), one)

    def relieve(self, waiting: Waiting, queue: Queue, limit_s: float) -> None:
        """Queue combinations that wait with each relief with which they may take less."""
        for one in self.effort.timed("price stages", self.drafter.equal.relieved, waiting):
            if (promised_s := self.promised_s(one)) < limit_s:
                queue.add(promised_s, one)

    def promised_s(self, one: Combination | Waiting) -> float:
        """Least seconds of a combination, as they are compared."""
        return self.taste.ahead(one) * max(one.estimate_s * OPTIMISM, one.bound_s)

    def cut(
        self, combination: Combination, limit_s: float, less_bytes: float = 0.0
    ) -> tuple[float, list[StageDraft]] | None:
        """The best cut, where it may take less than `limit_s`, and the seconds it promises to take:
        the simulation may hide all of what it sends. `less_bytes` as in `EqualStages.solve`."""
        equal, pipeline = self.drafter.equal, combination.pipeline
        sent_s = equal.sends_s(combination)
        above = overshoot(pipeline.num_devices, pipeline.num_microbatches)
        cutoff_s = limit_s / self.taste.ahead(combination) * above + sent_s
        solved = self.effort.timed("cut stages", equal.solve, combination, cutoff_s, less_bytes)
        if solved is None:
            return None
        objective_s, cut = solved
        least_s = equal.in_turn_s(combination, cut)
        return max((objective_s - sent_s) / above, least_s), cut

    def _draft(
        self, combination: Combination, cut: Sequence[StageDraft], free_bytes: float = 0.0
    ) -> tuple[PlanDraft, bool]:
        """The draft of a cut, and whether it is new: another relief may have given the same."""
        setup, pipeline = combination.setup, combination.pipeline
        decided = [(stage.start, stage.stop, stage.repeated, stage.host) for stage in cut]
        key = setup.chain, setup.sharing, setup.mesh, setup.stepping, pipeline, *decided
        new = key not in self._known
        if new:
            draft = self.effort.timed("simulate", self.drafter.simulated, cut, pipeline, free_bytes)
            self._known[key] = draft
            self.drafts.append(draft)
        return self._known[key], new

    def simulate(self, combination: Combination, cut: Sequence[StageDraft]) -> None:
        """Draft a cut, again where its memory is another one than its levels have it; where devices
        have several stages, after moves of blocks between them; and where certainty counts, with
        more memory left free."""
        before_s = self.limit_s()
        (draft, new), less = self._draft(combination, cut), 0.0
        if self._off(draft):
            less = draft.lacks_bytes + self.drafter.equal.spare_bytes(combination, cut)
            if (solved := self.cut(combination, before_s, less)) is not None:
                draft, new = self._draft(combination, solved[1])
        if not (new and draft.fits):
            return
        if combination.pipeline.each > 1:
            limit_s = self.limit_s() / self.taste.weight(draft)
            moved = self.effort.timed(
                "cut stages", self.drafter.equal.moved, combination, draft, limit_s, less
            )
            if moved is not None:
                draft, _ = self._draft(combination, moved)
        if self.taste.wants_room(draft, before_s):
            for part in FREE:
                more = part * self.drafter.problem.cluster.device.memory_bytes
                if (solved := self.cut(combination, before_s, less + more)) is not None:
                    self._draft(combination, solved[1], more)

    def _off(self, draft: PlanDraft) -> bool:
        """Whether a draft has less room than its levels knew, or enough more for less recompute."""
        if not draft.fits:
            return draft.lacks_bytes > 0
        near = draft.step_time_s * OPTIMISM < self.limit_s() / self.taste.weight(draft)
        more = draft.lacks_bytes < -UNUSED * self.drafter.space.memory_bytes
        return near and more and any(stage.relieved for stage in draft.stages)
