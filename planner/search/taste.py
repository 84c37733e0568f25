"""Taste: one number by which plans are compared, of their price and simplicity.

A price has errors, the same for all plans on a cluster: of computing by the fraction e_c, of what
stays in a node by e_x, of the data axis' collectives by e_x and half as much again for every
doubling of the nodes that they span (measured gathers over many nodes scatter that much more), of
links to host memory by e_h, of memory by what rehearsals leave open. To first order the quantile of
a step of T seconds is

    R = T + z sqrt((T(1 + e_c) - T)² + (T(1 + e_x) - T)² + (T(1 + e_h) - T)²)

with each T(1 + e) simulated again, so that what is hidden behind compute costs where it no longer
fits there. A plan that runs out of memory with probability p costs `RISK` of a step more then:

    robust:   R (1 + RISK p) (1 + TIE c),     c = min(1, sum of `COMPLICATIONS`)
    fastest:  T

Differences below `TIE` are more than prices can tell; each complication costs the part of it that
its row says. So no plan is chosen that another one equals in seconds, memory and simplicity and
beats in one, and none that is slower than the least by more than a tie. The errors are the
scoreboard's (`costmodel/intervals.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.costmodel.intervals import COMMUNICATION_ERROR, HOST_ERROR, compute_error
from meshwright.costmodel.mesh import Mesh, Stepping
from meshwright.costmodel.sharing import Sharing
from meshwright.planner.drafts import Candidate, Combination, PlanDraft, Waiting
from meshwright.planner.plan import Plan, StagePlan
from meshwright.planner.pricing import StageCoster, price_stages

QUANTILE = 0.84  # standard deviations: the 80 % quantile of a normal variable
TIE = 0.045  # part of a step that prices can't tell apart
RISK = 0.1  # of a step, what running out of memory costs: another plan, another start
SEEN = 8  # plans whose quantiles tell how certain those of a problem are
CERTAIN = 0.99  # of fitting: more room gains nothing
MOST_JUDGED = 24  # plans whose quantile is simulated at most, the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Complications of a plan: `axes` in use besides the data axis; different `meshes` and
    `policies` of recompute; blocks by which stages are `uneven`, beyond one; whether its schedule
    is `common`, its device `groups` and stages on `each`; `sharing` of states, on ranks that are
    `spread`; kinds of parts in host memory (`away`); how its optimizer steps (`stepping`); blocks
    in segments; the part of a device that is `filled`. Before stages are cut, the least that may
    be."""

    axes: int
    tp: int
    groups: int
    each: int
    common: bool
    num_microbatches: int
    sharing: Sharing
    spread: int = 1
    away: int = 0
    stepping: Stepping = "at_end"
    segmented: bool = False
    meshes: int = 1
    policies: int = 1
    uneven: int = 0
    filled: float = 0.0

    @property
    def complexity(self) -> float:
        """The part of a tie that a plan has to be faster by than the plainest."""
        return min(1.0, sum(self.parts()))

    def parts(self) -> list[float]:
        """The part of each of `COMPLICATIONS`."""
        return [part * count(self) for part, _, count in COMPLICATIONS]


# the part of a tie that each costs, words about the simpler plan, and how many a plan has;
# measured sweeps set axes, tensor-parallel ranks and micro-batches (docs/archive/measurements.md,
# "Regret")
COMPLICATIONS: tuple[tuple[float, str, Callable[[Looks], float]], ...] = (
    (
        0.7,
        "has as many micro-batches as pipeline stages",
        lambda it: it.groups > 1 and it.num_microbatches < it.groups,
    ),
    (1.0, "sums gradients as they are", lambda it: it.sharing.compression is not None),
    (0.35, "has nothing in host memory", lambda it: it.away > 0),
    (0.24, "uses fewer axes besides the data axis", lambda it: it.axes),
    (1.0, "steps with gradients of its own batch", lambda it: it.stepping == "stale"),
    (0.45, "undoes no steps", lambda it: it.stepping == "validated"),
    (0.45, "skips steps that are not finite", lambda it: it.stepping == "in_backward"),
    (0.2, "has fewer different meshes", lambda it: it.meshes - 1),
    (0.15, "keeps to a common pipeline schedule", lambda it: it.groups > 1 and not it.common),
    (
        0.15,
        "shares ZeRO's states among all data ranks and lays ranks side by side",
        lambda it: it.sharing.extras + (it.spread > 1),
    ),
    (0.07, "divides less by ZeRO", lambda it: (0, 2, 2.5, 3)[it.sharing.zero]),
    (0.07, "has fewer kinds of parts in host memory", lambda it: max(0, it.away - 1)),
    (0.07, "has fewer different recompute policies", lambda it: it.policies - 1),
    (0.07, "runs its blocks again one by one", lambda it: it.segmented),
    (0.03, "fills less of a device's memory", lambda it: it.filled),
    (0.03, "has a smaller tensor-parallel degree", lambda it: math.log2(it.tp)),
    (0.03, "has fewer virtual stages", lambda it: math.log2(it.each)),
    (0.03, "cuts the blocks more evenly", lambda it: it.uneven),
    (0.015, "takes fewer micro-batches", lambda it: math.log2(it.num_microbatches)),
)


