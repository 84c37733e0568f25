"""The outer search: micro-batches, schedule, meshes; the inter-op DP inside; candidates re-priced
by simulation.

For every number of micro-batches m, the costs of all stages on all meshes go into one table, and
the inter-op DP finds the best cut for each schedule. The best candidates become plans, are priced
by the event simulation, and the fastest one that fits is chosen; the others are kept as runners-up.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from costmodel.cost import OpProfile
from costmodel.factors import FactorTable
from costmodel.graph import Graph
from costmodel.schedule import in_flight
from costmodel.target import EAGER, Target
from planner.candidates import Candidate, Variant, distinct, make_candidate
from planner.check import check_plan
from planner.inter_op import InterOpSolution, StageTable, minimal_shortfall, solve_inter_op
from planner.overrides import OverrideError, Overrides, stage_cuts
from planner.report import describe
from planner.shardings import resolve_shardings
from planner.solvers import Certificate
from planner.stage_costs import MODES, StageCoster, boundary_index
from planner.stage_sums import stage_costs
from profiles.cluster import Cluster

log = logging.getLogger(__name__)

MAX_MICROBATCH_CHOICES = 12
MIN_CANDIDATES = 6
CANDIDATE_SLACK = (
    1.25  # what the DP puts within this factor of its best is priced by simulation, too
)
DP_GAP = (
    0.002  # the DP may stop this close to its bound; candidates are re-priced by simulation anyway
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The chosen plan first, runners-up after it; solver certificates of its block classes by block
    name; seconds spent per phase; what was left out and why."""

    candidates: tuple[Candidate, ...]
    certificates: Mapping[str, Certificate]
    phases_s: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


class InfeasibleError(ValueError):
    """No plan fits the cluster's memory. `shortfall_bytes` per stage of the plan that comes
    closest."""

    def __init__(self, message: str, shortfall_bytes: Sequence[float]) -> None:
        super().__init__(message)
        self.shortfall_bytes = tuple(shortfall_bytes)

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str, tuple[float, ...]]]:
        return InfeasibleError, (str(self), self.shortfall_bytes)


