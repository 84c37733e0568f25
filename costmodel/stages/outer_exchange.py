"""Meetings of replicas that train apart: bytes sent, seconds, memory (DiLoCo, arXiv 2311.08105).

Each of R replicas has n ranks; rank i of every replica holds the same part of the weights. Among
the ranks of a replica that hold the same, each takes a share: w elements a rank, all weights once
per replica. Of its share a rank keeps, in fp32 in host memory, the weights at the last meeting and
the outer momentum, 8 w bytes. After H steps the R ranks with one share exchange by how much it has
changed, and all compute the same outer step. With e = 4 bytes, each rank sends over a meeting

    32 bits     2 e w (R-1)/R                    a reduce-scatter and an all-gather, added up in
                                                 the order of the replicas
    8 bits      (R-1) w (1 + 4/b)                an all-gather of blocks of b = 256 and a scale

and 1/H of it in a step. In P fragments each w/P meets at steps of its own: as many bytes, P times
the latency, a P-th of them at a time. Beside it the weights go from the device to the host and
back, the outer step moves `STEP_BYTES` an element, and ranks with shares of the same part gather
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.costmodel.kernels import bytes_sent, collective_time, group_for
from meshwright.costmodel.quantized import DEQUANTIZE_BYTES, QUANTIZE_BYTES, wire_bytes
from meshwright.profiles.cluster import Cluster

NUMBER = 4  # bytes of fp32
STATE_BYTES = 2 * NUMBER  # of an element: weights at the last meeting, momentum
# of an element: the change is read off two tensors and written, the mean read, momentum and
# weights read and written, weights written to what trains
STEP_BYTES = 10.0 * NUMBER
# of bits, what is left of an all-reduce's kind
_KINDS = {32: "all_reduce", 8: "all_gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterExchange:
    """A meeting of `replicas` of so many `ranks` each: of all ranks, `share` elements of the mean
    one's, which `holders` of the same part divide, sent in `bits` and `fragments`."""

    replicas: int
    ranks: int
    share: float
    holders: int
    bits: int
    fragments: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends to other replicas over a meeting of all fragments."""
        return self.fragments * bytes_sent(self._kind, self._full_bytes, self.replicas)

    @property
    def _kind(self) -> str:
        return _KINDS[self.bits]

    @property
    def _full_bytes(self) -> float:
        """Bytes of the tensor in full of a fragment's collective."""
        share = self.share / self.fragments
        if self.bits == 8:
            return self.replicas * wire_bytes(share, 8)
        return NUMBER * share

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of a meeting of all fragments, beside nothing, on the cluster of all replicas.
        Hosts exchange, in rings over TCP."""
        hosts = replace(cluster, backend="gloo")
        group = group_for(cluster, size=self.replicas, stride=self.ranks)
        exchange_s = collective_time(self._kind, self._full_bytes, group, hosts)
        near = group_for(cluster, size=self.holders, stride=1)
        part = self.share * self.holders
        near_s = collective_time("all_gather", NUMBER * part / self.fragments, near, cluster)
        return self.fragments * (exchange_s + near_s) + self._moved_s(part, cluster)

    def _moved_s(self, part: float, cluster: Cluster) -> float:
        """Seconds to move the rank's `part` of the weights to the host and back, and of the outer
        step there."""
        codec = QUANTIZE_BYTES[8] + self.replicas * DEQUANTIZE_BYTES[8] if self.bits == 8 else 0.0
        moved = self.share * (STEP_BYTES + codec)
        host, device = cluster.host, cluster.device
        if device.kind == "cpu" or host is None:
            return moved / device.memory_bandwidth
        shared = host.memory_bandwidth / cluster.devices_per_node
        return 2 * NUMBER * part / host.link_bandwidth + moved / shared
