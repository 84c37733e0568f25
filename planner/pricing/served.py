"""Price of an exchange through parameter servers (`executor/runtime/served.py`).

n workers, k servers, gradients of g and weights of w bytes, of which the fullest server keeps a
part f (1/k where tensors divide evenly). In a step the links of a server carry

    n f (w + g)                                    one (N - 1)(w + g), with N = n + 1 ranks

one worker after the other, where an all-reduce over N ranks gives each 2 (N - 1)/N g. A server
steps f of all elements: once a step, or (with staleness) at each push. What a push and its answer
take is the service s; Z is a worker's compute:

    synchronous    Z + n s                 all wait: of s the optimizer's step once
    staleness      max(n s, Z + s)         the others compute meanwhile: n customers of one queue

(closed queueing network without variance; docs/reference/servers.md has the terms of stragglers.)
Gradients and weights are copied to flat tensors and back, by which both are read and written.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costmodel.kernels import collective_time, crosses_node, group_for, stream_seconds
from meshwright.costmodel.operators import Entry, Problem
from meshwright.costmodel.stages import StageCosts
from meshwright.planner.plan import Plan, server_of
from meshwright.planner.pricing.stage_costs import StageCoster


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An exchange through servers: messages of a step on the busiest server's links, what they
    take, and the optimizer's steps there, in all (`step_s`) and what a worker waits of both; bytes
    of the fullest server and of a worker at the push; an all-reduce over as many ranks beside."""

    sent: Entry
    link_bytes: float
    exchange_s: float
    step_s: float
    waited_s: tuple[float, float]
    server_bytes: float
    worker_bytes: float
    ring_s: float
    ring_bytes: float


def served(plan: Plan, coster: StageCoster, costs: StageCosts[float], problem: Problem) -> Served:
    """The exchange of a plan whose workers have these `costs`; `problem` has its optimizer."""
    cluster, graph, kind = problem.cluster, problem.graph, problem.cluster.device.kind
    workers, of = plan.stages[0].dp, server_of(graph, plan.servers)
    itemsize = problem.stepped.kept_bytes
    mine: list[list[float]] = [[] for _ in range(plan.servers)]
    for value, k in of.items():
        mine[k].append(float(graph.values[value].numel))
    total, fullest = sum(map(sum, mine)), max(range(plan.servers), key=lambda k: sum(mine[k]))
    numel = sum(mine[fullest])
    each = cluster.devices_per_node
    on_node = sum(k // each == fullest // each for k in range(plan.servers))
    one_way, crosses = 0.0, False
    for rank in plan.stages[0].ranks:
        ends = (fullest,), (rank,)
        shared = on_node if crosses_node(*ends, each) else 1
        crosses |= shared > 1 or crosses_node(*ends, each)
        one_way += shared * coster.message_s(itemsize * numel, *ends, tp=1)
    one_way = max(
        one_way, coster.message_s(itemsize * total, (0,), plan.stages[0].ranks[-1:], tp=1)
    )
    copied = stream_seconds(cluster.device, 4 * itemsize * total)
    taken = stream_seconds(cluster.device, (2 if plan.staleness else 5) * itemsize * numel)
    answers = workers if plan.staleness else 1
    flat = stream_seconds(cluster.device, 2 * itemsize * numel)
    exchange_s = 2 * one_way + workers * taken + answers * flat
    moved = numel * problem.stepped.moved * problem.target.optimizer_passes
    issued = len(mine[fullest]) * problem.stepped.issues(kind) * cluster.device.launch_overhead_s
    step_s = answers * (stream_seconds(cluster.device, moved) + issued)
    waited = exchange_s, step_s
    if plan.staleness:
        compute_s = plan.passes * (costs.forward_s + costs.backward_s) + copied
        busy_s = exchange_s + step_s
        part = max(busy_s - compute_s, busy_s / workers) / busy_s
        waited = part * exchange_s, part * step_s
    buffers = (
        itemsize * numel * (3 - bool(plan.staleness))
    )  # gradients as they come, their sum, a reply
    reserved = cluster.device.reserved_bytes + costs.communicator_bytes + costs.fixed_bytes
    ring = group_for(cluster, size=plan.num_ranks, stride=1)
    sent = Entry(
        "reduce_s",
        "collective",
        copied + waited[0],
        axis="data",
        collective="send",
        calls=2.0 * plan.servers,
        sent_bytes=itemsize * total,
        crosses=crosses,
    )
    return Served(
        sent=sent,
        link_bytes=2 * itemsize * numel * workers,
        exchange_s=exchange_s,
        step_s=step_s,
        waited_s=waited,
        server_bytes=reserved
        + buffers
        + problem.stepped.moments * numel
        + problem.stepped.temporary_bytes(mine[fullest], kind),
        worker_bytes=reserved + itemsize * (2 * total + numel),
        ring_s=collective_time("all_reduce", itemsize * total, ring, cluster),
        ring_bytes=2 * (plan.num_ranks - 1) / plan.num_ranks * itemsize * total,
    )
