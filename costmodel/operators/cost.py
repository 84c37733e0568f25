"""Setting (mesh, rows, precision, target) and cost (seconds by kind) of a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from operator import attrgetter

from meshwright.costmodel.kernels import Group, OpProfile, collective_time, group_for
from meshwright.costmodel.quantized import quantizes_gradients
from meshwright.costmodel.sharding import ALL_GATHER, ContextKind
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.steps import DATA_AXIS, linked

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp8_rowwise": 2}  # of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Mesh, rows and precision in which a block runs: `rows` batch rows per device and micro-batch,
    on a (dp, cp, tp) mesh, tp innermost; cp splits the sequence of every activation, with attention
    of the kind `cp_kind`. `ep` ranks of that mesh, neighbours, share out the experts, which are
    whole or replicated on the other axes.

    ZeRO divides among `dp_shard` neighbours on the data axis and replicates across the others; 0
    for all dp·cp. Neighbours on the data axis are tp·`spread` ranks apart: 1 where the mesh is
    contiguous, more where other stages lie between them. Under ZeRO-3 `hpz` neighbours keep a
    secondary shard of the weights from the forward to the backward, which gathers from it; 0 for
    none. `quantized` says what ZeRO-3 sends in blocks (`costmodel/quantized.py`). `host_states` is
    the part of the optimizer states that lies in host memory, `host_weights` that of the weights,
    but while their block runs (0 with ZeRO-3), `host_activations` of the blocks those that send
    what they save there; `host_files` is the part of the states that lies in files on the node's
    flash, no more than `host_states`. Steps that are `validated` afterwards keep what they may have
    to undo.
    """

    cluster: Cluster
    dp: int
    tp: int
    rows: float
    num_microbatches: int
    precision: str
    optimizer: str
    zero: int = 0
    cp: int = 1
    cp_kind: ContextKind = ALL_GATHER
    ep: int = 1
    dp_shard: int = 0
    hpz: int = 0
    quantized: str = "none"
    spread: int = 1
    target: Target = EAGER
    profile: OpProfile | None = None
    host_states: float = 0.0
    host_activations: float = 0.0
    validated: bool = False
    host_weights: float = 0.0
    host_files: float = 0.0

    def group(self, *, size: int, stride: int) -> Group:
        """The costliest of the groups of `size` ranks that lie `stride` apart in the mesh's own
        order."""
        if self.spread == 1 or size * stride <= self.tp:
            return group_for(self.cluster, size=size, stride=stride)
        if stride % self.tp == 0:
            return group_for(self.cluster, size=size, stride=stride * self.spread)
        # several ranks of each tensor group: they are neighbours, wherever the next ones lie
        near = self.tp // stride
        rows = group_for(self.cluster, size=-(-size // near), stride=self.tp * self.spread)
        return Group(
            size=size,
            per_node=min(size, near * rows.per_node),
            concurrent=max(1, rows.concurrent // near),
        )

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides."""
        return self.dp_shard or self.dp * self.cp

    @property
    def secondary(self) -> int:
        """Ranks that a secondary shard is divided among, or would be: those of a node. `shards`
        where that is no part of them."""
        if self.hpz:
            return self.hpz
        node = self.cluster.devices_per_node // (self.tp * self.spread)
        parts = 1 < node < self.shards and self.shards % node == 0 and self.ep == 1
        return node if parts else self.shards

    @property
    def hops(self) -> int:
        """Ranks among which quantised gradients are summed first; 0 where they go in one hop."""
        return self.hpz if quantizes_gradients(self.quantized) else 0

    @property
    def communicators(self) -> int:
        """Communicators of one rank: the world's, those of its axes, of ZeRO's part of them and of
        a secondary shard, and one to each pipeline neighbour."""
        data = self.dp * self.cp
        parts = bool(self.zero) and 0 < self.dp_shard < data
        neighbours = min(2, self.cluster.num_devices // (data * self.tp) - 1)
        axes = (data > 1) + 2 * parts + 2 * (self.hpz > 0) + (self.tp > 1) + 2 * (self.ep > 1)
        return 1 + axes + neighbours

    def collective_s(self, kind: str, nbytes: float, group: Group, axis: str = DATA_AXIS) -> float:
        """Seconds of a collective over a tensor of `nbytes` in full: measured, else modelled, and
        corrected by the steps that ran with collectives of this axis."""
        component = linked(axis, crosses=group.per_node < group.size)
        if self.profile and (
            found := self.profile.collective(kind, nbytes, group.size, group.per_node)
        ):
            return found[0] * self.correction(component)
        seconds = float(collective_time(kind, nbytes, group, self.cluster))
        return seconds * self.correction(component)

    def correction(self, component: str) -> float:
        """What the seconds of a component are multiplied by, by the steps that ran."""
        return self.profile.correction(component) if self.profile else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one block or stage on one rank.

    Per micro-batch on the device, forward and backward: `*_comm_s` is the part of each that is
    communication, `*_exchange_s` the part of that which moves tokens between experts; `weight_s`
    the part of the backward that is gradients of weights, `*_host_s` the host's seconds to issue
    them; `measured_s` and `interpolated_s` are the seconds of both that rest on measurement. Once
    per step: `reduce_s` (all-reduce of gradients), `scatter_s` and `gather_s` (reduce-scatter of
    gradients and all-gather of weights, for ZeRO-1 and 2), `replicate_s` (all-reduce of the
    scattered gradients among the replicas of a shard), `zero3_*_s` (each of these three by ZeRO-3,
    and its all-gather of weights from secondary shards), `optimizer_s`, of which `shard_s` is left
    where ZeRO divides it among the ranks that hold the same parameters.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    forward_exchange_s: float = 0.0
    backward_exchange_s: float = 0.0
    weight_s: float = 0.0
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    measured_s: float = 0.0
    interpolated_s: float = 0.0
    reduce_s: float = 0.0
    scatter_s: float = 0.0
    gather_s: float = 0.0
    replicate_s: float = 0.0
    zero3_scatter_s: float = 0.0
    zero3_gather_s: float = 0.0
    zero3_secondary_s: float = 0.0
    zero3_replicate_s: float = 0.0
    optimizer_s: float = 0.0
    shard_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return total((self, other))

    def seconds(self, num_microbatches: float) -> float:
        """Device seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


COST_FIELDS = tuple(each.name for each in dataclass_fields(Cost))
NOTHING = Cost()
_values = attrgetter(*COST_FIELDS)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of any number of costs."""
    columns = zip(*(_values(cost) for cost in costs if cost is not NOTHING), strict=True)
    return Cost(**dict(zip(COST_FIELDS, map(sum, columns), strict=False)))
