"""The outer search: every decision together, best first, with a bound.

Plans with equal stages (`equal_stages.py`) are estimated all at once and explored in the order of
their estimates: cut exactly, then simulated. The inter-op DP (`unequal_stages.py`) then looks, for
each number of micro-batches whose bound leaves room, for a plan with different meshes that beats
the incumbent. The fastest plans are written out and priced again from what is written.

What was not explored has a lower bound on its step time; the least of these bounds and the chosen
step time is the bound of the whole search, and their ratio its gap.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.costmodel.operators import Problem
from meshwright.planner.intra_op import Certificate
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import check_plan
from meshwright.planner.search.candidates import Candidate, PlanDraft
from meshwright.planner.search.drafter import Drafter
from meshwright.planner.search.equal_stages import Combination, MeshChoice, StageDraft
from meshwright.planner.search.failure import failure
from meshwright.planner.search.space import Mesh
from meshwright.planner.stages import BlockPrograms, boundary_index

T = TypeVar("T")

OPTIMISM = 0.93  # estimates are trusted to be no more than this much too high
OVERSHOOT = 1.03  # the cut's objective is trusted to be no more than this above the simulation
MAX_KEPT = 6  # plans of different shapes kept for the report
MAX_PROOFS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The chosen plan first, runners-up after it (some of them drafts); solver certificates of the
    chosen plan's block classes by block name; CPU seconds spent per phase; what was left out and
    why. `meshes` are those whose combinations were offered, `drafts` the plans simulated.

    No plan that the search may choose takes less than `bound_s` under the cost model. `complete`
    says that no time limit cut the search short.
    """

    candidates: tuple[Candidate | PlanDraft, ...]
    certificates: Mapping[str, Certificate]
    phases_s: Mapping[str, float]
    notes: tuple[str, ...]
    meshes: tuple[MeshChoice, ...]
    drafts: tuple[PlanDraft, ...]
    bound_s: float
    complete: bool = True

    @property
    def best(self) -> Candidate:
        best = self.candidates[0]
        assert isinstance(best, Candidate)
        return best

    @property
    def gap(self) -> float:
        """Fraction by which the chosen step may exceed the fastest there is."""
        return max(0.0, self.best.step_time_s / self.bound_s - 1.0)


