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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.intra_op import Certificate
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import check_plan
from meshwright.planner.search.candidates import Candidate, PlanDraft
from meshwright.planner.search.drafter import Drafter
from meshwright.planner.search.equal_stages import Combination, MeshChoice, StageDraft
from meshwright.planner.search.failure import failure
from meshwright.planner.search.space import Mesh
from meshwright.planner.search.taste import TIE, by_taste, of_draft
from meshwright.planner.stages import BlockPrograms, boundary_index

T = TypeVar("T")

OPTIMISM = 0.95  # estimates are trusted to be no more than this much too high
OVERSHOOT = 1.03  # the cut's objective is trusted to be no more than this above the simulation
MAX_KEPT = 6  # plans of different shapes kept for the report
MAX_PROOFS = 6
MAX_SIMPLER = 2  # combinations of each simpler kind that are simulated for a tie


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

    `objective` is "fastest", or "robust": the simplest of the plans that prices can't tell from the
    best at a stated quantile of their errors (`taste.py`). `time_limit_s` ends the search with the
    best plan found by then; the other arguments are those of `Drafter`.
    """

    def __init__(
        self,
        problem: Problem,
        global_batch_size: int,
        overrides: Overrides,
        *,
        executable: bool = False,
        memory_margin: float = 0.0,
        objective: str = "fastest",
        time_limit_s: float | None = None,
        programs: BlockPrograms | None = None,
    ) -> None:
        super().__init__(
            problem,
            global_batch_size,
            overrides,
            executable=executable,
            memory_margin=memory_margin,
            programs=programs,
        )
        self.objective = objective
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
            memory_margin=self.memory_margin,
            objective=self.objective,
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
        bound = self._explore(meshes)
        bound = min(bound, self._explore(self._timed("bounds", self._between)))
        if self.space.may_differ:
            bound = min(bound, self._unequal(self.space.tried_counts()))
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

    def _explore(self, choices: Iterable[MeshChoice]) -> float:
        """Price meshes, estimate, cut and simulate, always what promises most, until nothing left
        can be faster, or a tie for one that is simpler: a bound on what was left."""
        queue = _Queue()
        for choice in choices:
            queue.add(choice.bound_s, choice)
        left = math.inf
        while queue:
            limit = self._limit()
            if queue.promised_s >= limit or (limit < math.inf and self._late()):
                left = min(left, queue.bound_s)
                self._explore_simpler(queue)
                break
            _, _, what, cut = queue.pop()
            if what.bound_s >= limit:
                continue
            if isinstance(what, MeshChoice):
                for one in self._timed("price stages", self.equal.combinations, what):
                    queue.add(max(one.estimate_s * OPTIMISM, one.bound_s), one)
            elif cut is None:
                found = self._cut(what, limit * OVERSHOOT)
                if found is not None:
                    queue.add(found[0] / OVERSHOOT, what, found[1])
                else:  # below the cutoff nothing fits; the objective is no proof for the rest
                    left = min(left, what.bound_s)
            else:
                left = min(left, what.bound_s)
                self._simulate(what, cut)
        self.equal.forget()
        return left

    def _cut(
        self, combination: Combination, cutoff_s: float, *, alike: bool = False
    ) -> tuple[float, list[StageDraft]] | None:
        return self._timed(
            "cut stages", lambda: self.equal.solve(combination, cutoff_s, alike=alike)
        )

    def _simulate(self, combination: Combination, cut: Sequence[StageDraft]) -> None:
        """Draft a cut; where several stages of a device don't fit together, one of equal shares."""
        draft = self._timed("simulate", self.draft, combination, cut)
        self._drafts.append(draft)
        if not draft.fits and combination.stages_per_group > 1:
            found = self._cut(combination, self._limit() * OVERSHOOT, alike=True)
            if found is not None:
                self._drafts.append(self._timed("simulate", self.draft, combination, found[1]))

    def _explore_simpler(self, queue: _Queue) -> None:
        """Draft what is left and may tie with the best, of each kind that is simpler the most
        promising."""
        best = min((d for d in self._drafts if d.fits), key=_order, default=None)
        if self.objective != "robust" or best is None:
            return
        limit, axes = best.step_time_s * (1 + TIE), of_draft(best, self.problem.cluster)[0]
        seen: Counter[tuple[Any, ...]] = Counter()
        while queue and queue.promised_s < limit and not self._late():
            _, _, what, _ = queue.pop()
            if isinstance(what, MeshChoice):
                if _axes(what.mesh, what.groups) <= axes:
                    for one in self._timed("price stages", self.equal.combinations, what):
                        queue.add(max(one.estimate_s * OPTIMISM, one.bound_s), one)
                continue
            kind = _kind(what)
            if _axes(what.setup.mesh, what.groups) > axes or seen[kind] >= MAX_SIMPLER:
                continue
            found = self._cut(what, limit * OVERSHOOT)
            if found is not None:
                seen[kind] += 1
                self._simulate(what, found[1])

    def _between(self) -> list[MeshChoice]:
        """The mesh of the best draft with the numbers of micro-batches that thinning left out next
        to its own."""
        best = min((d for d in self._drafts if d.fits), key=_order, default=None)
        if best is None:
            return []
        mesh, plan = best.stages[0].setup.mesh, best.plan
        return [
            choice
            for m in self.space.between(mesh.dp, plan.num_microbatches)
            if mesh in self.space.meshes(mesh.devices, m)
            for choice in self.equal.placed(mesh, m, len(plan.devices))
        ]

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
        if self.objective == "robust":
            return self._written_by_taste(waiting)
        written: list[Candidate] = []
        # written out, a plan may take a little longer than its draft: whole blocks are recomputed
        while waiting and not (written and written[0].step_time_s <= waiting[0].step_time_s):
            candidate = self.written(waiting.pop(0))
            written = sorted([*written, *[candidate] * candidate.fits], key=_order)
        found: list[Candidate | PlanDraft] = [*written, *waiting]
        return found[:MAX_KEPT]

    def _written_by_taste(self, drafts: Sequence[PlanDraft]) -> list[Candidate | PlanDraft]:
        """The first draft by taste that fits when it is written out, then the fastest others."""
        least_s = min((d.step_time_s for d in drafts), default=math.inf)
        near = [d for d in drafts if d.step_time_s <= least_s * (1 + 2 * TIE)]
        for judged in by_taste(near, self.programs.coster):
            candidate = self.written(judged.draft)
            if candidate.fits and candidate.step_time_s <= judged.draft.step_time_s * (1 + TIE):
                others = [d for d in drafts if d is not judged.draft]
                return [candidate, *others[: MAX_KEPT - 1]]
        return []

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
    """What makes a plan another one for a reader: more than micro-batches."""
    plan = draft.evaluation.plan
    return plan.schedule, *(
        (s.dp, s.cp, s.tp, s.ep, s.zero, s.dp_shard, s.policies[0]) for s in plan.stages
    )