def looks_of(plan: Plan, peak_bytes: float, memory_bytes: float) -> Looks:
    """Looks of a plan whose fullest device holds so many bytes."""
    stages, groups = plan.stages, len(plan.devices)
    blocks, first = [len(stage.blocks) for stage in stages], stages[0]
    compressed = next((s.compressed for s in stages if s.compression is not None), first.compressed)
    return Looks(
        axes=axes_of(stages, groups),
        tp=max(stage.tp for stage in stages),
        groups=groups,
        each=len(stages) // groups,
        common=plan.record.standard,
        num_microbatches=plan.pipeline.num_microbatches,
        sharing=replace(
            first.sharing, zero=max(stage.zero for stage in stages), compressed=compressed
        ),
        spread=first.spread,
        away=len({kind for stage in stages for kind in stage.host.kinds}),
        stepping=plan.stepping,
        segmented=any(stage.segmented for stage in stages),
        meshes=len({mesh_of(stage) for stage in stages}),
        policies=len({policy for stage in stages for policy in stage.policies}),
        uneven=max(0, max(blocks) - min(blocks) - 1),
        filled=peak_bytes / memory_bytes,
    )


def looks_ahead(one: Combination | Waiting) -> Looks:
    """The simplest looks that plans of a combination may have."""
    setup = one.setup
    looks = (
        Looks(
            axes=axes_of([setup.mesh], pipeline.num_devices),
            tp=setup.mesh.tp,
            groups=pipeline.num_devices,
            each=pipeline.each,
            common=pipeline.record.standard,
            num_microbatches=pipeline.num_microbatches,
            sharing=setup.sharing,
            spread=setup.mesh.spread,
            away=len(setup.setting.host.kinds),
            stepping=setup.stepping,
        )
        for pipeline in one.offered
    )
    return min(looks, key=lambda it: it.complexity)


def why_simpler(ours: Looks, theirs: Looks) -> str:
    """The main reason why a plan is simpler than another one; empty where it is not."""
    if ours.complexity >= theirs.complexity:
        return ""
    less = [b - a for a, b in zip(ours.parts(), theirs.parts(), strict=True)]
    return COMPLICATIONS[less.index(max(less))][1]


def mesh_of(stage: StagePlan) -> tuple[Any, ...]:
    """The degrees of a stage and its sharing."""
    return stage.dp, stage.cp, stage.tp, stage.ep, *stage.order