class Search(Drafter):
    """One search: problem × global batch × overrides -> plans.

    `time_limit_s` ends it with the best plan found by then; `executable` and `programs` are those
    of `Drafter`.
    """

    def __init__(
        self,
        problem: Problem,
        global_batch_size: int,
        overrides: Overrides,
        *,
        executable: bool = False,
        time_limit_s: float | None = None,
        programs: BlockPrograms | None = None,
    ) -> None:
        super().__init__(
            problem, global_batch_size, overrides, executable=executable, programs=programs
        )
        self.time_limit_s = time_limit_s
        self._drafts: list[PlanDraft] = []
        self._phases_s: dict[str, float] = {}
        self._deadline: float | None = None
        self._complete = True

    def again(self, overrides: Overrides) -> SearchResult:
        """The same search under other overrides, on what was priced. Raises as `run` does."""
        return Search(
            self.problem,
            self.global_batch_size,
            overrides,
            executable=self.executable,
            time_limit_s=self.time_limit_s,
            programs=self.programs,
        ).run()

    # --- the search ---

    def run(self) -> SearchResult:
        """Search everything; raises `InfeasibleError` or `OverrideError` where nothing holds."""
        if self.time_limit_s is not None:
            self._deadline = time.monotonic() + self.time_limit_s
        counts = self.space.microbatch_counts()
        meshes = self._timed(
            "bounds", lambda: [c for m in counts for c in self.equal.mesh_choices(m)]
        )
        self._drafts, bound = self._explore(meshes)
        if self.space.may_differ:
            bound = min(bound, self._unequal(counts))
        chosen = self._timed("write out", self._written)
        if not chosen:
            raise failure(self, self._drafts)
        best = chosen[0]
        return SearchResult(
            candidates=tuple(chosen),
            certificates=self._timed("certify", self._certify, best),
            phases_s=dict(self._phases_s),
            notes=tuple(self.space.notes()),
            meshes=tuple(meshes),
            drafts=tuple(self._drafts),
            bound_s=min(bound, self._limit(), best.step_time_s),
            complete=self._complete,
        )

    def _timed(self, phase: str, work: Callable[..., T], *args: Any) -> T:
        started = time.process_time()
        try:
            return work(*args)
        finally:
            self._phases_s[phase] = self._phases_s.get(phase, 0.0) + time.process_time() - started

    def _late(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        self._complete &= not late
        return late

    def _limit(self) -> float:
        """Step time to beat: that of the fastest draft that fits."""
        return min((d.step_time_s for d in self._drafts if d.fits), default=math.inf)

    # --- equal stages ---

    def _explore(self, choices: Iterable[MeshChoice]) -> tuple[list[PlanDraft], float]:
        """Price meshes, estimate, cut and simulate, always what promises most, until nothing left
        can be faster: what was simulated, and a bound on what was left."""
        tie = itertools.count()
        heap: list[tuple[float, int, MeshChoice | Combination, list[StageDraft] | None]] = []

        def add(
            seconds: float, what: MeshChoice | Combination, cut: list[StageDraft] | None = None
        ) -> None:
            heapq.heappush(heap, (seconds, next(tie), what, cut))

        for choice in choices:
            add(choice.bound_s, choice)
        drafts: list[PlanDraft] = []
        limit, left = math.inf, math.inf
        while heap:
            promised, _, what, cut = heapq.heappop(heap)
            if promised >= limit or (limit < math.inf and self._late()):
                left = min([left, what.bound_s, *(entry[2].bound_s for entry in heap)])
                break
            if what.bound_s >= limit:
                continue
            if isinstance(what, MeshChoice):
                combinations = self._timed("price stages", self.equal.combinations, what)
                for one in combinations:
                    add(max(one.estimate_s * OPTIMISM, one.bound_s), one)
            elif cut is None:
                beat = limit * OVERSHOOT
                found = self._timed("cut stages", self.equal.solve, what, beat)
                if found is not None:
                    add(found[0] / OVERSHOOT, what, found[1])
                else:  # below the cutoff nothing fits; the objective is no proof for the rest
                    left = min(left, what.bound_s)
            else:
                draft = self._timed("simulate", self.draft, what, cut)
                drafts.append(draft)
                left = min(left, what.bound_s)
                limit = min(limit, draft.step_time_s) if draft.fits else limit
        self.equal.forget()
        return drafts, left

    # --- different meshes ---

    def _unequal(self, counts: Sequence[int]) -> float:
        """Run the inter-op DP where it may still win; a bound on what was left out."""
        left, waiting = math.inf, []
        for m in counts:
            meshes = self.unequal.meshes(m)
            if meshes:
                waiting.append((float(self.unequal.bounds(m, meshes).min()), m, meshes))
        for bound, m, meshes in sorted(waiting):
            if bound >= self._limit():
                continue
            if self._limit() < math.inf and self._late():
                left = min(left, bound)
                continue
            self._timed("inter-op DP", self._dp, m, meshes)
            left = min(left, bound)
        self._late()
        return left

    def _dp(self, m: int, meshes: Sequence[Mesh]) -> None:
        """The best cut with different meshes for m micro-batches becomes a draft."""
        limit = self._limit()
        setups = self.unequal.setups(m, meshes, limit)
        if not setups:
            return
        table, options = self.unequal.table(m, setups)
        deadline = self._deadline if limit < math.inf else None  # first find something
        solution = self.unequal.solve(table, m, limit * OVERSHOOT, deadline)
        if solution is None:
            return
        for schedule, each in self.space.schedules(len(solution.stages), m, 0):
            stages = (
                self.unequal.stage_drafts(solution, options, m, schedule) if each == 1 else None
            )
            if stages is not None:
                self._drafts.append(self.simulated(stages, m, schedule))

    # --- the answer ---

    def _written(self) -> list[Candidate | PlanDraft]:
        """The fastest drafts of different shapes, fastest first; the first is written out as a
        plan."""
        kept: dict[Any, PlanDraft] = {}
        for draft in sorted((d for d in self._drafts if d.fits), key=_order):
            kept.setdefault(_shape(draft), draft)
        waiting = list(kept.values())
        written: list[Candidate] = []
        # written out, a plan may take a little longer than its draft: whole blocks are recomputed
        while waiting and not (written and written[0].step_time_s <= waiting[0].step_time_s):
            candidate = self.written(waiting.pop(0))
            written = sorted([*written, *[candidate] * candidate.fits], key=_order)
        found: list[Candidate | PlanDraft] = [*written, *waiting]
        return found[:MAX_KEPT]

    def _certify(self, best: Candidate) -> dict[str, Certificate]:
        """An independent proof of the block programs on the chosen meshes: the whole integer
        program of each class, with whole tensors at both ends and nothing forced."""
        found: dict[str, Certificate] = {}
        graph = self.problem.graph
        if check_plan(best.plan, graph, self.problem.factors) != best.assignments:
            raise AssertionError("the plan as written does not give the solved shardings back")
        for stage in best.plan.stages:
            if stage.tp == 1:
                continue
            setting = self.programs.coster.setting(
                stage,
                rows=best.plan.microbatch_rows / stage.dp,
                microbatches=best.plan.num_microbatches,
            )
            chain = self.programs.chain(setting)
            classes: set[str] = set()
            for block, table in zip(graph.blocks, chain.tables, strict=True):
                new = block.class_id not in classes and len(found) < MAX_PROOFS
                if block.name in stage.blocks and new and table is not None:
                    classes.add(block.class_id)
                    index = boundary_index(table, 0, 0)
                    proof = table.certify(index) if index in table.choices else None
                    if proof is not None:
                        found.setdefault(block.name, proof)
        return found


def _order(found: PlanDraft | Candidate) -> tuple[float, int, str]:
    plan = found.evaluation.plan
    return found.step_time_s, len(plan.stages), plan.to_json()


def _shape(draft: PlanDraft) -> tuple[Any, ...]:
    """What makes a plan another one for a reader: more than micro-batches and schedule."""
    stages = draft.evaluation.plan.stages
    return tuple((s.dp, s.cp, s.tp, s.ep, s.zero, s.dp_shard, s.policies[0]) for s in stages)
