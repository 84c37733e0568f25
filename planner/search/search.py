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
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.kernels.measured import OpProfile
from meshwright.costmodel.operators.problem import Problem
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.target import EAGER, Target
from meshwright.planner.intra_op.solvers import Certificate
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.overrides.restrictions import Restrictions, restrict
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.shardings import resolve_shardings
from meshwright.planner.plan.words import describe
from meshwright.planner.pricing.chain import boundary_index
from meshwright.planner.pricing.programs import BlockPrograms
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.search.candidates import (
    Candidate,
    PipelineSetup,
    PlanDraft,
    make_candidate,
    make_draft,
)
from meshwright.planner.search.equal_stages import Combination, EqualStages, MeshChoice, StageDraft
from meshwright.planner.search.errors import InfeasibleError
from meshwright.planner.search.least_memory import least_memory, least_memory_choices
from meshwright.planner.search.relaxations import relaxations, way_out
from meshwright.planner.search.space import Mesh, Space
from meshwright.planner.search.unequal_stages import UnequalStages
from meshwright.profiles.cluster import Cluster

T = TypeVar("T")

OPTIMISM = 0.93  # estimates are trusted to be no more than this much too high
OVERSHOOT = 1.03  # the cut's objective is trusted to be no more than this above the simulation
MAX_KEPT = 6  # plans of different shapes kept for the report
MAX_PROOFS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The chosen plan first, runners-up after it (some of them drafts); the best of each family,
    by its name; solver certificates of the chosen plan's block classes by block name; CPU seconds
    spent per phase; what was left out and why.

    No plan that the search may choose takes less than `bound_s` under the cost model. `complete`
    says that no time limit cut the search short.
    """

    candidates: tuple[Candidate | PlanDraft, ...]
    certificates: Mapping[str, Certificate]
    phases_s: Mapping[str, float]
    notes: tuple[str, ...]
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


@dataclass(slots=True)
class Search:
    """One search: graph × cluster × overrides -> plans.

    `executable` leaves only what the executor runs. `programs` are another search's, to reuse what
    it priced; `time_limit_s` ends the search with the best plan found by then.
    """

    graph: Graph
    table: FactorTable
    cluster: Cluster
    global_batch_size: int
    precision: str
    optimizer: str
    overrides: Overrides
    target: Target = EAGER
    profile: OpProfile | None = None
    executable: bool = False
    time_limit_s: float | None = None
    programs: BlockPrograms = None  # type: ignore[assignment]  # made below where not given
    phases: dict[str, float] = field(default_factory=dict, init=False)
    slots: list[MeshChoice] = field(default_factory=list, init=False)
    drafts: list[PlanDraft] = field(default_factory=list, init=False)
    restrictions: Restrictions = field(init=False)
    space: Space = field(init=False)
    equal: EqualStages = field(init=False)
    unequal: UnequalStages = field(init=False)
    _deadline: float | None = field(default=None, init=False)
    _complete: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.restrictions = restrict(self.overrides, self.graph, executable=self.executable)
        entries = {}
        if self.restrictions.shardings:
            entries = resolve_shardings(
                self.graph, self.graph.blocks, self.restrictions.shardings, "override shardings"
            )
        self.space = Space(
            graph=self.graph,
            table=self.table,
            cluster=self.cluster,
            global_batch_size=self.global_batch_size,
            restrictions=self.restrictions,
        )
        at = self.space.cut_at
        if self.programs is None:
            problem = Problem(
                graph=self.graph,
                factors=self.table,
                cluster=self.cluster,
                precision=self.precision,
                optimizer=self.optimizer,
                target=self.target,
                profile=self.profile,
            )
            self.programs = BlockPrograms(StageCoster(problem), entries, cut_at=at)
        else:
            self.programs = self.programs.deciding(entries, at)
        self.equal = EqualStages(self.space, self.programs)
        self.unequal = UnequalStages(self.space, self.equal)

    # --- the search ---

    def run(self) -> SearchResult:
        """Search everything; raises `InfeasibleError` or `OverrideError` where nothing holds."""
        if self.time_limit_s is not None:
            self._deadline = time.monotonic() + self.time_limit_s
        counts = self.space.microbatch_counts()
        self.slots = self._timed(
            "bounds", lambda: [s for m in counts for s in self.equal.mesh_choices(m)]
        )
        self.drafts, bound = self.explore(self.slots)
        if self.space.may_differ:
            bound = min(bound, self._unequal(counts))
        chosen = self._timed("write out", self._written)
        if not chosen:
            raise self._failure(counts)
        best = chosen[0]
        return SearchResult(
            candidates=tuple(chosen),
            certificates=self._timed("certify", self._certify, best),
            phases_s=dict(self.phases),
            notes=tuple(self.space.notes()),
            bound_s=min(bound, self._limit(), best.step_time_s),
            complete=self._complete,
        )

    def _timed(self, phase: str, work: Callable[..., T], *args: Any) -> T:
        started = time.process_time()
        try:
            return work(*args)
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.process_time() - started

    def _late(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        self._complete &= not late
        return late

    def _limit(self) -> float:
        """Step time to beat: that of the fastest draft that fits."""
        return min((d.step_time_s for d in self.drafts if d.fits), default=math.inf)

    # --- equal stages ---

    def explore(self, slots: Iterable[MeshChoice]) -> tuple[list[PlanDraft], float]:
        """Price meshes, estimate, cut and simulate, always what promises most, until nothing left
        can be faster: what was simulated, and a bound on what was left."""
        tie = itertools.count()
        heap: list[tuple[float, int, MeshChoice | Combination, list[StageDraft] | None]] = []

        def add(
            seconds: float, what: MeshChoice | Combination, cut: list[StageDraft] | None = None
        ) -> None:
            heapq.heappush(heap, (seconds, next(tie), what, cut))

        for slot in slots:
            add(slot.bound_s, slot)
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
                nodes = self._timed("price stages", self.equal.combinations, what)
                for node in nodes:
                    add(max(node.estimate_s * OPTIMISM, node.bound_s), node)
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

    def draft(self, node: Combination, cut: Sequence[StageDraft]) -> PlanDraft:
        """A node's cut, simulated."""
        return self._simulated(cut, node.num_microbatches, node.schedule, node.stages_per_group)

    def _simulated(
        self, stages: Sequence[StageDraft], m: int, schedule: str, each: int = 1
    ) -> PlanDraft:
        step = PipelineSetup(
            global_batch_size=self.global_batch_size,
            num_microbatches=m,
            schedule=schedule,
            stages_per_group=each,
        )
        return make_draft(self.programs.coster, stages, step)

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
        ways = self.unequal.setups(m, meshes, limit)
        if not ways:
            return
        table, options = self.unequal.table(m, ways)
        deadline = self._deadline if limit < math.inf else None  # first find something
        solution = self.unequal.solve(table, m, limit * OVERSHOOT, deadline)
        if solution is None:
            return
        for schedule, each in self.space.schedules(len(solution.stages), m, 0):
            stages = (
                self.unequal.stage_drafts(solution, options, m, schedule) if each == 1 else None
            )
            if stages is not None:
                self.drafts.append(self._simulated(stages, m, schedule))

    # --- the answer ---

    def _written(self) -> list[Candidate | PlanDraft]:
        """The fastest drafts of different shapes, fastest first; the first is written out as a
        plan."""
        kept: dict[Any, PlanDraft] = {}
        for draft in sorted((d for d in self.drafts if d.fits), key=_order):
            kept.setdefault(_shape(draft), draft)
        waiting = list(kept.values())
        written: list[Candidate] = []
        # written out, a plan may take a little longer than its draft: whole blocks are recomputed
        while waiting and not (written and written[0].step_time_s <= waiting[0].step_time_s):
            candidate = make_candidate(self.programs.coster, waiting.pop(0))
            written = sorted([*written, *[candidate] * candidate.fits], key=_order)
        found: list[Candidate | PlanDraft] = [*written, *waiting]
        return found[:MAX_KEPT]

    def _certify(self, best: Candidate) -> dict[str, Certificate]:
        """An independent proof of the block programs on the chosen meshes: the whole integer
        program of each class, with whole tensors at both ends and nothing forced."""
        found: dict[str, Certificate] = {}
        if check_plan(best.plan, self.graph, self.table) != best.assignments:
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
            for block, table in zip(self.graph.blocks, chain.tables, strict=True):
                new = block.class_id not in classes and len(found) < MAX_PROOFS
                if block.name in stage.blocks and new and table is not None:
                    classes.add(block.class_id)
                    index = boundary_index(table, 0, 0)
                    proof = table.certify(index) if index in table.choices else None
                    if proof is not None:
                        found.setdefault(block.name, proof)
        return found

    # --- when nothing fits ---

    def _failure(self, counts: Sequence[int]) -> ValueError:
        worst = self._closest(counts)
        if worst is None and self.programs.refused:
            refused = self.programs.refused
            return OverrideError(f"override shardings: {refused[max(refused)]}")
        if worst is None or worst[0] <= 0:
            return OverrideError(
                f"no plan exists on {self.cluster.describe()} for "
                f"global_batch_size={self.global_batch_size} with overrides "
                f"{self.overrides.given() or 'none'}: {self._obstacle()}; "
                "drop an override or change global_batch_size"
            )
        excess, per_stage, how = worst
        gib = ", ".join(f"stage {k}: {max(x, 0) / 2**30:.3g}" for k, x in enumerate(per_stage))
        found = self._timed("relax", relaxations, self)
        return InfeasibleError(
            f"the model does not fit {self.cluster.describe()} "
            f"({self.cluster.device.usable_bytes / 2**30:.1f} GiB usable per device). "
            f"The closest plan ({how}) lacks {excess / 2**30:.3g} GiB on its fullest stage; "
            f"shortfall in GiB by stage: {gib}. {way_out(found)}",
            per_stage,
            found,
        )

    def _obstacle(self) -> str:
        """Why no plan exists although memory is not short."""
        over, devices = self.restrictions, self.cluster.num_devices
        if self.table.sequence is None and any((cp or 1) > 1 for cp in over.cp):
            return "the model's inputs have no one sequence dim that cp could split"
        if over.uniform("zero") == 1:
            meshes = [x for m in self.space.microbatch_counts() for x in self.unequal.meshes(m)]
            whole = {self.space.undivided(mesh) for mesh in meshes if mesh.dp * mesh.cp > 1}
            if whole and None not in whole:
                return f"zero=1 can't divide {min(filter(None, whole))} among the data axis"
        if devices == 1 or over.pp == 1:
            return (
                "one device group has no virtual stages, no second placement and no use for a "
                "backward in two parts"
            )
        blocks, values = self.graph.blocks, self.graph.values
        trained = sum(any(values[v].requires_grad for v in b.parameters) for b in blocks)
        if over.pp is not None and over.pp * (over.virtual_stages or 1) > trained:
            return (
                f"only {trained} of the model's {len(blocks)} blocks hold a trained parameter, and "
                f"every stage needs one; legal: at most {trained} stages"
            )
        return (
            f"the degrees must multiply to {devices} devices, dp must divide a micro-batch, and "
            "stages of different meshes run under schedules without virtual stages"
        )

    def _closest(self, counts: Sequence[int]) -> tuple[float, Sequence[float], str] | None:
        """The plan that comes closest to fitting: its excess, that of each stage, and how it
        runs."""
        found: list[tuple[float, Sequence[float], str]] = []
        for m in counts:
            ways = self.unequal.setups(m, self.unequal.meshes(m), math.inf)
            if not ways:
                continue
            table, _ = self.unequal.table(m, ways)
            short = self._timed("closest plan", self.unequal.shortfall, table, m)
            if short is not None:
                how = f"{len(short.stages)} stages, {m} micro-batches"
                found.append((short.excess_bytes, short.stage_excess_bytes, how))
        for draft in self.drafts:
            short_bytes = draft.evaluation.prediction.shortfall_bytes(self.cluster)
            found.append((max(short_bytes), short_bytes, describe(draft.evaluation.plan)))
        closest = min(found, key=lambda item: item[0], default=None)
        if closest is not None and closest[0] <= 0:  # but not under the schedules that are left
            lean = least_memory(
                self.equal, least_memory_choices(self.space), lambda w: True, lambda s: True
            )
            if lean is not None and lean.excess_bytes > 0:
                m = lean.choice.num_microbatches
                how = f"{lean.choice.groups} equal stages, {m} micro-batches"
                return lean.excess_bytes, (lean.excess_bytes,), how
        return closest


def _order(found: PlanDraft | Candidate) -> tuple[float, int, str]:
    plan = found.evaluation.plan
    return found.step_time_s, len(plan.stages), plan.to_json()


def _shape(draft: PlanDraft) -> tuple[Any, ...]:
    """What makes a plan another one for a reader: more than micro-batches and schedule."""
    stages = draft.evaluation.plan.stages
    return tuple((s.dp, s.cp, s.tp, s.ep, s.zero, s.dp_shard, s.policies[0]) for s in stages)
