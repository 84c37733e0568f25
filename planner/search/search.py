"""The outer search: every decision together, best first, with a bound (docs/decides/search.md).

The gap is the ratio of the chosen step and a lower bound on every plan's, from the least seconds of
blocks: of the price itself, also where the objective prefers a simpler plan within a tie. A closer
bound, on plans with equal stages, is computed when it is asked for (`planner/bounds`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Unpack

from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.bounds import Bounds
from meshwright.planner.drafts import Candidate, Drafter, Given, MeshChoice, PlanDraft
from meshwright.planner.drafts.apart import apart_drafts
from meshwright.planner.garbage import seldom_collected
from meshwright.planner.intra_op import CORE_S, Certificate
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, check_plan, describe, kept_together, sized
from meshwright.planner.search.explore import Effort, Explorer, Queue, overshoot
from meshwright.planner.search.least_memory import least_memory, least_memory_choices, memory_needs
from meshwright.planner.search.taste import Taste, order, shape
from meshwright.planner.stages import boundary_index

BOUNDS_SHARE = 0.5  # of the time limit, for bounds before anything is priced
BOUNDS_S = 1.0  # seconds that they may take anyway
MAX_KEPT = 6  # plans of different shapes for the report
MAX_PROOFS = 6
WRITTEN_LESS = 0.01  # of a draft's step, by which the plan that is written out may be faster
MOST_WRITTEN = 4  # plans that are written out for that
ALL_COUNTS = 6  # numbers of micro-batches up to which the stage DP looks at all
FEW_CUTS = 20  # places where stages may end, up to which it looks at all, too
NEAR_COUNTS = 3  # of more, those that it looks at
# of the objective of its cuts: seen where stages are unequal and micro-batches few
MOST_OVERSHOOT = 2.0
LATE_MESHES = 2  # of those that need least memory, looked at when the time is over


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The chosen plan first, runners-up after it (some of them drafts); solver certificates of the
    chosen plan's block classes by block name; CPU seconds spent per phase; what was left out and
    why. `meshes` are those whose combinations were offered, `drafts` the plans simulated.

    `bound_s` is a lower bound on the step of every plan that the search may choose, under the cost
    model; 0 where there was no time to bound them all. `complete`: no time limit cut the search, or
    a block's program, short.
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
        """Part by which the chosen step may exceed the fastest there is; inf without a bound."""
        return max(0.0, self.best.step_time_s / self.bound_s - 1.0) if self.bound_s else math.inf


class Search(Drafter):
    """One search: problem × global batch × overrides -> plans.

    `objective` is "fastest", or "robust": the simplest of the plans that prices can't tell from the
    best at a stated quantile of their errors (`taste.py`). `time_limit_s` ends the search with the
    best plan so far; the other arguments are those of `Drafter`.
    """

    def __init__(
        self,
        problem: Problem,
        global_batch_size: int,
        overrides: Overrides,
        *,
        objective: str = "fastest",
        time_limit_s: float | None = None,
        **options: Unpack[Given],
    ) -> None:
        super().__init__(problem, global_batch_size, overrides, **options)
        self.objective = objective
        self.time_limit_s = time_limit_s
        self._effort = Effort(self.programs.time)
        self.taste = Taste(coster=self.programs.coster, robust=objective == "robust")
        self._explorer = Explorer(drafter=self, effort=self._effort, taste=self.taste)
        self.drafts = self._explorer.drafts

    def again(self, overrides: Overrides) -> SearchResult:
        """Search under other overrides, with the same prices. Raises as `run` does."""
        return self.like(overrides=overrides).run()

    def _arguments(self) -> dict[str, Any]:
        more = {"objective": self.objective, "time_limit_s": self.time_limit_s}
        return super()._arguments() | more

    @property
    def phases_s(self) -> Mapping[str, float]:
        """CPU seconds spent so far, by phase."""
        return self._effort.phases_s

    # --- the search ---

    @seldom_collected()
    def run(self) -> SearchResult:
        """Search everything; raises `InfeasibleError` or `OverrideError` where nothing holds. After
        the time limit a first plan is still looked for where it is likely."""
        limit, limit_s = self.programs.time, self.time_limit_s
        with limit.until(limit.after(limit_s)):
            bounds_s = None if limit_s is None else max(limit_s * BOUNDS_SHARE, BOUNDS_S)
            with limit.until(limit.after(bounds_s)):
                meshes = self._effort.timed("bounds", self._meshes)
                self._effort.late()
            try:
                result = self._searched(meshes)
            finally:
                self.programs.forget_hurried()
            if result is None:
                raise failure(self, self.drafts)
            return result

    def _meshes(self) -> list[MeshChoice]:
        if self.space.must_be_apart and self.space.branches:  # no stages that follow each other
            return []
        counts = self.space.counts()
        return [choice for m in counts for choice in self.equal.mesh_choices(m)]

    def _searched(self, meshes: Sequence[MeshChoice]) -> SearchResult | None:
        """The search, on these meshes; None where no plan that was written out fits."""
        timed = self._effort.timed
        equal_s = min((choice.bound_s for choice in meshes), default=math.inf)
        self._explore(meshes)
        between = timed("bounds", self._between)
        equal_s = min([equal_s, *(choice.bound_s for choice in between)])
        self._explore(between)
        if self._effort.late() and self._limit() == math.inf and not self.space.must_be_apart:
            self._leanest()
        different_s = self._unequal(self.space.tried_counts() if self.space.may_differ else ())
        chosen = timed("write out", self._written)
        if not chosen:
            return None
        best = chosen[0]
        return SearchResult(
            candidates=tuple(chosen),
            certificates=timed("certify", self._certify, best),
            phases_s=dict(self._effort.phases_s),
            notes=(*self.space.notes(), *self._unproved()),
            meshes=(*meshes, *between),
            drafts=tuple(self.drafts),
            bound_s=min(equal_s, different_s, self._limit(), best.step_time_s),
            complete=self._effort.complete and not self.programs.unproved,
        )

    def _unproved(self) -> list[str]:
        blocks = sorted(self.programs.unproved)
        if not blocks:
            return []
        return [
            f"the programs of {len(blocks)} blocks ({blocks[0]}, ...) were too large to be solved "
            f"to the end in {CORE_S:g} s a kind: their shardings are legal, others may cost less"
        ]

    def equal_bound_s(self, result: SearchResult) -> float:
        """Lower bound on the step of plans with equal stages, but for the chosen one: closer than
        that of the result, and seconds of work."""
        if result.best.evaluation.priced[0].setting.validated:  # its devices don't begin together
            return result.bound_s
        best_s = min([result.best.step_time_s, *(d.step_time_s for d in result.drafts if d.fits)])
        bounds = Bounds(space=self.space, equal=self.equal)
        return bounds.of_equal(result.meshes, best_s, self.programs.time.over)

    def _limit(self) -> float:
        """Weighed step time to beat."""
        return self._explorer.limit_s()

    def _best_draft(self) -> PlanDraft | None:
        fit = [d for d in self.drafts if d.fits]
        return self.taste.judged(fit)[0][1] if fit else None

    # --- equal stages ---

    def _explore(self, choices: Sequence[MeshChoice]) -> None:
        """Draft the best plans on these meshes."""
        self._explorer.explore(Queue(choices))
        self.equal.forget()

    def _leanest(self) -> None:
        """A first plan, of those meshes that need least memory, when the time is over."""
        for choice in least_memory_choices(self.space)[:LATE_MESHES]:
            if any(need.excess_bytes <= 0 for need in memory_needs(self.equal, choice)):
                self._explorer.explore(Queue([choice]))

    def _between(self) -> list[MeshChoice]:
        """The best draft's mesh with the untried numbers of micro-batches next to its own."""
        best = self._best_draft()
        if best is None or best.plan.slices:
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
        """Run the inter-op DP where it may win; lower bound on steps with different meshes."""
        meshes = {m: fitting for m in counts if (fitting := self.unequal.fitting(m))}
        bounds_s = {m: float(self.unequal.bounds(m, meshes[m]).min()) for m in meshes}
        waiting = sorted(meshes, key=lambda m: (bounds_s[m], m))
        while waiting and not self._effort.late():
            near = self._near_best(counts)
            tried = [m for m in waiting if m in near and bounds_s[m] < self._limit()]
            if not tried:
                break
            for m in tried:
                waiting.remove(m)
                if bounds_s[m] < self._limit() and not self._effort.late():
                    self._effort.timed("inter-op DP", self._dp, m, meshes[m])
        return min(bounds_s.values(), default=math.inf)

    def _near_best(self, counts: Sequence[int]) -> Sequence[int]:
        """Numbers of micro-batches next to the best draft's, where they are many."""
        best = self._best_draft()
        if best is None or len(counts) <= ALL_COUNTS or len(self.equal.cuts) <= FEW_CUTS:
            return counts
        log = math.log(best.plan.num_microbatches)
        return sorted(counts, key=lambda m: abs(math.log(m) - log))[:NEAR_COUNTS]

    def _dp(self, m: int, meshes: Sequence[Mesh]) -> None:
        """The best cuts with different meshes for m micro-batches become drafts."""
        limit = self._limit()
        setups = self.unequal.setups(m, meshes, limit)
        if not setups:
            return
        deadline = self.programs.time.ends_s if limit < math.inf else None  # first find something
        few = len(self.equal.cuts) <= FEW_CUTS
        cutoff_s = limit * (MOST_OVERSHOOT if few else overshoot(2, m))
        if self.space.branches:
            for drafted in apart_drafts(self.unequal, m, setups, cutoff_s, deadline):
                self.drafts.append(self.simulated(*drafted))
        if self.space.must_be_apart:
            return
        if limit < math.inf and len(self.unequal.coarse()) < len(self.equal.cuts):
            setups = self.unequal.promising(m, setups, cutoff_s, deadline)
            if not setups:
                return
        tables, options = self.unequal.tables(m, setups)
        for names, table in tables.items():
            solution = self.unequal.solve(names, table, m, cutoff_s, deadline)
            if solution is None:
                continue
            for pipeline in self.space.schedules(len(solution.stages), m):
                if pipeline.each == 1 and (
                    stages := self.unequal.stage_drafts(solution.stages, options, pipeline)
                ):
                    self.drafts.append(self.simulated(stages, pipeline))

    # --- the answer ---

    def _written(self) -> list[Candidate | PlanDraft]:
        """The best plan, written out, then the fastest others of different shapes. Written out, a
        plan may take a little longer than its draft, as whole blocks are recomputed or sent, or
        less, as some come back: drafts are written until no other is better than the best of them,
        or a few more where the fastest plan is asked for; and beside one with states off devices
        the best one without, which gains most by that."""
        fitting = [d for d in self.drafts if d.fits]
        written, refused = list[tuple[float, Candidate, PlanDraft]](), set[int]()
        judged = self.taste.judged(fitting)
        on_devices = next((draft for _, draft in judged if not _away(draft)), None)
        for number_s, draft in judged:
            if written:
                more_s = WRITTEN_LESS * (not self.taste.robust and len(written) < MOST_WRITTEN)
                beside = draft is on_devices and _away(written[0][2])
                if written[0][0] <= number_s * (1 - more_s) and not beside:
                    continue
            candidate = self.written(draft)
            if candidate.fits:
                longer = candidate.step_time_s / draft.step_time_s
                written.append((longer * number_s, candidate, draft))
                written.sort(key=lambda entry: entry[0])
            else:
                refused.add(id(draft))
        if not written:
            return []
        _, best, chosen = written[0]
        fastest = dict[Any, PlanDraft]()
        for draft in sorted(fitting, key=order):
            fastest.setdefault(shape(draft), draft)
        fastest.pop(shape(chosen))
        others = (d for d in fastest.values() if id(d) not in refused)
        return [best, *islice(others, MAX_KEPT - 1)]

    def _certify(self, best: Candidate) -> dict[str, Certificate]:
        """An independent proof of the block programs on the chosen meshes: the whole integer
        program of each class, with whole tensors at both ends and nothing forced."""
        proofs: dict[str, Certificate] = {}
        limit, plan, graph = self.programs.time, best.plan, self.problem.graph
        if limit.over():
            return proofs
        if check_plan(plan, graph, self.problem.factors) != best.assignments:
            raise AssertionError("the plan as written does not give the solved shardings back")
        for stage in plan.stages:
            if stage.tp == 1 or limit.over():
                continue
            count = plan.num_microbatches * plan.slice_count
            batch = Batch(
                rows=plan.pass_rows / stage.dp, microbatches=count, slices=plan.slice_count
            )
            mesh = replace(stage.mesh, spread=1)
            chain = self.programs.chain(self.programs.coster.setting(mesh, batch))
            classes: set[str] = set()
            for block, table in zip(graph.blocks, chain.tables, strict=True):
                new = block.class_id not in classes and len(proofs) < MAX_PROOFS
                if block.name in stage.blocks and new and table is not None and table.proved:
                    classes.add(block.class_id)
                    index, seconds = boundary_index(table, 0, 0), min(CORE_S, limit.left_s())
                    proof = table.certify(index, seconds) if index in table.choices else None
                    if proof is not None:
                        proofs.setdefault(block.name, proof)
        return proofs