@dataclass(slots=True)
class Search:
    """One search: graph × cluster × overrides -> plans."""

    graph: Graph
    table: FactorTable
    cluster: Cluster
    global_batch_size: int
    precision: str
    optimizer: str
    overrides: Overrides
    target: Target = EAGER
    profile: OpProfile | None = None
    phases: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    cuts: list[int] | None = None
    coster: StageCoster = field(init=False)

    def __post_init__(self) -> None:
        self.overrides = self.overrides.effective()
        self.cuts = stage_cuts(self.overrides, self.graph)
        entries = {}
        if self.overrides.shardings:
            entries = resolve_shardings(
                self.graph, self.graph.blocks, self.overrides.shardings, "override shardings"
            )
        self.coster = StageCoster(
            self.graph, self.table, self.cluster, self.precision, self.optimizer, entries,
            target=self.target, profile=self.profile,
        )  # fmt: skip

    # --- the loop ---

    def run(self) -> SearchResult:
        """Search everything; raises `InfeasibleError` or `OverrideError` where nothing holds."""
        solutions: list[tuple[float, InterOpSolution, Sequence[Variant], int, str]] = []
        worst: tuple[float, Sequence[float], str] | None = None
        for m in self.microbatch_counts():
            variants = self._timed("price stages", self._variants, m)
            if not variants:
                continue
            table = self._timed("price stages", self._table, variants, m)
            for schedule in self.overrides.schedules():
                solution = self._timed("inter-op DP", self._solve, table, m, schedule)
                if solution is not None:
                    solutions.append((solution.objective_s, solution, variants, m, schedule))
                    continue
                short = self._timed("inter-op DP", self._shortfall, table, m, schedule)
                if short is not None and (worst is None or short[0] < worst[0]):
                    worst = short
        solutions.sort(key=lambda found: found[0])
        found = [
            self._timed("simulate", self._candidate, *rest)
            for k, (objective, *rest) in enumerate(solutions)
            if k < MIN_CANDIDATES or objective <= solutions[0][0] * CANDIDATE_SLACK
        ]
        fitting = [c for c in found if c.fits]
        if not fitting:
            raise self._failure(worst or self._too_full(found))
        ranked = sorted(
            fitting, key=lambda c: (c.step_time_s, len(c.plan.stages), c.plan.to_json())
        )
        certificates = self._timed("certify", self._certify, ranked[0])
        return SearchResult(
            candidates=tuple(distinct(ranked)),
            certificates=certificates,
            phases_s=dict(self.phases),
            notes=tuple(self.notes),
        )

    def _timed(self, phase: str, work, *args):
        started = time.perf_counter()
        try:
            return work(*args)
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def microbatch_counts(self) -> list[int]:
        """Numbers of micro-batches to try: divisors of the global batch, thinned to a dozen."""
        batch, over = self.global_batch_size, self.overrides
        divisors = [m for m in range(1, batch + 1) if batch % m == 0]
        if over.num_microbatches is not None:
            if over.num_microbatches not in divisors:
                raise OverrideError(
                    f"override num_microbatches={over.num_microbatches}: does not divide "
                    f"global_batch_size={batch}; "
                    f"legal: {', '.join(map(str, divisors[:16]))}"
                )
            return [over.num_microbatches]
        if over.microbatch_size is not None and batch % over.microbatch_size:
            raise OverrideError(
                f"override microbatch_size={over.microbatch_size}: does not divide "
                f"global_batch_size={batch}; "
                f"legal: {', '.join(map(str, divisors[:16]))}"
            )
        if over.microbatch_size is not None:
            divisors = [m for m in divisors if batch // m % over.microbatch_size == 0]
        if len(divisors) > MAX_MICROBATCH_CHOICES:
            wanted = np.geomspace(1, divisors[-1], MAX_MICROBATCH_CHOICES)
            near = {min(divisors, key=lambda d, w=w: abs(np.log(d / w))) for w in wanted}
            divisors = sorted(near)
        return divisors

    # --- stage variants ---

    def _meshes(self, m: int) -> list[tuple[int, int]]:
        """(dp, tp) pairs on every submesh shape: parts of a node that divide it, and whole
        nodes."""
        rows, over = self.global_batch_size // m, self.overrides
        node, nodes = self.cluster.devices_per_node, self.cluster.num_nodes
        sizes = [n for n in range(1, node + 1) if node % n == 0]
        sizes += [node * k for k in range(2, nodes + 1) if nodes % k == 0]
        found = []
        for n in sizes:
            for tp in range(1, min(n, max(node, over.tp or 1)) + 1):
                dp = n // tp
                if n % tp or rows % dp or (node % tp and tp != over.tp):
                    continue
                if over.tp not in (None, tp) or over.dp not in (None, dp):
                    continue
                if over.microbatch_size not in (None, rows // dp):
                    continue
                found.append((dp, tp))
        return found

    def _variants(self, m: int) -> list[Variant]:
        over = self.overrides
        variants: list[Variant] = []
        for dp, tp in self._meshes(m):
            rows = self.global_batch_size / m / dp
            for mode in MODES if tp > 1 else MODES[:1]:
                setting = self.coster.setting(dp=dp, tp=tp, rows=rows, microbatches=m)
                try:
                    chain = self.coster.chain(setting, mode)
                except ValueError as error:  # an overridden sharding that this degree can't split
                    self.refused.setdefault(tp, str(error))
                    continue
                if chain is None:
                    continue
                for zero in (0, 1) if dp > 1 and self._zero_divides(dp, tp) else (0,):
                    for recompute in ("none", "full"):
                        if (over.zero not in (None, zero) and dp > 1) or over.recompute not in (
                            None,
                            recompute,
                        ):
                            continue
                        variants.append(
                            Variant(dp=dp, tp=tp, zero=zero, recompute=recompute, chain=chain)
                        )
        return variants

    def _zero_divides(self, dp: int, tp: int) -> bool:
        """Whether ZeRO-1 can divide every matrix: along a dim that the tensor axis leaves alone, or
        along one that both divide. A matrix that stays whole would not shrink as priced."""
        for value in self.graph.parameters:
            shape = self.graph.values[value].shape
            free = sum(size % dp == 0 for size in shape) > (tp > 1)
            if len(shape) > 1 and not free and all(size % (dp * tp) for size in shape):
                return False
        return True

    def _table(self, variants: Sequence[Variant], m: int) -> StageTable:
        count = len(self.graph.blocks)
        shape = (len(variants), count + 1, count + 1)
        time_s, static, active = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        legal = self._legal_stages(count)
        for v, variant in enumerate(variants):
            chain = variant.chain
            setting = self.coster.setting(
                dp=variant.dp,
                tp=variant.tp,
                rows=chain.setting.rows,
                microbatches=m,
                zero=variant.zero,
            )
            costs = stage_costs(chain.sums, setting, variant.recompute)
            send = chain.send_s[:, None] + chain.send_s[None, :]
            ok = np.isfinite(chain.seconds) & legal
            time_s[v] = np.where(ok, costs.amortised_s(m) + send, np.inf)
            static[v], active[v] = costs.static_bytes, costs.activation_bytes
        devices = np.array([v.dp * v.tp for v in variants], dtype=np.int64)
        return StageTable(
            devices=devices, time_s=time_s, static_bytes=static, activation_bytes=active
        )

    def _legal_stages(self, count: int) -> np.ndarray:
        trained = [
            any(self.graph.values[v].requires_grad for v in b.parameters) for b in self.graph.blocks
        ]
        before = np.concatenate([[0], np.cumsum(trained)])
        # a stage without trained parameters would leave its ranks' optimizers with nothing to do
        legal = np.triu(before[None, :] > before[:, None], 1)
        if self.cuts is not None:
            only = np.zeros_like(legal)
            for start, stop in zip([0, *self.cuts], self.cuts, strict=False):
                only[start, stop] = True
            legal &= only
        return legal

    # --- the DP ---

    def _solve(self, table: StageTable, m: int, schedule: str) -> InterOpSolution | None:
        return solve_inter_op(
            table,
            num_devices=self.cluster.num_devices,
            num_microbatches=m,
            memory_bytes=self.cluster.device.usable_bytes,
            in_flight=_in_flight(schedule, m),
            num_stages=self.overrides.pp,
            relative_gap=DP_GAP,
        )

    def _shortfall(
        self, table: StageTable, m: int, schedule: str
    ) -> tuple[float, Sequence[float], str] | None:
        short = minimal_shortfall(
            table,
            num_devices=self.cluster.num_devices,
            memory_bytes=self.cluster.device.usable_bytes,
            in_flight=_in_flight(schedule, m),
            num_stages=self.overrides.pp,
        )
        if short is None:
            return None
        how = f"{len(short.stages)} stages, {m} micro-batches, {schedule}"
        return short.excess_bytes, short.stage_excess_bytes, how

    def _candidate(
        self, solution: InterOpSolution, variants: Sequence[Variant], m: int, schedule: str
    ) -> Candidate:
        """The solution as a plan, priced by simulation."""
        chosen = [(c.start, c.stop, variants[c.variant]) for c in solution.stages]
        return make_candidate(self.coster, chosen, self.global_batch_size, m, schedule)

    def _certify(self, best: Candidate) -> dict[str, Certificate]:
        """An independent proof for every block class of the chosen plan: the whole integer
        program."""
        found: dict[str, Certificate] = {}
        if check_plan(best.plan, self.graph, self.table) != best.assignments:
            raise AssertionError("the plan as written does not give the solved shardings back")
        for stage in best.plan.stages:
            if stage.tp == 1:
                continue
            setting = self.coster.setting(
                dp=stage.dp,
                tp=stage.tp,
                rows=best.plan.microbatch_rows / stage.dp,
                microbatches=best.plan.num_microbatches,
                zero=0,
            )
            chain = self.coster.chain(setting)
            if chain is None:
                continue
            classes: set[str] = set()
            for block, table in zip(self.graph.blocks, chain.tables, strict=True):
                if block.name in stage.blocks and block.class_id not in classes and len(found) < 6:
                    classes.add(block.class_id)
                    index = boundary_index(table, 0, 0)
                    proof = table.certify(index) if index in table.choices else None
                    if proof is not None:
                        found.setdefault(block.name, proof)
        return found

    # --- when nothing fits ---

    def _failure(self, worst: tuple[float, Sequence[float], str] | None) -> ValueError:
        if worst is None and self.refused:
            return OverrideError(f"override shardings: {self.refused[max(self.refused)]}")
        if worst is None:
            given = self.overrides.given()
            return OverrideError(
                f"no plan exists on {self.cluster.describe()} for "
                f"global_batch_size={self.global_batch_size} with overrides "
                f"{given or 'none'}: the degrees must multiply to {self.cluster.num_devices} "
                f"devices and dp must divide a micro-batch; "
                "drop an override or change global_batch_size"
            )
        excess, per_stage, how = worst
        gib = ", ".join(f"stage {k}: {max(x, 0) / 2**30:.3g}" for k, x in enumerate(per_stage))
        return InfeasibleError(
            f"the model does not fit {self.cluster.describe()} "
            f"({self.cluster.device.usable_bytes / 2**30:.1f} GiB usable per device). "
            f"The closest plan ({how}) lacks {excess / 2**30:.3g} GiB on its fullest stage; "
            f"shortfall in GiB by stage: {gib}. " + self._relaxation(),
            per_stage,
        )

    def _too_full(self, found: Sequence[Candidate]) -> tuple[float, Sequence[float], str] | None:
        """The candidate that comes closest to fitting, as a shortfall."""
        short = [c.evaluation.prediction.shortfall_bytes(self.cluster) for c in found]
        if not short:
            return None
        best = min(range(len(short)), key=lambda k: max(short[k]))
        return max(short[best]), short[best], describe(found[best].plan)

    def _relaxation(self) -> str:
        """The cheapest single change that makes it fit, found by trying."""
        for name in ("recompute", "zero"):
            if name in self.overrides.given() or name in self.overrides.forbid:
                freed = dataclasses.replace(
                    self.overrides,
                    **{name: None},
                    forbid=[f for f in self.overrides.forbid if f != name],  # type: ignore[arg-type]
                )
                if self._feasible(freed, self.cluster, self.global_batch_size):
                    return f"Way out: leave {name} free."
        for factor in (2, 4, 8, 16, 32, 64):
            bigger = dataclasses.replace(self.cluster, num_nodes=self.cluster.num_nodes * factor)
            if self._feasible(self.overrides, bigger, self.global_batch_size):
                return f"Way out: {bigger.num_nodes} nodes ({bigger.num_devices} devices) fit it."
        return "Not even 64 times as many nodes fit it: take a shorter sequence or a smaller model."

    def _feasible(self, overrides: Overrides, cluster: Cluster, batch: int) -> bool:
        trial = Search(
            self.graph, self.table, cluster, batch, self.precision, self.optimizer, overrides,
            target=self.target, profile=self.profile,
        )  # fmt: skip
        counts = trial.microbatch_counts()
        for m in reversed(counts):
            variants = trial._variants(m)
            if not variants:
                continue
            table = trial._table(variants, m)
            if any(trial._solve(table, m, s) is not None for s in trial.overrides.schedules()):
                return True
        return False


def _in_flight(schedule: str, m: int):
    """Micro-batches held by the stage at a position from the end (1 = last)."""
    return lambda position: in_flight(schedule, stage=0, num_stages=position, num_microbatches=m)
