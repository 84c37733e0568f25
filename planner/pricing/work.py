"""What a plan's price counts: floating-point operations, and bytes that links carry.

Prices are seconds; what they are seconds of is had from the same formulas on clusters where nothing
else takes time: one FLOP a second and memory that is free, or links of one byte a second and
kernels that are free, without efficiencies, launches or latencies. Nothing is hidden there, so that
the seconds of a stage add up to all of its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.kernels import crosses_node
from meshwright.costmodel.operators import Problem, Setting
from meshwright.costmodel.sharding import Assignment
from meshwright.costmodel.stages import StageCosts
from meshwright.planner.plan import Plan, crossings, passes_of
from meshwright.planner.pricing.amounts import Amounts, Axis, add, data_amounts, passes_amounts
from meshwright.planner.pricing.evaluate import (
    Evaluation,
    price_stages,
    stage_sums,
    transfer_seconds,
)
from meshwright.planner.pricing.stage_costs import StageCoster, stage_setting
from meshwright.profiles.cluster import DTYPES, Cluster
from meshwright.profiles.hardware.curve import FULL

FREE = 1e30  # FLOP/s or bytes/s
KINDS_OF_BYTES = ("in passes", "gradients and weights", "between stages")
LINKS = ("in a node", "between nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank does in a step: `flops` of products and attention, `repeated_flops` of which are
    recompute, and bytes that it gives to links by kind (`KINDS_OF_BYTES`): collectives within
    forwards and backwards, of gradients and weights, and messages to other stages."""

    flops: float
    repeated_flops: float
    sent_bytes: Mapping[str, float]

    def __add__(self, other: Work) -> Work:
        sent = {kind: self.sent_bytes[kind] + other.sent_bytes[kind] for kind in KINDS_OF_BYTES}
        return Work(
            flops=self.flops + other.flops,
            repeated_flops=self.repeated_flops + other.repeated_flops,
            sent_bytes=sent,
        )


def priced_work(
    plan: Plan, problem: Problem, assignments: Sequence[Mapping[str, Assignment]]
) -> list[Work]:
    """The work of a rank of each device group, as the price of a checked plan counts it."""
    computing, sending = _counting_costers(plan, problem)
    messages = _messages(plan, sending)
    found = []
    for ranks in plan.devices:
        work = Work(flops=0.0, repeated_flops=0.0, sent_bytes=dict.fromkeys(KINDS_OF_BYTES, 0.0))
        for k, stage in enumerate(plan.stages):
            if stage.ranks == ranks:
                flops, repeated = _flops(plan, k, computing, assignments[k])
                sent = _sent(plan, k, sending, assignments[k]) | {KINDS_OF_BYTES[2]: messages[k]}
                work += Work(flops=flops, repeated_flops=repeated, sent_bytes=sent)
        found.append(work)
    return found


def _counting_costers(plan: Plan, problem: Problem) -> list[StageCoster]:
    """Price FLOPs, and bytes on links, in place of seconds."""
    target = replace(problem.target, overlap_tensor=(), attention_scale=1.0, zero_bandwidth=1.0)
    own = replace(problem, precision=plan.precision, profile=None, target=target)
    return [StageCoster(replace(own, cluster=cluster)) for cluster in _counting(problem.cluster)]


def _counting(cluster: Cluster) -> tuple[Cluster, Cluster]:
    """The cluster on which seconds are FLOPs, and that on which they are bytes on links."""
    device = replace(
        cluster.device,
        peak_flops=dict.fromkeys(DTYPES, FREE),
        memory_bandwidth=FREE,
        matmul_efficiency=FULL,
        memory_efficiency=FULL,
        attention_efficiency=FULL,
        tuned_attention_efficiency=None,
        tiles=(),
        launch_overhead_s=0.0,
        host_overhead_s=0.0,
        overlap_slowdown=0.0,
    )
    link = replace(
        cluster.intra_link,
        latency_s=0.0,
        bandwidth=1.0,
        efficiency=FULL,
        group_efficiency=FULL,
        per_rank_bandwidth=None,
        switch_bandwidth=None,
        direct_efficiency=1.0,
    )
    sending = replace(
        cluster,
        device=device,
        num_nodes=1,
        devices_per_node=cluster.num_devices,
        intra_link=link,
        inter_link=link,
    )
    free = replace(link, bandwidth=FREE)
    computing = replace(
        sending,
        device=replace(device, peak_flops=dict.fromkeys(DTYPES, 1.0)),
        intra_link=free,
        inter_link=free,
    )
    return computing, sending