def _away(draft: PlanDraft) -> bool:
    return any(any(stage.offload.values()) for stage in draft.plan.stages)


# --- failure --------------------------------------------------------------------------------------

# Reasons why a search has no plan: memory is short, or the overrides leave nothing to choose from.
# Ways out are looked for where somebody asks (`planner/alternatives/ways_out.py`).


def failure(drafter: Drafter, drafts: Sequence[PlanDraft]) -> InfeasibleError | OverrideError:
    """The error where no draft fits: the closest plan's shortfall, or the override at fault."""
    cluster = drafter.problem.cluster
    if drafter.programs.time.over():
        return _late(drafter)
    closest = _closest(drafter, drafts)
    if closest is None and drafter.programs.refused:
        refused = drafter.programs.refused
        return OverrideError(f"override shardings: {refused[max(refused)]}")
    if closest is None or closest[0] <= 0:
        if error := next(drafter.overrides.ruled_out(given=False), None):
            return error
        return OverrideError(
            f"no plan exists on {cluster.describe()} for "
            f"global_batch_size={drafter.global_batch_size} with overrides "
            f"{drafter.overrides.given() or 'none'}: {_obstacle(drafter)}; "
            f"drop an override or change global_batch_size{_together(drafter)}"
        )
    excess, per_stage, how = closest
    peak = drafter.space.memory_bytes + excess  # the reserve of a device is in both
    likely = drafter.programs.coster.errors[1].below(cluster.device.memory_bytes / peak)
    short = ", ".join(f"stage {k}: {sized(max(x, 0))}" for k, x in enumerate(per_stage))
    return InfeasibleError(
        f"the model does not fit {cluster.describe()} "
        f"({sized(drafter.space.room_bytes)} usable per device{_margin(drafter)}). "
        f"The closest plan ({how}) takes {sized(peak)} on its fullest stage, reserve and all, "
        f"{sized(excess)} more (in {likely:.0%} of cases peaks are so far below their price); "
        f"shortfall by stage: {short}{_together(drafter)}.{_host(drafter, drafts)}",
        per_stage,
    )


