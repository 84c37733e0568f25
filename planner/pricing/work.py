"""What a plan's price counts: floating-point operations, and bytes that links carry.

Prices are seconds; what they are seconds of is had from the same formulas on clusters where nothing
else takes time: one FLOP a second and memory that is free, or links of one byte a second and
kernels that are free, without efficiencies, launches or latencies. Nothing is hidden there, so that
the seconds of a stage add up to all of its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import Assignment
from meshwright.planner.plan import Plan, crossings
from meshwright.planner.pricing.evaluate import stage_sums, transfer_seconds
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles.cluster import DTYPES, Cluster
from meshwright.profiles.curve import FULL

FREE = 1e30  # FLOP/s or bytes/s
KINDS_OF_BYTES = ("in passes", "gradients and weights", "between stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank does in a step: `flops` of products and attention, and bytes that it gives to
    links by kind (`KINDS_OF_BYTES`): collectives within forwards and backwards, of gradients and
    weights, and messages to other stages."""

    flops: float
    sent_bytes: Mapping[str, float]

    def __add__(self, other: Work) -> Work:
        sent = {kind: self.sent_bytes[kind] + other.sent_bytes[kind] for kind in KINDS_OF_BYTES}
        return Work(flops=self.flops + other.flops, sent_bytes=sent)


def priced_work(
    plan: Plan, problem: Problem, assignments: Sequence[Mapping[str, Assignment]]
) -> list[Work]:
    """The work of a rank of each device group, as the price of a checked plan counts it."""
    computing, sending = (
        StageCoster(
            replace(
                problem,
                cluster=cluster,
                precision=plan.precision,
                profile=None,
                target=replace(
                    problem.target, overlap_tensor=(), attention_scale=1.0, zero_bandwidth=1.0
                ),
            )
        )
        for cluster in _counting(problem.cluster)
    )
    messages = _messages(plan, sending)
    found = []
    for ranks in plan.devices:
        work = Work(flops=0.0, sent_bytes=dict.fromkeys(KINDS_OF_BYTES, 0.0))
        for k, stage in enumerate(plan.stages):
            if stage.ranks == ranks:
                flops = _flops(plan, k, computing, assignments[k])
                sent = _sent(plan, k, sending, assignments[k]) | {KINDS_OF_BYTES[2]: messages[k]}
                work += Work(flops=flops, sent_bytes=sent)
        found.append(work)
    return found


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


def _flops(plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]) -> float:
    _, sums, repeated = stage_sums(plan, k, coster, assignments)
    return plan.num_microbatches * float(sums.forward_s + sums.backward_s + repeated.seconds)


def _sent(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> dict[str, float]:
    setting, sums, repeated = stage_sums(plan, k, coster, assignments)
    m = plan.num_microbatches
    passes = m * (sums.forward_comm_s + sums.backward_comm_s + repeated.comm_s)
    if setting.zero == 3:
        step = m * (2 * sums.zero3_gather_s + sums.zero3_scatter_s) + sums.zero3_replicate_s
    elif setting.zero:
        scatters = m if setting.zero == 2 else 1
        step = sums.gather_s + scatters * sums.scatter_s + sums.replicate_s
    else:
        step = sums.reduce_s
    return {KINDS_OF_BYTES[0]: float(passes), KINDS_OF_BYTES[1]: float(step)}


def _messages(plan: Plan, coster: StageCoster) -> list[float]:
    """Bytes that the busiest rank of each stage sends in a step, activations on and gradients
    back."""
    found = [0.0] * len(plan.stages)
    for edge, values in crossings(plan, coster.graph).items():
        found[edge[0]] += plan.num_microbatches * transfer_seconds(plan, coster, edge, values)
        found[edge[1]] += plan.num_microbatches * transfer_seconds(plan, coster, edge, values)
    return found
