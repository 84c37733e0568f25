"""Taste: the plan to choose among those that prices can't tell apart.

A price has errors, the same for all plans on a cluster: of computing by the fraction e_c, of what
stays in a node by e_x, of the data axis' collectives by e_x and half as much again for every
doubling of the nodes that they span (measured gathers over many nodes scatter that much more), of
memory by what the margin leaves free. To first order their quantile of a step of T seconds is

    R = T + z sqrt((T(1 + e_c) - T)² + (T(1 + e_x) - T)²)

with each T(1 + e) simulated again, so that what is hidden behind compute costs where it no longer
fits there. Of the plans whose R exceeds the least by no more than `TIE` the simplest is chosen, by
the order of `simplicity`. The errors are the scoreboard's (`costmodel/intervals.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.costmodel.intervals import COMMUNICATION_ERROR, compute_error
from meshwright.costmodel.operators import Mesh
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.drafts import Candidate, Combination, PlanDraft
from meshwright.planner.plan import Plan, StagePlan
from meshwright.planner.pricing import StageCoster, price_stages
from meshwright.profiles.cluster import Cluster

QUANTILE = 0.84  # standard deviations: a normal variable is below with 80 %
TIE = 0.03  # part of a step that prices can't tell apart
MOST_JUDGED = 12  # plans whose quantile is simulated, the fastest
MEMORY_STEPS = 20  # of a device's memory: what fills less of it is simpler

Simplicity = tuple[int, int, int, bool, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A draft with the quantile of its step time, in seconds."""

    draft: PlanDraft
    quantile_s: float


def simplicity(plan: Plan, peak_bytes: float, memory_bytes: float) -> Simplicity:
    """Order of simplicity, the simplest least: axes besides the data axis, different meshes, uneven
    cuts (stages that differ by more than a block), schedules beyond 1F1B and interleaving,
    different recompute policies, ZeRO within parts, with secondary shards and strided ranks,
    tensor-parallel ranks, micro-batches, memory. Tensor parallelism and micro-batches stand where
    they are because measured sweeps lose least so (docs/measurements.md, "Regret")."""
    stages = plan.stages
    blocks = [len(stage.blocks) for stage in stages]
    meshes = {mesh_of(stage) for stage in stages}
    return (
        axes_of(stages, len(plan.devices)),
        len(meshes),
        max(0, max(blocks) - min(blocks) - 1),
        len(plan.devices) > 1 and not SCHEDULES[plan.schedule].standard,
        len({policy for stage in stages for policy in stage.policies}),
        sum(_parted(stage) for stage in stages[:1]),
        max(stage.tp for stage in stages),
        plan.num_microbatches,
        math.ceil(MEMORY_STEPS * peak_bytes / memory_bytes),
    )


# of each place in that order, what is said of the simpler plan
_SAID = (
    "uses fewer axes besides the data axis ({} instead of {})",
    "has fewer different meshes ({} instead of {})",
    "cuts the blocks more evenly",
    "keeps to a common pipeline schedule",
    "has fewer different recompute policies ({} instead of {})",
    "shares ZeRO's states among all data ranks and lays ranks side by side",
    "has a smaller tensor-parallel degree ({} instead of {})",
    "takes fewer micro-batches ({} instead of {})",
    "fills less of a device's memory",
)


def why_simpler(plan: Plan, other: Plan, peaks: Sequence[float], memory_bytes: float) -> str:
    """What makes a plan simpler than another one, by the first place at which their simplicity
    differs; empty where it is not simpler. `peaks` are bytes of theirs."""
    ours, theirs = (
        simplicity(each, peak, memory_bytes)
        for each, peak in zip((plan, other), peaks, strict=True)
    )
    if ours >= theirs:
        return ""
    at = next(k for k in range(len(ours)) if ours[k] != theirs[k])
    return _SAID[at].format(ours[at], theirs[at])


