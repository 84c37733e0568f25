"""Seconds to bring tokens to their experts, or back, over the ranks that share the experts out.

A rank has T copies of tokens, k of each token, evenly spread over the experts of n ranks on N
nodes, p = n / N on each. As an all-to-all, every copy travels by itself. Libraries made for it send
a token once to every node that wants it, which spreads it there; of N - 1 other nodes

    (N-1) · (1 - (1 - 1/N)^k)

want a token, which goes inside its node once to each rank with experts for it: of k copies

    n · (1 - (1 - 1/n)^k)

travel, (p-1)/p of them to others of the node. Both legs run at once.
"""

from __future__ import annotations

from meshwright.costmodel.kernels.collectives import Group, bytes_sent, collective_time
from meshwright.profiles.cluster import Cluster


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
    between = Group(size=nodes, per_node=1, concurrent=per_node * group.concurrent)
    return max(
        collective_time("all_to_all", far * nbytes, between, cluster),
        inside_s,
        tokens * (nodes - 1) * reached_part(nodes, copies) * message_s,
    )