def axes_of(meshes: Sequence[Mesh] | Sequence[StagePlan], groups: int) -> int:
    """Axes in use besides the data axis, on so many device groups."""
    axes = (any(getattr(mesh, axis) > 1 for mesh in meshes) for axis in ("tp", "cp", "ep"))
    return (groups > 1) + sum(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """The number by which plans are compared under an objective."""

    coster: StageCoster
    robust: bool
    # by the id of a draft, with it: its number unweighed
    _numbers: dict[int, tuple[PlanDraft, float]] = field(default_factory=dict)

    def ahead(self, one: Combination | Waiting) -> float:
        """Least weight of the seconds of a combination."""
        return 1 + TIE * looks_ahead(one).complexity if self.robust else 1.0

    def weight(self, plan: PlanDraft | Candidate) -> float:
        """Weight of the seconds of a plan."""
        return 1 + TIE * self.looks(plan).complexity if self.robust else 1.0

    def looks(self, plan: PlanDraft | Candidate) -> Looks:
        """Looks of a draft or a plan."""
        peak = plan.evaluation.prediction.fullest_bytes
        return looks_of(plan.plan, peak, self.coster.cluster.device.memory_bytes)

    def number_s(self, draft: PlanDraft) -> float:
        """The number of a draft, in seconds."""
        if not self.robust:
            return draft.step_time_s
        if id(draft) not in self._numbers:
            risk = 1 + RISK * (1 - self._probability(draft))
            self._numbers[id(draft)] = draft, quantile_s(draft, self.coster) * risk
        return self._numbers[id(draft)][1] * self.weight(draft)

    def _probability(self, draft: PlanDraft) -> float:
        """Probability that a draft fits."""
        return draft.evaluation.prediction.memory_probability(self.coster.cluster)

    def limit_s(self, draft: PlanDraft) -> float:
        """Limit on the weighed seconds of plans that are better than a draft: numbers exceed them
        by no smaller part than if plans only computed, or than those of the drafts seen."""
        number_s = self.number_s(draft)
        if len(self._numbers) < SEEN:
            error = QUANTILE * compute_error(self.coster.cluster.device.name) * self.robust
            return number_s / (1 + error)
        return number_s / min(n / seen.step_time_s for seen, n in self._numbers.values())

    def wants_room(self, draft: PlanDraft, limit_s: float) -> bool:
        """Whether a draft below the limit may gain by leaving more of its devices' memory free."""
        better = self.robust and self.weight(draft) * draft.step_time_s < limit_s
        return better and self._probability(draft) < CERTAIN

    def judged(self, drafts: Sequence[PlanDraft]) -> list[tuple[float, PlanDraft]]:
        """The drafts in the order in which they should be chosen, each with its number: exact for
        those that may be best, behind them the rest by their weighed seconds."""
        weighed = [(self.weight(draft) * draft.step_time_s, draft) for draft in drafts]
        weighed.sort(key=lambda pair: (pair[0], order(pair[1])))
        judged, limit_s = list[tuple[float, PlanDraft]](), math.inf
        for weighed_s, draft in weighed:
            if weighed_s > limit_s or len(judged) == MOST_JUDGED:
                break
            judged.append((self.number_s(draft), draft))
            limit_s = min(limit_s, self.limit_s(draft))
        rest = weighed[len(judged) :]
        judged.sort(key=lambda pair: (pair[0], sum(self.looks(pair[1]).parts()), order(pair[1])))
        last = max((number for number, _ in judged), default=0.0)
        return judged + [(max(last, weighed_s), draft) for weighed_s, draft in rest]


def quantile_s(draft: PlanDraft, coster: StageCoster) -> float:
    """The quantile of a draft's step time over the errors of its price, in seconds."""
    expected_s, plan = draft.step_time_s, draft.evaluation.plan
    node = coster.cluster.devices_per_node
    nodes = max(len({rank // node for rank in stage.ranks}) for stage in plan.stages)
    across = COMMUNICATION_ERROR * (1 + math.log2(nodes) / 2)

    def step_s(
        compute: float = 0.0, communication: float = 0.0, data: float = 0.0, host: float = 0.0
    ) -> float:
        costs = [
            d.repriced(
                compute=1 + compute,
                communication=1 + communication,
                data_axis=1 + data,
                host=1 + host,
            )
            for d in draft.stages
        ]
        priced = price_stages(
            plan, coster, costs, draft.evaluation.split, send_scale=1 + communication
        )
        return priced.prediction.step_time_s

    computing = compute_error(coster.cluster.device.name)
    more = [
        step_s(compute=computing),
        step_s(communication=COMMUNICATION_ERROR, data=across),
        *[step_s(host=HOST_ERROR)] * any(stage.host for stage in plan.stages),
    ]
    return expected_s + QUANTILE * math.hypot(*(seconds - expected_s for seconds in more))


def order(draft: PlanDraft | Candidate) -> tuple[Any, ...]:
    """Key by step time; of equal plans the same one comes first in every run."""
    plan = draft.plan
    stages = [(*mesh_of(stage), len(stage.blocks)) for stage in plan.stages]
    return draft.step_time_s, len(stages), plan.schedule, plan.num_microbatches, stages


def shape(draft: PlanDraft) -> tuple[Any, ...]:
    """Key of plans that are the same for a reader: they differ in micro-batches at most."""
    plan = draft.plan
    return plan.schedule, *((*mesh_of(stage), stage.policies[0]) for stage in plan.stages)
