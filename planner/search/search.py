"""The outer search: every decision together, best first, with a bound.

Plans with equal stages (`planner/drafts/equal_stages.py`) are estimated all at once and explored in
the order of their estimates: cut exactly, then simulated. The inter-op DP (`unequal_stages.py`
there) then looks, for the numbers of micro-batches whose bound leaves room, for a plan with
different meshes that beats the incumbent. The chosen plans are written out and priced again from
what is written.

No plan of the space takes less than a bound, from the least seconds of blocks; by how much the
chosen step may exceed the fastest there is, the gap, is their ratio. A closer one, of plans with
equal stages, is found when it is asked for (`planner/bounds`). The gap is of the price itself, also
where the objective prefers a simpler plan within a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.bounds import Bounds
from meshwright.planner.drafts import Candidate, Drafter, Given, MeshChoice, PlanDraft
from meshwright.planner.garbage import seldom_collected
from meshwright.planner.intra_op import CORE_S, Certificate
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, check_plan, describe, kept_together, sized
from meshwright.planner.search.explore import Effort, Explorer, Queue, overshoot
from meshwright.planner.search.least_memory import least_memory, least_memory_choices, memory_needs
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.taste import Taste, order, shape
from meshwright.planner.stages import boundary_index

BOUNDS_SHARE = 0.5  # of the time limit: what bounds may take before anything is priced
BOUNDS_S = 1.0  # seconds that they may take anyway
MAX_KEPT = 6  # plans of different shapes kept for the report
MAX_PROOFS = 6
WRITTEN_LESS = 0.01  # of a draft's step, by which the plan that is written out may be faster
MOST_WRITTEN = 4  # plans that are written out for that
ALL_COUNTS = 6  # numbers of micro-batches up to which the stage DP looks at all
FEW_CUTS = 20  # places where stages may end, up to which it looks at all, too
NEAR_COUNTS = 3  # of more, those that it looks at
MOST_OVERSHOOT = (
    2.0  # of the objective of its cuts: seen where stages are unequal and micro-batches few
)


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
        objective: str = "fastest",
        time_limit_s: float | None = None,
        **given: Unpack[Given],
    ) -> None:
        super().__init__(problem, global_batch_size, overrides, **given)
        self.objective = objective
        self.time_limit_s = time_limit_s
        self._effort = Effort(self.programs.time)
        self.taste = Taste(coster=self.programs.coster, robust=objective == "robust")
        self._explorer = Explorer(
            drafter=self, equal=self.equal, effort=self._effort, taste=self.taste
        )
        self.drafts = self._explorer.drafts

    def again(self, overrides: Overrides) -> SearchResult:
        """The same search under other overrides, on what was priced. Raises as `run` does."""
        return self.like(overrides=overrides).run()

    def _arguments(self) -> dict[str, Any]:
        own = {"objective": self.objective, "time_limit_s": self.time_limit_s}
        return super()._arguments() | own

    @property
    def phases_s(self) -> Mapping[str, float]:
        """CPU seconds spent so far, by phase."""
        return self._effort.phases_s

    # --- the search ---

    @seldom_collected()
    def run(self) -> SearchResult:
        """Search everything; raises `InfeasibleError` or `OverrideError` where nothing holds. After
        the time limit a first plan is still looked for where it is likely."""
        with self.programs.time.until(self.programs.time.after(self.time_limit_s)):
            found = self._attempt()
            if found is None:
                raise failure(self, self.drafts)
            return found

    def _attempt(self) -> SearchResult | None:
        """`run`; None where no plan that was written out fits."""
        limit, given_s = self.programs.time, self.time_limit_s
        ends_s = limit.after(given_s)
        bounds_s = None if given_s is None else max(given_s * BOUNDS_SHARE, BOUNDS_S)
        with limit.until(limit.after(bounds_s)):
            meshes = self._effort.timed("bounds", self._meshes)
            self._effort.late()
        try:
            with limit.until(ends_s):
                return self._searched(meshes)
        finally:
            self.programs.forget_hurried()

    def _meshes(self) -> list[MeshChoice]:
        counts = self.space.microbatch_counts()
        return [choice for m in counts for choice in self.equal.mesh_choices(m)]

    def _searched(self, meshes: Sequence[MeshChoice]) -> SearchResult | None:
        """The search, on these meshes."""
        timed = self._effort.timed
        equal_s = min((choice.bound_s for choice in meshes), default=math.inf)
        self._explore(meshes)
        between = timed("bounds", self._between)
        equal_s = min([equal_s, *(choice.bound_s for choice in between)])
        self._explore(between)
        if self._effort.late() and self._limit() == math.inf:
            self._leanest()
        different_s = math.inf
        if self.space.may_differ:
            different_s = self._unequal(self.space.tried_counts())
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
        """No plan with equal stages takes less, but for the chosen one: a closer bound than that of
        the result, which takes seconds to find."""
        if result.best.evaluation.priced[0].setting.validated:  # its devices don't begin together
            return result.bound_s
        found_s = min([result.best.step_time_s, *(d.step_time_s for d in result.drafts if d.fits)])
        bounds = Bounds(space=self.space, equal=self.equal)
        return bounds.of_equal(result.meshes, found_s, self.programs.time.over)

    def _limit(self) -> float:
        """Weighed step time to beat."""
        return self._explorer.limit_s()

    def _best_draft(self) -> PlanDraft | None:
        fit = [d for d in self.drafts if d.fits]
        return self.taste.judged(fit)[0][1] if fit else None

    # --- equal stages ---

    def _explore(self, choices: Iterable[MeshChoice]) -> None:
        """Draft the best plans on these meshes."""
        self._explorer.explore(Queue(choices))
        self.equal.forget()

    def _leanest(self) -> None:
        """A first plan, of those meshes that need least memory, when the time is over."""
        for choice in least_memory_choices(self.space)[:LATE_MESHES]:
            if any(need.excess_bytes <= 0 for need in memory_needs(self.equal, choice)):
                self._explorer.explore(Queue([choice]))

    def _between(self) -> list[MeshChoice]:
        """The mesh of the best draft with the numbers of micro-batches that thinning left out next
        to its own."""
        best = self._best_draft()
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
        """Run the inter-op DP where it may still win; no plan with different meshes takes less than
        what is returned."""
        waiting = []
        for m in counts:
            meshes = self.unequal.fitting(m)
            if meshes:
                waiting.append((float(self.unequal.bounds(m, meshes).min()), m, meshes))
        left = sorted(waiting)
        while left and not self._effort.late():
            near = self._near_best(counts)
            tried = [own for own in left if own[1] in near and own[0] < self._limit()]
            if not tried:
                break
            for own in tried:
                left.remove(own)
                bound, m, meshes = own
                if bound < self._limit() and not self._effort.late():
                    self._effort.timed("inter-op DP", self._dp, m, meshes)
        return min((bound for bound, _, _ in waiting), default=math.inf)

    def _near_best(self, counts: Sequence[int]) -> Sequence[int]:
        """Of many numbers of micro-batches those next to the best draft's: there the stage DP may
        find a better plan, if anywhere."""
        best = self._best_draft()
        if best is None or len(counts) <= ALL_COUNTS or len(self.equal.cuts) <= FEW_CUTS:
            return counts
        own = math.log(best.plan.num_microbatches)
        return sorted(counts, key=lambda m: abs(math.log(m) - own))[:NEAR_COUNTS]

    def _dp(self, m: int, meshes: Sequence[Mesh]) -> None:
        """The best cuts with different meshes for m micro-batches become drafts."""
        limit = self._limit()
        setups = self.unequal.setups(m, meshes, limit)
        if not setups:
            return
        deadline = self.programs.time.ends_s if limit < math.inf else None  # first find something
        few = len(self.equal.cuts) <= FEW_CUTS
        cutoff_s = limit * (MOST_OVERSHOOT if few else overshoot(2, m))
        if limit < math.inf and len(self.unequal.coarse()) < len(self.equal.cuts):
            setups = self.unequal.promising(m, setups, cutoff_s, deadline)
            if not setups:
                return
        tables, options = self.unequal.tables(m, setups)
        for names, table in tables.items():
            solution = self.unequal.solve(names, table, m, cutoff_s, deadline)
            if solution is None:
                continue
            for own in self.space.schedules(len(solution.stages), m):
                stages = None
                if own.each == 1:
                    stages = self.unequal.stage_drafts(solution, options, own)
                self.drafts += [] if stages is None else [self.simulated(stages, own)]

    # --- the answer ---

    def _written(self) -> list[Candidate | PlanDraft]:
        """The best plan, written out, then the fastest others of different shapes. Written out, a
        plan may take a little longer than its draft, as whole blocks are recomputed or sent, or
        less, as some come back: drafts are written until none left is better than the best of them,
        or a few more where the fastest plan is asked for."""
        fitting, kept = [d for d in self.drafts if d.fits], dict[Any, PlanDraft]()
        for draft in sorted(fitting, key=order):
            kept.setdefault(shape(draft), draft)
        written, refused = list[tuple[float, Candidate, PlanDraft]](), list[PlanDraft]()
        for number_s, draft in self.taste.judged(fitting):
            more_s = WRITTEN_LESS * (not self.taste.robust and len(written) < MOST_WRITTEN)
            if written and written[0][0] <= number_s * (1 - more_s):
                break
            candidate = self.written(draft)
            if candidate.fits:
                longer = candidate.step_time_s / draft.step_time_s
                written.append((longer * number_s, candidate, draft))
                written.sort(key=lambda own: own[0])
            else:
                refused.append(draft)
        if not written:
            return []
        _, first, own = written[0]
        others = [d for d in kept.values() if all(d is not x for x in refused)]
        found: list[Candidate | PlanDraft] = [first]
        return [*found, *(d for d in others if shape(d) != shape(own))][:MAX_KEPT]

    def _certify(self, best: Candidate) -> dict[str, Certificate]:
        """An independent proof of the block programs on the chosen meshes: the whole integer
        program of each class, with whole tensors at both ends and nothing forced."""
        found: dict[str, Certificate] = {}
        limit = self.programs.time
        if limit.over():
            return found
        graph = self.problem.graph
        if check_plan(best.plan, graph, self.problem.factors) != best.assignments:
            raise AssertionError("the plan as written does not give the solved shardings back")
        for stage in best.plan.stages:
            if stage.tp == 1 or limit.over():
                continue
            plan = best.plan
            batch = Batch(rows=plan.microbatch_rows / stage.dp, microbatches=plan.num_microbatches)
            mesh = replace(stage.mesh, spread=1)
            chain = self.programs.chain(self.programs.coster.setting(mesh, batch))
            classes: set[str] = set()
            for block, table in zip(graph.blocks, chain.tables, strict=True):
                new = block.class_id not in classes and len(found) < MAX_PROOFS
                if block.name in stage.blocks and new and table is not None and table.proved:
                    classes.add(block.class_id)
                    index = boundary_index(table, 0, 0)
                    left_s = min(CORE_S, limit.left_s())
                    proof = table.certify(index, left_s) if index in table.choices else None
                    if proof is not None:
                        found.setdefault(block.name, proof)
        return found


# --- failure --------------------------------------------------------------------------------------

# Why a search found no plan: memory is short, or the overrides leave nothing to choose from. What
# would help is looked for where somebody asks (`planner/alternatives/ways_out.py`).


LATE_MESHES = 2  # of those that need least memory, looked at when the time is over


def failure(drafter: Drafter, drafts: Sequence[PlanDraft]) -> InfeasibleError | OverrideError:
    """The error to raise where none of the `drafts` fits: by how much the closest plan does not; or
    which override leaves no plan."""
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
    short = ", ".join(f"stage {k}: {sized(max(x, 0))}" for k, x in enumerate(per_stage))
    return InfeasibleError(
        f"the model does not fit {cluster.describe()} "
        f"({sized(drafter.space.room_bytes)} usable per device{_margin(drafter)}). "
        f"The closest plan ({how}) lacks {sized(excess)} on its fullest stage; "
        f"shortfall by stage: {short}{_together(drafter)}.{_host(drafter, drafts)}",
        per_stage,
    )


def _late(drafter: Drafter) -> InfeasibleError:
    """What is known when the time was over before a plan was found."""
    said = f"no plan was found in the time given on {drafter.problem.cluster.describe()}"
    choices = least_memory_choices(drafter.space)[:LATE_MESHES]
    need = least_memory(drafter.equal, choices)
    if need is None or need.excess_bytes <= 0:
        return InfeasibleError(f"{said}; give it more: time_limit_s", ())
    groups, mesh, lacks = need.choice.groups, need.choice.mesh, need.excess_bytes
    return InfeasibleError(
        f"{said}: {groups} equal stages on dp{mesh.dp}×tp{mesh.tp}, the leanest looked "
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
        whole = {space.undivided(mesh) for mesh in meshes if mesh.dp * mesh.cp > 1}
        if whole and None not in whole:
            return f"zero=1 can't divide {min(filter(None, whole))} among the data axis"
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
    """Of the plan that comes closest to fitting, the bytes that its fullest stage and each of its
    stages lack, and how it runs; None where there is no plan at all."""
    unequal = drafter.unequal
    found: list[tuple[float, Sequence[float], str]] = []
    for m in drafter.space.microbatch_counts():
        setups = unequal.setups(m, unequal.meshes(m), math.inf)
        if not setups:
            continue
        table, *_ = unequal.tables(m, setups)[0].values()
        short = unequal.shortfall(table, m)
        if short is not None:
            how = f"{len(short.stages)} stages, {m} micro-batches"
            found.append((short.excess_bytes, short.stage_excess_bytes, how))
    for draft in drafts:
        peaks = draft.evaluation.prediction.peak_memory_bytes
        lacking = [max(0.0, peak - drafter.space.memory_bytes) for peak in peaks]
        found.append((max(lacking), lacking, describe(draft.evaluation.plan)))
    if any(draft.lacks_bytes > 0 for draft in drafts):  # what the table says fits was tried
        found = [one for one in found if one[0] > 0]
    closest = min(found, key=lambda item: item[0], default=None)
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
    """Why host memory doesn't help."""
    cluster, tried = drafter.problem.cluster, drafter.space.most_away
    if cluster.host is None or not tried or tried == drafter.space.reliefs[0].host:
        return ""
    part, host = tried.states, cluster.host
    said = f" With {'all' if part == 1 else f'{part:.0%}'} of the optimizer states "
    said += f"{'and all weights ' if tried.weights else ''}in host memory"
    said += f"{' and files on flash' if tried.files else ''} nothing fits, either"
    lacks = [draft.evaluation.prediction for draft in drafts]
    short = [p.host_shortfall(cluster) for p in lacks if p.host_shortfall(cluster)]
    filed = [p.flash_shortfall(cluster) for p in lacks if p.flash_shortfall(cluster)]
    if part < 1:
        lacking = host.room_bytes * (1 / part - 1)
        said += f": for all of them a host lacks {sized(lacking)}"
    elif short:
        said += f": the closest plan lacks {sized(min(short))} of a host's memory"
    elif filed:
        said += f": the closest plan lacks {sized(min(filed))} of a node's flash"
    said += f" ({sized(host.room_bytes)} a node"
    said += f", {sized(host.flash_room_bytes)} of flash)" if host.has_flash else ")"
    return f"{said}."


def _margin(drafter: Drafter) -> str:
    margin = drafter.memory_margin
    return f" with memory_margin={margin:g}" if margin else ""