def mesh_of(stage: StagePlan) -> tuple[int, ...]:
    """The degrees of a stage and how ZeRO divides on it."""
    degrees = stage.dp, stage.cp, stage.tp, stage.ep
    return *degrees, *stage.order


def axes_of(meshes: Sequence[Mesh] | Sequence[StagePlan], groups: int) -> int:
    """Axes in use besides the data axis, on so many device groups."""
    own = (any(getattr(mesh, axis) > 1 for mesh in meshes) for axis in ("tp", "cp", "ep"))
    return (groups > 1) + sum(own)


def kind_of_mesh(one: Combination) -> tuple[int, ...]:
    """What sets combinations apart by simplicity."""
    mesh = one.setup.mesh
    axes = (one.groups > 1, mesh.tp > 1, mesh.cp > 1, mesh.ep > 1)
    parted = one.setup.sharing.extras, mesh.spread > 1
    return *axes, SCHEDULES[one.schedule].standard, *parted


def _parted(stage: StagePlan) -> int:
    return stage.extras + (stage.spread > 1)


def _of_draft(draft: PlanDraft, cluster: Cluster) -> Simplicity:
    """The simplicity of a draft."""
    evaluation = draft.evaluation
    peak = evaluation.prediction.fullest_bytes
    return simplicity(evaluation.plan, peak, cluster.device.memory_bytes)


def by_taste(
    drafts: Sequence[PlanDraft], coster: StageCoster, weight: Callable[[PlanDraft], float]
) -> list[Judged]:
    """The drafts in the order in which they should be chosen: ties by simplicity, then the rest by
    their quantile; each by as many times its seconds as its `weight` says."""
    fastest = sorted(drafts, key=lambda d: weight(d) * d.step_time_s)[:MOST_JUDGED]
    judged = [Judged(draft=d, quantile_s=weight(d) * quantile_s(d, coster)) for d in fastest]
    least = min((j.quantile_s for j in judged), default=math.inf)

    def order(own: Judged) -> tuple[bool, Simplicity | tuple[()], float, str]:
        tied = own.quantile_s <= least * (1 + TIE)
        simple = _of_draft(own.draft, coster.cluster) if tied else ()
        return not tied, simple, own.quantile_s, own.draft.plan.to_json()

    return sorted(judged, key=order)


def quantile_s(draft: PlanDraft, coster: StageCoster) -> float:
    """The quantile of a draft's step time over the errors of its price, in seconds."""
    own, plan = draft.step_time_s, draft.evaluation.plan
    nodes = max(_nodes(stage, coster.cluster) for stage in plan.stages)
    across = COMMUNICATION_ERROR * (1 + math.log2(nodes) / 2)

    def step_s(compute: float, communication: float, data: float) -> float:
        costs = [
            d.repriced(compute=1 + compute, communication=1 + communication, data_axis=1 + data)
            for d in draft.stages
        ]
        priced = price_stages(plan, coster, costs, send_scale=1 + communication)
        return priced.prediction.step_time_s

    computing = compute_error(coster.cluster.device.name)
    more = (step_s(computing, 0.0, 0.0), step_s(0.0, COMMUNICATION_ERROR, across))
    return own + QUANTILE * math.hypot(*(seconds - own for seconds in more))


def _nodes(stage: StagePlan, cluster: Cluster) -> int:
    """Nodes that a stage's ranks lie on."""
    return len({rank // cluster.devices_per_node for rank in stage.ranks})


def order(found: PlanDraft | Candidate) -> tuple[Any, ...]:
    """Fastest first; of equal ones the same one first in every run."""
    plan = found.evaluation.plan
    stages = [(*mesh_of(stage), len(stage.blocks)) for stage in plan.stages]
    return found.step_time_s, len(stages), plan.schedule, plan.num_microbatches, stages


def shape(draft: PlanDraft) -> tuple[Any, ...]:
    """What makes a plan another one for a reader: more than micro-batches."""
    plan = draft.evaluation.plan
    return plan.schedule, *((*mesh_of(stage), stage.policies[0]) for stage in plan.stages)
