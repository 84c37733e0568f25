"""Seconds and bytes of a collective: the cheapest of the algorithms that NCCL or gloo has for it.

M is the full tensor's bytes, n the ranks, N the nodes they are on, p = n / N the ranks on a node.
Every rank sends (`bytes_sent`)

    all_reduce               2 M (n-1)/n
    all_gather               M (n-1)/n
    reduce_scatter           M (n-1)/n
    all_to_all               M (n-1)/n^2      of its M/n shard
    broadcast                M                pipelined along the ring

An algorithm is a `Route`: the latency of its longest chain of messages, and legs that run at the
same time. On a leg each rank sends x = share * M bytes at a bandwidth of which messages of x bytes
reach a fraction e(x):

    time = launch + latency + busy + fill
    busy = max over the legs of  x / (bandwidth * e(x))

With alpha the latency of a link inside a node, beta that of one between nodes:

    ring      n-1 steps. With p > 1 the slowest chunk crosses all N borders: N beta + (n-1-N) alpha;
              with p = 1, (n-1) beta. An all-reduce goes round twice. Each rank sends `bytes_sent`
              inside its node, and the node as much through its NICs: NCCL lays a ring per NIC.
    tree      all-reduce over nodes: up and down a chain inside each node and a binary tree over
              nodes, 2 ((p-1) alpha + ceil(log2 N) beta). Each rank sends 2 M inside its node. NCCL
              halves the tensor over two trees, so that each node sends 2 M, or M where N = 2 and
              the one node is the other's only neighbour.
    switch    all-reduce in switches that add up and multicast (NVLink SHARP): each rank sends its M
              to them, and M/p of the sum to all; there and back with the switches' own latency.
              Over nodes it takes the place of the chain in the tree.
    direct    all-to-all: n-1 messages of M/n^2 posted one after the other; (p-1) M/n^2 bytes of a
              rank stay in its node while (n-p) M/n^2 leave it, at `direct_efficiency`.

gloo has rings alone; torch gives its reduce-scatter as an all-reduce of which each rank keeps its
part, and issuing a collective, waiting for it and waking up costs as much as issuing some 50
operators (0.9 ms each in the step of a tiny GPT-2 under ZeRO-3 on 2 idle ranks, where an all-gather
alone takes 0.2 to 0.5).

A ring is always full. A tree and a switch are pipes that must be filled: one way, K chunks over D
steps of alpha take (D + K) (alpha + busy / K), which is least at K = sqrt(D busy / alpha) and then
exceeds D alpha + busy by 2 sqrt(D alpha busy). Chunks come down while later ones go up, so that the
pipe is filled once; with the latency and the bytes of both ways, fill = sqrt(latency * busy).

A group that holds p ranks of a node uses its whole share of the NICs: all of them divided by the
groups that use them at the same time, and no more than its own ranks can drive.

Where nodes lie in pools, a group that reaches over them has one more leg: what it sends from one
pool to another in one direction, at the bandwidth between pools over the groups that share it, and
that link's latency at each border between pools in place of the nodes'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from meshwright.profiles.cluster import Cluster, Link
from meshwright.profiles.hardware.catalog_reader import unknown_name
from meshwright.profiles.hardware.curve import FULL, Curve
from meshwright.profiles.inputs import ArgumentError, ClusterError, shown

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
GLOO_ISSUES = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`size` ranks, `per_node` of them on a node; `concurrent` such groups share a node's NICs, and
    `over_pools` the link between pools; 0 where it lies in one."""

    size: int
    per_node: int
    concurrent: int = 1
    over_pools: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.per_node <= self.size:
            place, legal = f"group of size {self.size}: per_node", f"1 to {self.size}"
            raise ArgumentError.refused(place, self.per_node, legal=legal)
        if self.concurrent < 1:
            raise ArgumentError.refused("group: concurrent", self.concurrent, legal="1 or more")

    @property
    def nodes(self) -> int:
        """Nodes the group touches."""
        return math.ceil(self.size / self.per_node)


def group_for(cluster: Cluster, *, size: int, stride: int) -> Group:
    """The costliest of the groups {r, r + stride, ..., r + (size-1) stride} that tile the cluster:
    where nodes cut them unequally (6 devices per node, groups of 4), that with the fewest ranks on
    a node. Raises ValueError if not even one group fits the cluster."""
    if size < 1 or stride < 1 or size * stride > cluster.num_devices:
        raise ClusterError(
            f" needs {shown(size * stride)} ranks",
            place=f"group of size {shown(size)}, stride {shown(stride)}",
            legal=f"on {cluster.name!r}: size and stride from 1, size * stride up to "
            f"{cluster.num_devices}",
            way_out="give a smaller group, or a cluster of more devices",
        )
    worst = _worst_group(cluster.num_devices, cluster.devices_per_node, size, stride)
    if cluster.num_pools == 1 or worst.nodes == 1:
        return worst
    over = _over_pools(cluster.num_devices, cluster.pool_devices, size, stride)
    return dataclasses.replace(worst, over_pools=over)


