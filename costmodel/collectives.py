"""Seconds and bytes of a collective: alpha-beta costs of the algorithms that NCCL and gloo run.

M is the full tensor's bytes, n the ranks, alpha a link's latency, beta the bandwidth of the
narrowest place on the ring. Every rank sends (`bytes_sent`)

    all_reduce               2 M (n-1)/n
    all_gather               M (n-1)/n
    reduce_scatter           M (n-1)/n
    all_to_all               M (n-1)/n^2      of its M/n shard
    broadcast                M                pipelined along the ring

A ring costs `bytes_sent / beta + rounds * hops`, where `hops` is the way of one chunk around it:
`nodes - 1` steps over the network and `n - nodes` inside nodes, and an all-reduce goes round twice.
Under NCCL an all-reduce may go up and down a tree instead: fewer steps, `2 M` bytes; the cheaper of
the two is charged.

A ring visits each node once, but NCCL lays one ring per NIC, so that a group whose node holds
`per_node` of its ranks uses its whole share of the node: all NICs divided by the groups that use
them at the same time, and no more than its own ranks can drive. No ring is faster than the link
inside the node.

An all-to-all is direct: each rank posts n-1 messages of M/n^2. Those to its own node and those to
other nodes travel at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from profiles.cluster import Cluster

FloatOrArray = TypeVar("FloatOrArray", float, NDArray[np.float64])

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`size` ranks, `per_node` of them on a node; `concurrent` such groups share a node's NICs."""

    size: int
    per_node: int
    concurrent: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.per_node <= self.size:
            raise ValueError(
                f"group of size {self.size}: per_node is {self.per_node}; legal: 1 to {self.size}"
            )
        if self.concurrent < 1:
            raise ValueError(f"group: concurrent is {self.concurrent}; legal: 1 or more")

    @property
    def nodes(self) -> int:
        """Nodes the group touches."""
        return math.ceil(self.size / self.per_node)


def group_for(cluster: Cluster, *, size: int, stride: int) -> Group:
    """The costliest of the groups {r, r + stride, ..., r + (size-1) stride} that tile the cluster.

    Where nodes cut the groups unequally (6 devices per node, groups of 4), that is the one with the
    fewest ranks on a node. Raises ValueError if not even one group fits the cluster.
    """
    if size < 1 or stride < 1 or size * stride > cluster.num_devices:
        raise ValueError(
            f"group of size {size}, stride {stride} needs {size * stride} ranks; legal on "
            f"{cluster.name!r}: size and stride from 1, size * stride up to {cluster.num_devices}"
        )
    return _worst_group(cluster.num_devices, cluster.devices_per_node, size, stride)


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


def bytes_sent(kind: str, nbytes: FloatOrArray, size: int) -> FloatOrArray:
    """Bytes each of `size` ranks sends in a collective over a tensor of `nbytes` in full."""
    if kind not in COLLECTIVES:
        raise ValueError(f"unknown collective {kind!r}; legal: {', '.join(COLLECTIVES)}")
    if size == 1:
        return nbytes * 0.0
    share = (size - 1) / size
    factor = {"all_reduce": 2 * share, "all_to_all": share / size, "broadcast": 1.0}
    return nbytes * factor.get(kind, share)


def collective_time(
    kind: str, nbytes: FloatOrArray, group: Group, cluster: Cluster
) -> FloatOrArray:
    """Seconds of a collective of `group` over a tensor of `nbytes` in full; scalar or array.

    One rank costs nothing; otherwise the latency is paid for zero bytes, too.
    """
    sent = bytes_sent(kind, nbytes, group.size)
    if group.size == 1:
        return sent
    if kind == "all_to_all":
        return _all_to_all_time(nbytes, group, cluster)
    bandwidth = ring_bandwidth(group, cluster)
    intra_s, inter_s = cluster.intra_link.latency_s, cluster.inter_link.latency_s
    hops_s = (group.size - group.nodes) * intra_s + (group.nodes - 1) * inter_s
    if kind != "all_reduce":
        return sent / bandwidth + hops_s
    ring_s = sent / bandwidth + 2 * hops_s
    if cluster.backend != "nccl":
        return ring_s
    depth_s = _tree_depth(group.per_node) * intra_s + _tree_depth(group.nodes) * inter_s
    best_s: FloatOrArray = np.minimum(ring_s, 2 * nbytes / bandwidth + 2 * depth_s)
    return best_s


def ring_bandwidth(group: Group, cluster: Cluster) -> float:
    """Bytes/s at the narrowest place of the group's rings."""
    if group.nodes == 1:
        return cluster.intra_link.bandwidth
    return min(
        cluster.intra_link.bandwidth, _network_bandwidth(group.per_node, group.concurrent, cluster)
    )


def p2p_time(
    nbytes: FloatOrArray, cluster: Cluster, *, crosses_node: bool, concurrent: int = 1
) -> FloatOrArray:
    """Seconds to send `nbytes` to one rank, while `concurrent` ranks of the node send as much."""
    if not crosses_node:
        return nbytes / cluster.intra_link.bandwidth + cluster.intra_link.latency_s
    bandwidth = min(cluster.intra_link.bandwidth, _network_bandwidth(1, concurrent, cluster))
    return nbytes / bandwidth + cluster.inter_link.latency_s


def _network_bandwidth(ranks: int, concurrent: int, cluster: Cluster) -> float:
    """Bytes/s out of a node for `ranks` ranks, one of `concurrent` such sets sharing the NICs."""
    link = cluster.inter_link
    share = link.bandwidth / concurrent
    if link.per_rank_bandwidth is None:
        return share
    return min(share, ranks * link.per_rank_bandwidth)


def _all_to_all_time(nbytes: FloatOrArray, group: Group, cluster: Cluster) -> FloatOrArray:
    message = nbytes / group.size**2
    posts_s = (group.size - 1) * cluster.intra_link.latency_s
    local_s = message * (group.per_node - 1) / cluster.intra_link.bandwidth
    if group.nodes == 1:
        return local_s + posts_s
    leaving = message * (group.per_node * (group.size - group.per_node))
    remote_s = leaving / _network_bandwidth(group.per_node, group.concurrent, cluster)
    latency_s = posts_s + cluster.inter_link.latency_s
    slower_s: FloatOrArray = np.maximum(local_s, remote_s)
    return slower_s + latency_s


def _tree_depth(count: int) -> int:
    return (count - 1).bit_length()
