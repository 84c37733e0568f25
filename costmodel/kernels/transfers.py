"""Seconds to send activations from one stage to the next, from where their ranks lie.

The ranks of both stages are paired in order (where one has more, several share a partner). A send
crosses nodes if one of the pairs does. Then a node's NICs are shared by as many ranks as a node's
length of the stage that is packed closer holds: all of a node where stages are contiguous, few
where a node holds ranks of several stages. With `scatter_sends` each rank of a tensor group sends
its part of what all of them hold, which the receiving group gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from meshwright.costmodel.kernels.collectives import collective_time, group_for, p2p_time
from meshwright.costmodel.target import Target
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.steps import MESSAGES, linked


def send_seconds(
    nbytes: float,
    source: Sequence[int],
    destination: Sequence[int],
    *,
    tp: int,
    cluster: Cluster,
    target: Target,
    profile: OpProfile | None = None,
) -> float:
    """Seconds to move `nbytes` of each rank of `source` to those of `destination`, whose tensor
    groups hold the same in all `tp` ranks; 0 where both are the same ranks."""
    ends = tuple(source), tuple(destination)
    if not nbytes or ends[0] == ends[1]:
        return 0.0
    node, pool = cluster.devices_per_node, cluster.pool_devices
    crosses = crosses_node(*ends, node)
    leaves = cluster.num_pools > 1 and crosses_node(*ends, pool)
    parts = tp if target.scatter_sends else 1
    if (
        profile
        and not leaves
        and (timing := profile.collective("p2p", nbytes / parts, 2, 1 if crosses else 2))
    ):
        seconds = timing[0]
    else:
        concurrent = max(packed(side, node) for side in ends)
        over = max(packed(side, pool) for side in ends) if leaves else 0
        seconds = p2p_time(
            nbytes / parts, cluster, crosses_node=crosses, concurrent=concurrent, over_pools=over
        )
    gathering = group_for(cluster, size=parts, stride=1)
    seconds += collective_time("all_gather", nbytes, gathering, cluster)
    return seconds * (profile.correction(linked(MESSAGES, crosses=crosses)) if profile else 1.0)


class Hop(NamedTuple):
    """Borders that a message from one device group to another crosses, for some rank."""

    over_nodes: bool
    over_pools: bool


# between each stage and the next; None where both are on one device group
Hops: TypeAlias = tuple[Hop | None, ...]


@lru_cache(maxsize=4096)
def crosses_node(source: Sequence[int], destination: Sequence[int], devices_per_node: int) -> bool:
    """Whether some rank's partner is on another node."""
    few, many = sorted((np.asarray(source), np.asarray(destination)), key=len)
    partners = few[np.arange(len(many)) * len(few) // len(many)]
    return bool((partners // devices_per_node != many // devices_per_node).any())


@lru_cache(maxsize=4096)
def packed(ranks: Sequence[int], devices_per_node: int) -> int:
    """The most of these ranks in any stretch as long as a node."""
    ordered = np.sort(np.asarray(ranks))
    ends = np.searchsorted(ordered, ordered + devices_per_node)
    return int((ends - np.arange(len(ordered))).max())


# --- what was measured ----------------------------------------------------------------------------

# Protocol of a profile: the timings that prices look up before they model.


class OpProfile(Protocol):
    """Measured seconds, where there are any: (forward, backward, label) and (seconds, label); and
    factors of steps that ran over these, or over the model."""

    def op(self, signature_text: str) -> tuple[float, float, str] | None: ...

    def collective(
        self, kind: str, nbytes: float, size: int, per_node: int
    ) -> tuple[float, str] | None: ...

    def host_bandwidth(self, kind: str, ranks: int = 1) -> float | None:
        """Bytes per second of a kind of `profiles.timings.OF_HOST`, None where not timed."""
        return None

    def correction(self, component: str) -> float:
        """Factor on the seconds of a component of `profiles.steps.COMPONENTS`."""
        return 1.0

    def corrected_by(self) -> Sequence[str]:
        """Its corrections in words."""
        return ()