@cache
def _over_pools(num_devices: int, pool_devices: int, size: int, stride: int) -> int:
    """The most of the groups that tile the cluster which reach out of one pool."""
    first = np.arange(num_devices // (size * stride))[:, None] * (size * stride) + np.arange(stride)
    pools = (first.reshape(-1, 1) + np.arange(size) * stride) // pool_devices
    touched = [np.unique(row) for row in pools[pools[:, 0] != pools[:, -1]]]
    return int(np.bincount(np.concatenate(touched)).max()) if touched else 0


@cache
def _worst_group(num_devices: int, devices_per_node: int, size: int, stride: int) -> Group:
    if size * stride <= devices_per_node and devices_per_node % (size * stride) == 0:
        return Group(size=size, per_node=size)
    span = size * stride
    # Node boundaries and tiles line up again after the least common multiple of their lengths.
    tiles = min(num_devices, math.lcm(span, devices_per_node)) // span
    first = (np.arange(tiles)[:, None] * span + np.arange(stride)).reshape(-1, 1)
    nodes = (first + np.arange(size) * stride) // devices_per_node
    spanning = nodes[nodes[:, 0] != nodes[:, -1]]
    if not len(spanning):
        return Group(size=size, per_node=size)
    counts = [np.unique(row, return_counts=True) for row in spanning]
    return Group(
        size=size,
        per_node=min(int(members.max()) for _, members in counts),
        concurrent=int(np.bincount(np.concatenate([touched for touched, _ in counts])).max()),
    )


def bytes_sent(kind: str, nbytes: float, size: int) -> float:
    """Bytes each of `size` ranks sends in a collective over a tensor of `nbytes` in full."""
    if kind not in COLLECTIVES:
        raise unknown_name("collective", kind, COLLECTIVES)
    if size == 1:
        return nbytes * 0.0
    share = (size - 1) / size
    factor = {"all_reduce": 2 * share, "all_to_all": share / size, "broadcast": 1.0}
    return nbytes * factor.get(kind, share)


def collective_time(kind: str, nbytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds of a collective of `group` over `nbytes` in full; 0 for one rank."""
    return min((route.seconds(nbytes) for route in routes(kind, group, cluster)), default=0.0)


def p2p_time(
    nbytes: float, cluster: Cluster, *, crosses_node: bool, concurrent: int = 1, over_pools: int = 0
) -> float:
    """Seconds to send `nbytes` to one rank, while `concurrent` ranks of the node send as much, and
    `over_pools` of its pool to another one."""
    return _p2p_route(cluster, crosses_node, concurrent, over_pools).seconds(nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Traffic of each rank over one link: `share` of the tensor, at up to `bandwidth` bytes/s."""

    share: float
    bandwidth: float
    efficiency: Curve

    def seconds(self, nbytes: float) -> float:
        """Seconds for a tensor of `nbytes`."""
        sent = nbytes * self.share
        return sent / (self.bandwidth * self.efficiency(sent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One algorithm for one group: a latency, legs that run at the same time, a `pipe` to fill."""

    launch_s: float
    latency_s: float
    legs: Sequence[Leg]
    pipe: bool = False

    def seconds(self, nbytes: float) -> float:
        """Seconds for a tensor of `nbytes`."""
        busy_s = max(leg.seconds(nbytes) for leg in self.legs)
        total_s = busy_s + (self.launch_s + self.latency_s)
        return total_s + math.sqrt(busy_s * self.latency_s) if self.pipe else total_s


@cache
def routes(kind: str, group: Group, cluster: Cluster) -> tuple[Route, ...]:
    """The algorithms that may carry out a collective of `group`; the cheapest is used."""
    if kind == "reduce_scatter" and cluster.backend == "gloo":
        kind = "all_reduce"  # of which each rank keeps its part
    sent = bytes_sent(kind, 1.0, group.size)
    if group.size == 1:
        return ()
    if kind == "all_to_all":
        return (_direct(group, cluster),)
    algorithms = [_ring(sent, group, cluster, rounds=2 if kind == "all_reduce" else 1)]
    if kind == "all_reduce" and cluster.backend == "nccl":
        if group.nodes > 1:
            algorithms.append(_tree(group, cluster))
        if cluster.intra_link.switch_bandwidth is not None and group.per_node > 2:
            algorithms.append(_switch(group, cluster))
    return tuple(algorithms)


@cache
def _p2p_route(cluster: Cluster, crosses_node: bool, concurrent: int, over_pools: int) -> Route:
    link = cluster.inter_link if crosses_node else cluster.intra_link
    pair = Group(size=2, per_node=1, concurrent=concurrent, over_pools=over_pools)
    leg = _network_leg(1.0, pair, cluster) if crosses_node else _node_leg(1.0, 2, link)
    latency_s = link.latency_s if not over_pools else _pool_link(cluster).latency_s
    legs = (leg, *_pool_legs(1.0, pair, cluster))
    return Route(launch_s=_launch_s(cluster), latency_s=latency_s, legs=legs)


def _launch_s(cluster: Cluster) -> float:
    """Launch of a collective or message; on a CPU also the waking of who waits for it."""
    return cluster.device.launch_overhead_s * (GLOO_ISSUES if cluster.backend == "gloo" else 1.0)


def _ring(sent: float, group: Group, cluster: Cluster, *, rounds: int) -> Route:
    size, nodes, per_node = group.size, group.nodes, group.per_node
    borders = 0 if nodes == 1 else nodes if per_node > 1 else nodes - 1
    over = min(borders, _pools(group, cluster))
    hops_s = _hops_s(cluster, inside=size - 1 - borders, between=borders, over=over)
    legs = [_node_leg(sent, per_node, cluster.intra_link)] if per_node > 1 else []
    if nodes > 1:
        legs.append(_network_leg(sent, group, cluster))
    legs += _pool_legs(sent, group, cluster)
    return Route(launch_s=_launch_s(cluster), latency_s=rounds * hops_s, legs=legs)


def _tree(group: Group, cluster: Cluster) -> Route:
    depths, pools = _tree_depth(group.nodes), _pools(group, cluster)
    over = _tree_depth(pools) if pools else 0
    hops_s = _hops_s(cluster, inside=group.per_node - 1, between=depths, over=over)
    legs = [_node_leg(2.0, group.per_node, cluster.intra_link)] if group.per_node > 1 else []
    legs.append(_network_leg(_tree_share(group.nodes), group, cluster))
    legs += _pool_legs(_tree_share(pools), group, cluster)
    return Route(launch_s=_launch_s(cluster), latency_s=2 * hops_s, legs=legs, pipe=True)


def _switch(group: Group, cluster: Cluster) -> Route:
    link = cluster.intra_link
    assert link.switch_bandwidth is not None
    share = 1.0 + 1.0 / group.per_node
    legs = [Leg(share=share, bandwidth=link.switch_bandwidth, efficiency=FULL)]
    if group.nodes > 1:
        legs.append(_network_leg(_tree_share(group.nodes), group, cluster))
        legs += _pool_legs(_tree_share(_pools(group, cluster)), group, cluster)
    depths, pools = _tree_depth(group.nodes), _pools(group, cluster)
    over = _tree_depth(pools) if pools else 0
    hops_s = link.switch_latency_s + _hops_s(cluster, inside=0, between=depths, over=over)
    return Route(launch_s=_launch_s(cluster), latency_s=2 * hops_s, legs=legs, pipe=True)


def _direct(group: Group, cluster: Cluster) -> Route:
    size, per_node, link = group.size, group.per_node, cluster.intra_link
    legs = []
    if per_node > 1:
        share, bandwidth = (per_node - 1) / size**2, link.bandwidth * link.direct_efficiency
        legs.append(Leg(share=share, bandwidth=bandwidth, efficiency=link.efficiency))
    if group.nodes > 1:
        leaving = per_node * (size - per_node) / size**2
        leg = _network_leg(leaving, group, cluster)
        fraction = cluster.inter_link.direct_efficiency
        legs.append(dataclasses.replace(leg, bandwidth=leg.bandwidth * fraction))
    if pools := _pools(group, cluster):
        legs += _pool_legs((pools - 1) / pools**2, group, cluster)
    # Posts are not round trips: they follow each other at the pace of the link inside the node.
    between = int(group.nodes > 1)
    hops_s = _hops_s(cluster, inside=size - 1, between=between, over=min(1, pools))
    return Route(launch_s=_launch_s(cluster), latency_s=hops_s, legs=legs)


def _node_leg(share: float, ranks: int, link: Link) -> Leg:
    """`share` of the tensor sent by each of `ranks` ranks of a node to another of them."""
    bandwidth = link.bandwidth * link.group_efficiency(float(ranks))
    return Leg(share=share, bandwidth=bandwidth, efficiency=link.efficiency)


def _network_leg(share: float, group: Group, cluster: Cluster) -> Leg:
    """`share` of the tensor sent by the group's ranks of a node together to other nodes."""
    link, ranks = cluster.inter_link, group.per_node
    bandwidth = link.bandwidth / group.concurrent / ranks
    if link.per_rank_bandwidth is not None:
        bandwidth = min(bandwidth, link.per_rank_bandwidth)
    return Leg(share=share / ranks, bandwidth=bandwidth, efficiency=link.efficiency)


def _pools(group: Group, cluster: Cluster) -> int:
    """Pools that a group reaches over; 0 where it lies in one."""
    return min(cluster.num_pools, group.nodes) if group.over_pools else 0


def _pool_link(cluster: Cluster) -> Link:
    assert cluster.pool_link is not None
    return cluster.pool_link


def _pool_legs(share: float, group: Group, cluster: Cluster) -> list[Leg]:
    """`share` of the tensor that a group sends from one pool to another; none where it lies in
    one."""
    if not group.over_pools:
        return []
    link = _pool_link(cluster)
    bandwidth = link.bandwidth / group.over_pools
    if link.per_rank_bandwidth is not None:
        bandwidth = min(bandwidth, link.per_rank_bandwidth)
    return [Leg(share=share, bandwidth=bandwidth, efficiency=link.efficiency)]


def _hops_s(cluster: Cluster, *, inside: int, between: int, over: int = 0) -> float:
    """Latency of so many messages inside nodes and between them, `over` of these between pools."""
    hops_s = inside * cluster.intra_link.latency_s + between * cluster.inter_link.latency_s
    if over:
        hops_s += over * (_pool_link(cluster).latency_s - cluster.inter_link.latency_s)
    return hops_s


def _tree_share(nodes: int) -> float:
    return 1.0 if nodes == 2 else 2.0


def _tree_depth(nodes: int) -> int:
    return (nodes - 1).bit_length()


# --- tokens to experts ----------------------------------------------------------------------------

# Seconds to bring tokens to their experts, or back, over the ranks that share the experts out.
#
# A rank has T copies of tokens, k of each token, evenly spread over the experts of n ranks on N
# nodes, p = n / N on each. As an all-to-all, every copy travels by itself. Libraries made for it
# send a token once to every node that wants it, which spreads it there; of N - 1 other nodes
#
#     (N-1) · (1 - (1 - 1/N)^k)
#
# want a token, which goes inside its node once to each rank with experts for it: of k copies
#
#     n · (1 - (1 - 1/n)^k)
#
# travel, (p-1)/p of them to others of the node. Both legs run at once.


def reached_part(places: int, copies: int) -> float:
    """The part of `places` that at least one of a token's `copies` goes to, in the mean."""
    return 1.0 - (1.0 - 1.0 / places) ** copies


def exchanged_bytes(nbytes: float, copies: int, group: Group, *, once_per_node: bool) -> float:
    """Bytes that a rank gives to links to exchange `nbytes` of copies, `copies` of each token."""
    if not once_per_node:
        return bytes_sent("all_to_all", nbytes * group.size, group.size)
    inside, between = _parts_sent(copies, group)
    near = bytes_sent("all_to_all", inside, group.per_node)
    return nbytes * (near + bytes_sent("all_to_all", between, group.nodes))


def _parts_sent(copies: int, group: Group) -> tuple[float, float]:
    """The all-to-alls in full inside a node, and between nodes, that exchange one byte of copies:
    one of M in full sends M/n² to each rank."""
    travelling = group.size * reached_part(group.size, copies) / copies
    return group.per_node * travelling, group.nodes**2 * reached_part(group.nodes, copies) / copies


def exchange_seconds(
    nbytes: float,
    copies: int,
    group: Group,
    cluster: Cluster,
    *,
    once_per_node: bool,
    tokens: float = 0.0,
    message_s: float = 0.0,
) -> float:
    """Seconds to exchange a rank's `nbytes` of copies, `copies` of each of its `tokens`; a token
    sent to another node takes `message_s` at least."""
    if not once_per_node:
        return collective_time("all_to_all", nbytes * group.size, group, cluster)
    nodes, per_node = group.nodes, group.per_node
    near, far = _parts_sent(copies, group)
    inside = Group(size=per_node, per_node=per_node)
    inside_s = collective_time("all_to_all", near * nbytes, inside, cluster)
    if nodes == 1:
        return inside_s
    between = Group(
        size=nodes,
        per_node=1,
        concurrent=per_node * group.concurrent,
        over_pools=per_node * group.over_pools,
    )
    return max(
        collective_time("all_to_all", far * nbytes, between, cluster),
        inside_s,
        tokens * (nodes - 1) * reached_part(nodes, copies) * message_s,
    )