def _flops(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> tuple[float, float]:
    _, sums, repeated = stage_sums(plan, k, coster, assignments)
    again, m = float(repeated.seconds), passes_of(plan)
    return m * (float(sums.forward_s + sums.backward_s) + again), m * again


def _sent(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> dict[str, float]:
    passes = passes_amounts(plan, k, coster, assignments)
    step = data_amounts(*stage_sums(plan, k, coster, assignments), None)
    return {
        kind: sum(amount.seconds for amount in amounts.values())
        for kind, amounts in zip(KINDS_OF_BYTES, (passes, step), strict=False)
    }


def _messages(plan: Plan, coster: StageCoster) -> list[float]:
    """Bytes that the busiest rank of each stage sends in a step, activations on and gradients
    back."""
    found = [0.0] * len(plan.stages)
    for edge, values in crossings(plan, coster.graph).items():
        sent = passes_of(plan) * transfer_seconds(plan, coster, edge, values)
        for stage in edge:
            found[stage] += sent
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a rank of a stage says to others in a step on one axis by one collective: calls, bytes
    that it gives to links, seconds by themselves, and those that nothing hides. `link` is the
    slowest that its group has. Messages between stages are counted by the stage that sends them:
    to the next activations, to the one before gradients."""

    stage: int
    axis: Axis
    collective: str
    link: str
    calls: int
    sent_bytes: float
    seconds: float
    exposed_s: float


def traffic(
    evaluation: Evaluation, problem: Problem, assignments: Sequence[Mapping[str, Assignment]]
) -> list[Traffic]:
    """The communication of a priced plan. Seconds of collectives beside passes are exposed in
    proportion; messages between stages by what the step would take without them."""
    plan = evaluation.plan
    coster = StageCoster(replace(problem, precision=plan.precision))
    counting = _counting_costers(plan, problem)[1]
    found = []
    for k, (costs, own) in enumerate(zip(evaluation.stages, assignments, strict=True)):
        setting = stage_setting(plan, k, coster)
        seconds = _amounts(plan, k, coster, own, costs)
        sent = _amounts(plan, k, counting, own, None)
        for (axis, collective), amount in seconds.items():
            found.append(
                Traffic(
                    stage=k,
                    axis=axis,
                    collective=collective,
                    link=_link(setting, axis),
                    calls=round(amount.calls),
                    sent_bytes=sent[axis, collective].seconds,
                    seconds=amount.seconds,
                    exposed_s=amount.exposed_s,
                )
            )
    found += _between_stages(evaluation, coster, counting)
    return sorted(found, key=lambda row: row.stage)


def _amounts(
    plan: Plan,
    k: int,
    coster: StageCoster,
    assignments: Mapping[str, Assignment],
    costs: StageCosts[float] | None,
) -> Amounts:
    found = passes_amounts(plan, k, coster, assignments)
    for key, amount in data_amounts(*stage_sums(plan, k, coster, assignments), costs).items():
        add(found, key, amount)
    return found


def _link(setting: Setting, axis: Axis) -> str:
    """The slowest link of the groups of an axis."""
    size, stride = {
        "tensor": (setting.mesh.tp, 1),
        "context": (setting.mesh.cp, setting.mesh.tp),
        "experts": (setting.mesh.ep, setting.mesh.tp),
        "data": (setting.mesh.holders, setting.mesh.tp),
    }[axis]
    return LINKS[setting.group(size=size, stride=stride).nodes > 1]


def _between_stages(
    evaluation: Evaluation, coster: StageCoster, counting: StageCoster
) -> list[Traffic]:
    plan = evaluation.plan
    edges = crossings(plan, coster.graph)
    taken = {edge: transfer_seconds(plan, coster, edge, edges[edge]) for edge in edges}
    if not (whole := sum(taken.values())):
        return []
    without = price_stages(plan, coster, evaluation.stages, send_scale=0.0, exchanged=True)
    step_s = evaluation.prediction.step_time_s
    exposed = max(0.0, step_s - without.prediction.step_time_s)
    node, found = coster.cluster.devices_per_node, dict[tuple[int, str], Traffic]()
    for edge, values in edges.items():
        seconds = passes_of(plan) * taken[edge]
        if not seconds:
            continue  # to a stage on the same ranks
        source, destination = (plan.stages[k].ranks for k in edge)
        link = LINKS[crosses_node(source, destination, node)]
        sent = passes_of(plan) * transfer_seconds(plan, counting, edge, values)
        for stage in edge:
            known = found.get((stage, link))
            found[stage, link] = Traffic(
                stage=stage,
                axis="pipeline",
                collective="send",
                link=link,
                calls=passes_of(plan) + (known.calls if known else 0),
                sent_bytes=sent + (known.sent_bytes if known else 0.0),
                seconds=seconds + (known.seconds if known else 0.0),
                exposed_s=min(seconds, exposed * taken[edge] / whole / 2)
                + (known.exposed_s if known else 0.0),
            )
    return [*found.values()]