def _late(drafter: Drafter) -> InfeasibleError:
    """The error where the time was over before there was a plan."""
    late = f"no plan was found in the time given on {drafter.problem.cluster.describe()}"
    need = least_memory(drafter.equal, least_memory_choices(drafter.space)[:LATE_MESHES])
    if need is None or need.excess_bytes <= 0:
        return InfeasibleError(f"{late}; give it more: time_limit_s", ())
    groups, mesh, lacks = need.choice.groups, need.choice.mesh, need.excess_bytes
    return InfeasibleError(
        f"{late}: {groups} equal stages on dp{mesh.dp}×tp{mesh.tp}, the leanest looked "
        f"at, lack {sized(lacks)} a device; with more time (time_limit_s) the "
        f"way out is looked for",
        (lacks,),
    )


def _obstacle(drafter: Drafter) -> str:
    """Why no plan exists although memory is not short."""
    over, space = drafter.restrictions, drafter.space
    graph, devices = drafter.problem.graph, drafter.problem.cluster.num_devices
    if drafter.problem.factors.sequence is None and any((cp or 1) > 1 for cp in over.cp):
        return f"cp can't split the model's sequences: {drafter.problem.factors.tokens.why}"
    if over.uniform("zero") == 1:
        meshes = [mesh for m in space.microbatch_counts() for mesh in drafter.unequal.meshes(m)]
        undivided = {space.undivided(mesh) for mesh in meshes if mesh.dp * mesh.cp > 1}
        if undivided and None not in undivided:
            return f"zero=1 can't divide {min(filter(None, undivided))} among the data axis"
    if devices > 1 and space.own_draws:
        return space.own_draws
    if space.unshared_experts and any((ep or 1) > 1 for ep in over.ep):
        return space.unshared_experts
    if devices == 1 or over.pp == 1:
        return (
            "one device group has no virtual stages, no second placement and no use for a "
            "backward in two parts"
        )
    if all(SCHEDULES[name].copies > 1 for name in over.schedules):
        return (
            f"{over.schedules[0]} runs two copies of the model: it needs an even number of device "
            "groups and of micro-batches, of equal meshes"
        )
    blocks = graph.blocks
    trained = sum(any(graph.values[v].requires_grad for v in b.parameters) for b in blocks)
    if over.pp is not None and over.pp * (over.virtual_stages or 1) > trained:
        return (
            f"only {trained} of the model's {len(blocks)} blocks hold a trained parameter, and "
            f"every stage needs one; legal: at most {trained} stages"
        )
    return (
        f"the degrees must multiply to {devices} devices, dp must divide a micro-batch, and "
        "stages of different meshes run under schedules without virtual stages"
    )


