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
from functools import partial

from meshwright.costmodel.kernels import collective_time, crosses_node, group_for, stream_seconds
from meshwright.costmodel.operators import Entry, Problem
from meshwright.costmodel.stages import StageCosts
from meshwright.planner.plan import Plan, seconds, server_of, sized
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles.cluster import Cluster


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

    def words(self, plan: Plan) -> str:
        """The exchange of a plan in a sentence, beside a ring."""
        return (
            f"{plan.servers} of {plan.num_ranks} ranks are parameter servers and compute nothing: "
            f"the links of one carry {sized(self.link_bytes)} a step, which takes "
            f"{seconds(self.exchange_s)}, its optimizer {seconds(self.step_s)}; a worker waits "
            f"{seconds(sum(self.waited_s))} of both. A ring of all ranks would take "
            f"{seconds(self.ring_s)}, {sized(self.ring_bytes)} of each. A server needs "
            f"{sized(self.server_bytes)}"
        )


def served(plan: Plan, coster: StageCoster, costs: StageCosts[float], problem: Problem) -> Served:
    """The exchange of a plan whose workers have these `costs`; `problem` has its optimizer."""
    cluster, optimizer = problem.cluster, problem.stepped
    workers, itemsize = plan.stages[0].dp, optimizer.kept_bytes
    tensors = _tensors(plan, problem)
    total = itemsize * sum(map(sum, tensors))
    fullest = max(range(plan.servers), key=lambda k: sum(tensors[k]))
    part = itemsize * sum(tensors[fullest])
    one_way, crosses = _one_way(plan, coster, fullest, part, total)
    streamed = partial(stream_seconds, cluster.device)
    answers = workers if plan.staleness else 1
    taken = workers * streamed((2 if plan.staleness else 5) * part)
    exchange_s = 2 * one_way + taken + answers * streamed(2 * part)
    moved = part / itemsize * optimizer.moved * problem.target.optimizer_passes
    issues = len(tensors[fullest]) * optimizer.issues(cluster.device.kind)
    step_s = answers * (streamed(moved) + issues * cluster.device.launch_overhead_s)
    waited, copied = 1.0, streamed(4 * total)
    if plan.staleness:
        compute_s = plan.passes * (costs.forward_s + costs.backward_s) + copied
        busy_s = exchange_s + step_s
        waited = max(busy_s - compute_s, busy_s / workers) / busy_s
    ring = group_for(cluster, size=plan.num_ranks, stride=1)
    sent = Entry(
        "reduce_s",
        "collective",
        copied + waited * exchange_s,
        axis="data",
        collective="send",
        calls=2.0 * plan.servers,
        sent_bytes=total,
        crosses=crosses,
    )
    reserved = cluster.device.reserved_bytes + costs.communicator_bytes + costs.fixed_bytes
    # of a server gradients as they come, their sum, a reply; of a worker all at the push
    states = optimizer.moments / itemsize * part
    stepping = (2 if plan.staleness else 3) * part
    stepping += optimizer.temporary_bytes(tensors[fullest], cluster.device.kind)
    drained = total  # a copy of its part, and those of the other servers as they come
    return Served(
        sent=sent,
        link_bytes=2 * part * workers,
        exchange_s=exchange_s,
        step_s=step_s,
        waited_s=(waited * exchange_s, waited * step_s),
        server_bytes=reserved + states + max(stepping, drained),
        worker_bytes=reserved + 2 * total + part,
        ring_s=collective_time("all_reduce", total, ring, cluster),
        ring_bytes=2 * (plan.num_ranks - 1) / plan.num_ranks * total,
    )


def served_shortage(server: float, fullest: float, lacking: float, cluster: Cluster) -> str:
    """Bytes that the fullest rank needs, a server or (of more) a worker, and what would help."""
    who, what, more = (
        ("server", "all weights, and of its part optimizer states and gradients", "more servers")
        if server >= fullest
        else ("worker", "all weights and gradients, and the activations of its rows", "fewer rows")
    )
    return (
        f"a {who} needs {sized(fullest)} ({what}), {sized(lacking)} more than there is room for on "
        f"{cluster.device.name}. Way out: {more}, an optimizer with fewer states, or ZeRO in place "
        "of servers"
    )


def _tensors(plan: Plan, problem: Problem) -> list[list[float]]:
    """Elements of the tensors of each server."""
    tensors: list[list[float]] = [[] for _ in range(plan.servers)]
    for value, k in server_of(problem.graph, plan.servers).items():
        tensors[k].append(float(problem.graph.values[value].numel))
    return tensors


def _one_way(
    plan: Plan, coster: StageCoster, server: int, part: float, total: float
) -> tuple[float, bool]:
    """Seconds of a part between a server and all workers, one after the other, or of all between
    a worker and its servers, and whether a message crosses nodes: then servers of one node share
    its links."""
    ranks, each = plan.stages[0].ranks, coster.cluster.devices_per_node
    on_node = sum(k // each == server // each for k in range(plan.servers))
    one_by_one, crosses = 0.0, False
    for rank in ranks:
        ends = (server,), (rank,)
        crosses |= crosses_node(*ends, each)
        shared = on_node if crosses_node(*ends, each) else 1
        one_by_one += shared * coster.message_s(part, *ends, tp=1)
    return max(one_by_one, coster.message_s(total, (0,), ranks[-1:], tp=1)), crosses
