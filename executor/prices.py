"""Seconds of what ran: of an operator as it passed torch's dispatcher, of a collective or message.

The curves are those that plans are priced with (`costmodel/kernels`); what they are asked is not:
the shapes of operators that ran, forward and backward, and of what was sent, not those of the graph
that a plan shards.

    product     by its extents (m × k)·(k × n), any number of them; of a convolution, its FLOPs
    attention   FLOPs and the number of keys
    others      bytes of what they read and write, each tensor once

Work of the host is counted beside: a part of an operator's for a view, which has no kernel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright.costmodel import kernels
from meshwright.costmodel.intervals import slowest_of
from meshwright.profiles.cluster import Cluster

VIEW_HOST_SHARE = 0.5  # of an operator that launches a kernel
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_LOOKUPS = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}  # read as they make
_SPREAD = {"nll_loss_backward", "copy_", "fill_", "zero_"}  # don't read the tensor of their result
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "detach", "alias", "lift_fresh", "record_stream",
}  # fmt: skip
# place of the left operand
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addmm_": 1, "_scaled_mm": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices on one cluster, of software whose host takes `host_scale` of plain eager torch's
    seconds."""

    cluster: Cluster
    host_scale: float = 1.0

    def operator(
        self, func: Any, args: Sequence[Any], result: Any, flops: int
    ) -> tuple[float, float]:
        """Seconds of the device, and of the host that issues it; `flops` of products and
        attention, else 0."""
        device, name = self.cluster.device, func.overloadpacket.__name__
        host_s = device.host_overhead_s * self.host_scale
        results = _tensors(result)
        if func.is_view or name in _NO_KERNEL or not (results or func._schema.is_mutable):
            return 0.0, VIEW_HOST_SHARE * host_s
        taken = {id(x): x for x in _tensors(args)}
        written = {id(x): x for x in results}
        if func._schema.is_mutable:
            written |= {id(x): x for x in _tensors(args[:1])}
        read = sum(_nbytes(x) for x in taken.values())
        out = sum(_nbytes(x) for x in written.values())
        if name in _LOOKUPS:
            read = out
        elif name in _SPREAD:
            read -= _nbytes(_tensors(args)["backward" in name])
        busy_s = self._busy_s(name, args, results, flops, float(read + out))
        if device.kind == "cpu":
            host_s = 0.0  # issued by the core that computes
        return slowest_of(self.cluster.num_nodes) * (busy_s + device.launch_overhead_s), host_s

    def _busy_s(
        self,
        name: str,
        args: Sequence[Any],
        results: Sequence[torch.Tensor],
        flops: int,
        moved: float,
    ) -> float:
        device = self.cluster.device
        if not flops:
            return kernels.stream_seconds(device, moved)
        dtype = "fp8" if name == "_scaled_mm" else _DTYPES.get(results[0].dtype, "fp32")
        if "attention" in name:
            keys = args[2 if "backward" in name else 1].shape[-2]
            return kernels.attention_seconds(device, dtype, flops, keys, moved)
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name] :][:2]
            m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
            return kernels.matmul_seconds(device, dtype, m, n, k, math.prod(left.shape[:-2]), moved)
        rate = device.flops(dtype) * device.matmul_efficiency(flops)
        return max(flops / rate, kernels.stream_seconds(device, moved))

    def issued_s(self, device_s: float, host_s: float) -> float:
        """Seconds of operators on a device and the host that issues them, at the same time."""
        if self.cluster.device.kind == "cpu":
            return device_s + host_s
        return math.sqrt(math.hypot(device_s**2, host_s**2))

    def collective_s(self, operation: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Seconds of one of torch's collectives of these ranks, all there."""
        kind, total_bytes = collective_of(operation, nbytes, len(ranks))
        return float(
            kernels.collective_time(kind, total_bytes, _group(self.cluster, ranks), self.cluster)
        )

    def message_s(self, nbytes: int, source: int, target: int) -> float:
        """Seconds of a message between two ranks, while all of a node send as much to others."""
        node = self.cluster.devices_per_node
        crosses = source // node != target // node
        concurrent, pool = node if crosses else 1, self.cluster.pool_devices
        return float(
            kernels.p2p_time(
                nbytes,
                self.cluster,
                crosses_node=crosses,
                concurrent=concurrent,
                over_pools=pool if source // pool != target // pool else 0,
            )
        )


@cache
def _group(cluster: Cluster, ranks: tuple[int, ...]) -> kernels.Group:
    """A group on its nodes, whose other devices are in groups like it."""
    node = cluster.devices_per_node
    places = [rank // node for rank in ranks]
    per_node = min(places.count(place) for place in set(places))
    spans = len(set(places)) > 1
    concurrent = max(1, node // per_node) if spans else 1
    pools = Counter(rank // cluster.pool_devices for rank in ranks)
    over = max(1, cluster.pool_devices // min(pools.values())) if len(pools) > 1 else 0
    return kernels.Group(size=len(ranks), per_node=per_node, concurrent=concurrent, over_pools=over)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in arguments; of a DTensor what lies on this rank."""
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def _nbytes(x: torch.Tensor) -> int:
    """Bytes of a tensor that lie apart: an expanded one has those of what it expands."""
    shown = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in shown if stride) * x.dtype.itemsize


# --- names of collectives -------------------------------------------------------------------------

# torch's collectives by the names that prices have for them.


COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
}
PARTS = ("_allgather_base_", "alltoall_base_")  # of which a rank's own bytes are known


def collective_of(operation: str, nbytes: int, size: int) -> tuple[str, float]:
    """The kind of one of torch's operations among `size` ranks, and the bytes of its tensor in
    full: what all of them hold together, or send in an all-to-all. Raises KeyError for an operation
    that has no price."""
    return COLLECTIVES[operation], float(nbytes * (size if operation in PARTS else 1))