def _closest(
    drafter: Drafter, drafts: Sequence[PlanDraft]
) -> tuple[float, Sequence[float], str] | None:
    """The closest plan to fitting: the bytes that its fullest stage and each of its stages lack,
    and its description; None where there is no plan at all."""
    unequal = drafter.unequal
    plans: list[tuple[float, Sequence[float], str]] = []
    for m in drafter.space.microbatch_counts():
        setups = unequal.setups(m, unequal.meshes(m), math.inf)
        if not setups:
            continue
        table, *_ = unequal.tables(m, setups)[0].values()
        short = unequal.shortfall(table, m)
        if short is not None:
            how = f"{len(short.stages)} stages, {m} micro-batches"
            plans.append((short.excess_bytes, short.stage_excess_bytes, how))
    for draft in drafts:
        peaks = draft.evaluation.prediction.peak_memory_bytes
        lacking = [max(0.0, peak - drafter.space.memory_bytes) for peak in peaks]
        plans.append((max(lacking), lacking, describe(draft.plan)))
    if any(draft.lacks_bytes > 0 for draft in drafts):  # what the table says fits was tried
        plans = [plan for plan in plans if plan[0] > 0]
    closest = min(plans, key=lambda plan: plan[0], default=None)
    if closest is not None and closest[0] <= 0:  # but not under the schedules that are left
        need = least_memory(drafter.equal, least_memory_choices(drafter.space))
        if need is not None and need.excess_bytes > 0:
            groups, m = need.choice.groups, need.choice.num_microbatches
            how = f"{groups} equal stages, {m} micro-batches"
            return need.excess_bytes, (need.excess_bytes,), how
    return closest