def _axes(mesh: Mesh, groups: int) -> int:
    """Axes in use besides the data axis."""
    return (groups > 1) + (mesh.tp > 1) + (mesh.cp > 1) + (mesh.ep > 1)


def _kind(one: Combination) -> tuple[Any, ...]:
    """What sets combinations apart by simplicity."""
    mesh = one.setup.mesh
    axes = (one.groups > 1, mesh.tp > 1, mesh.cp > 1, mesh.ep > 1)
    return *axes, SCHEDULES[one.schedule].standard, one.setup.dp_shard > 0, mesh.spread > 1


class _Queue:
    """What is left to explore, the most promising first: (seconds promised, number, what, its
    cut)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, MeshChoice | Combination, list[StageDraft] | None]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(
        self, promised_s: float, what: MeshChoice | Combination, cut: list[StageDraft] | None = None
    ) -> None:
        heapq.heappush(self._heap, (promised_s, next(self._count), what, cut))

    def pop(self) -> tuple[float, int, MeshChoice | Combination, list[StageDraft] | None]:
        return heapq.heappop(self._heap)

    @property
    def promised_s(self) -> float:
        """Seconds of the most promising one."""
        return self._heap[0][0]

    @property
    def bound_s(self) -> float:
        """Lower bound on the step of any plan that is left."""
        return min((entry[2].bound_s for entry in self._heap), default=math.inf)