def _together(drafter: Drafter) -> str:
    """Why there is one micro-batch, and the way out."""
    meetings = drafter.problem.meetings
    return f". All plans have one micro-batch: {kept_together(meetings)}" if meetings else ""


def _host(drafter: Drafter, drafts: Sequence[PlanDraft]) -> str:
    """The reason why host memory doesn't help."""
    cluster, tried = drafter.problem.cluster, drafter.space.most_away
    if cluster.host is None or not tried or tried == drafter.space.reliefs[0].host:
        return ""
    part, host = tried.states, cluster.host
    text = f" With {'all' if part == 1 else f'{part:.0%}'} of the optimizer states "
    text += f"{'and all weights ' if tried.weights else ''}in host memory"
    text += f"{' and files on flash' if tried.files else ''} nothing fits, either"
    steps = [draft.evaluation.prediction for draft in drafts]
    short = min(filter(None, (step.host_shortfall(cluster) for step in steps)), default=None)
    filed = min(filter(None, (step.flash_shortfall(cluster) for step in steps)), default=None)
    if part < 1:
        lacking = host.room_bytes * (1 / part - 1)
        text += f": for all of them a host lacks {sized(lacking)}"
    elif short:
        text += f": the closest plan lacks {sized(short)} of a host's memory"
    elif filed:
        text += f": the closest plan lacks {sized(filed)} of a node's flash"
    text += f" ({sized(host.room_bytes)} a node"
    text += f", {sized(host.flash_room_bytes)} of flash)" if host.has_flash else ")"
    return f"{text}."


def _margin(drafter: Drafter) -> str:
    margin = drafter.memory_margin
    return f" with memory_margin={margin:g}" if margin else ""
