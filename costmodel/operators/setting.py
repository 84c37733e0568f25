"""The planning problem; where and how a stage runs, in parts that prices are known by: a price is
asked for with the parts that it depends on, and with no others (`Setting.of_pass`,
`Setting.of_step`), so that what is remembered under them can depend on nothing else.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.kernels import Group, OpProfile, bytes_sent, collective_time, group_for
from meshwright.costmodel.memory import fused
from meshwright.costmodel.operators.cost import Axis, Entry
from meshwright.costmodel.sharding import ALL_GATHER, ContextKind, FactorTable, Meeting
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.steps import DATA_AXIS, TENSOR_AXIS, linked

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp8_rowwise": 2}  # of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What all prices and plans of one model have in common, passed as one value.

    `graph` is the traced model cut into blocks, `factors` the factors of its tensors' dims;
    `precision` one of "fp32", "bf16", "fp16"; `optimizer` a name of `memory/optimizers.py`;
    `target` the software that is priced, `profile` what was measured on this kind of device, if
    anything.
    `meetings` are operators in which rows of a batch meet, where that keeps it in one micro-batch.
    `allow` names what may change a training's numbers; with `tf32` the cluster's devices compute
    fp32 products in it (`Device.in_tf32`).
    """

    graph: Graph
    factors: FactorTable
    cluster: Cluster
    precision: str
    optimizer: str = "adamw"
    target: Target = EAGER
    profile: OpProfile | None = None
    meetings: tuple[Meeting, ...] = ()
    allow: tuple[str, ...] = ()
    tf32: bool = False

    @property
    def stepped(self) -> str:
        """The optimizer whose step is counted: frameworks beside ours run fused ones."""
        return fused(self.optimizer) if self.target.fused_optimizer else self.optimizer

    @property
    def products(self) -> str:
        """What products are computed in."""
        return "tf32" if self.tf32 else self.precision


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mesh:
    """Devices of one stage: (dp, cp, tp) with tp innermost. cp splits the sequence of every
    activation, with attention of the kind `cp_kind`; None where that is open (the cheapest one), or
    cp is 1. `ep` ranks of that mesh, neighbours, share out the experts, which are whole or
    replicated on the other axes. Neighbours on the data axis are tp·`spread` ranks apart: 1 where
    the mesh is contiguous, more where so many stages lie between them."""

    dp: int
    tp: int
    cp: int = 1
    ep: int = 1
    spread: int = 1
    cp_kind: ContextKind | None = None

    @property
    def kind(self) -> ContextKind:
        """That of attention: all ranks gather its keys and values where nothing is said."""
        return self.cp_kind or ALL_GATHER

    @property
    def is_open(self) -> bool:
        """Whether it splits tokens, and leaves the kind of attention open."""
        return self.cp > 1 and self.cp_kind is None

    def of_kind(self, kind: ContextKind) -> Mesh:
        """The mesh with this kind of attention, where it splits tokens."""
        return replace(self, cp_kind=kind) if self.cp > 1 else self

    @property
    def devices(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def alone(self) -> Mesh:
        """Without ranks that have other rows alone: the smallest data axis over which the experts
        can be shared out, spread where axes that communicate within a pass lie across it."""
        spread = self.spread if self.cp * self.ep > 1 else 1
        return replace(self, dp=self.ep // math.gcd(self.ep, self.cp), spread=spread)

    @property
    def holders(self) -> int:
        """Ranks that hold the same parts of weights: those of the data and the context axis."""
        return self.dp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`rows` of the batch on a device in each of so many `microbatches`."""

    rows: float
    microbatches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """What lies in host memory: the part of the optimizer `states`, that of the `weights`, but
    while their block runs (0 with ZeRO-3), of the blocks those that send the `activations` there
    that they save; and the part of the states that lies in `files` on the node's flash, no more
    than `states`."""

    states: float = 0.0
    weights: float = 0.0
    activations: float = 0.0
    files: float = 0.0

    def __bool__(self) -> bool:
        return self != NOT_AWAY

    @property
    def kinds(self) -> frozenset[str]:
        """What of it lies there."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name))

    def exceeds(self, other: HostParts) -> bool:
        """Whether no less of anything is away than of another."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(own >= less for own, less in pairs)


NOT_AWAY = HostParts()


class Parts(NamedTuple):
    """What of a `Setting` is the stage's own."""

    mesh: Mesh
    batch: Batch
    sharing: Sharing
    host: HostParts
    validated: bool


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A stage's mesh in a problem, its batch, how its states are shared out and what lies in host
    memory. Steps that are `validated` afterwards keep what they may have to undo."""

    problem: Problem
    mesh: Mesh
    batch: Batch
    sharing: Sharing = UNSHARED
    host: HostParts = NOT_AWAY
    validated: bool = False

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster

    @property
    def precision(self) -> str:
        return self.problem.precision

    @property
    def optimizer(self) -> str:
        return self.problem.stepped

    @property
    def target(self) -> Target:
        return self.problem.target

    @property
    def profile(self) -> OpProfile | None:
        return self.problem.profile

    @property
    def parts(self) -> Parts:
        """All but the problem."""
        return Parts(self.mesh, self.batch, self.sharing, self.host, self.validated)

    @cached_property
    def of_pass(self) -> Setting:
        """With what a pass depends on, batches that meet on the data axis left aside: with the
        rows, not with the ranks that have others."""
        batch = Batch(rows=self.batch.rows)
        return Setting(problem=self.problem, mesh=self.mesh.alone, batch=batch)

    @cached_property
    def of_step(self) -> Setting:
        """With what a block costs in a step, in whichever ZeRO stage, its parts off the device left
        aside: of micro-batches whether there are several, of a secondary shard who would have
        one."""
        own = replace(self, sharing=self.sharing.of_any_stage)
        plain = replace(own, sharing=replace(own.sharing, hpz=None))
        return replace(
            plain if plain.secondary == self.secondary and not self.hops else own,
            batch=replace(self.batch, microbatches=min(self.batch.microbatches, 2)),
            host=NOT_AWAY,
            validated=False,
        )

    @cached_property
    def of_parameters(self) -> Setting:
        """With what a parameter costs in a step."""
        own = self.of_step
        mesh, batch = replace(own.mesh, cp_kind=None), replace(own.batch, rows=0.0)
        return replace(own, mesh=mesh, batch=batch)

    def group(self, *, size: int, stride: int) -> Group:
        """The costliest of the groups of `size` ranks that lie `stride` apart in the mesh's own
        order."""
        tp, spread = self.mesh.tp, self.mesh.spread
        if spread == 1 or size * stride <= tp:
            return group_for(self.cluster, size=size, stride=stride)
        if stride % tp == 0:
            return group_for(self.cluster, size=size, stride=stride * spread)
        # several ranks of each tensor group: they are neighbours, wherever the next ones lie
        near = tp // stride
        rows = group_for(self.cluster, size=-(-size // near), stride=tp * spread)
        return Group(
            size=size,
            per_node=min(size, near * rows.per_node),
            concurrent=max(1, rows.concurrent // near),
        )

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides."""
        return self.sharing.among(self.mesh.holders)

    @property
    def secondary(self) -> int:
        """Ranks that a secondary shard is divided among, or would be: those of a node. `shards`
        where that is no part of them."""
        if self.sharing.hpz:
            return self.sharing.hpz
        node = self.cluster.devices_per_node // (self.mesh.tp * self.mesh.spread)
        parts = 1 < node < self.shards and self.shards % node == 0 and self.mesh.ep == 1
        return node if parts else self.shards

    @property
    def keeps_secondary(self) -> bool:
        """Whether a backward gathers weights from secondary shards."""
        return bool(self.sharing.hpz)

    @property
    def secondary_bytes(self) -> float:
        """Bytes of secondary shards for each parameter, in the precision that is gathered."""
        return DTYPE_BYTES[self.precision] / self.sharing.hpz if self.sharing.hpz else 0.0

    @property
    def hops(self) -> int:
        """Ranks among which quantised gradients are summed first; 0 where they go in one hop."""
        return (self.sharing.hpz or 0) if self.sharing.quantizes_gradients else 0

    @property
    def communicators(self) -> int:
        """Communicators of one rank: the world's, those of its axes, of ZeRO's part of them and of
        a secondary shard, and one to each pipeline neighbour."""
        mesh, sharing = self.mesh, self.sharing
        parts = sharing.divides and self.shards < mesh.holders
        neighbours = min(2, self.cluster.num_devices // mesh.devices - 1)
        axes = (mesh.holders > 1) + (mesh.tp > 1) + 2 * (mesh.ep > 1)
        return 1 + axes + 2 * parts + 2 * self.keeps_secondary + neighbours

    def collective(
        self,
        column: str,
        kind: str,
        nbytes: float,
        group: Group,
        axis: Axis = "data",
        calls: float = 1.0,
    ) -> Entry:
        """A collective over a tensor of `nbytes` in full: measured, else modelled, and corrected by
        the steps that ran with collectives of its component: the tensor axis' or others."""
        crosses = group.per_node < group.size
        profile, source = self.profile, "modelled"
        found = profile.collective(kind, nbytes, group.size, group.per_node) if profile else None
        if found:
            seconds, source = found
        else:
            seconds = collective_time(kind, nbytes, group, self.cluster)
        corrected = linked(TENSOR_AXIS if axis == "tensor" else DATA_AXIS, crosses=crosses)
        return Entry(
            column=column,
            kind="collective",
            seconds=calls * seconds * self.correction(corrected),
            axis=axis,
            collective=kind,
            calls=calls,
            sent_bytes=calls * bytes_sent(kind, nbytes, group.size),
            crosses=crosses,
            source=source,
        )

    def correction(self, component: str) -> float:
        """What the seconds of a component are multiplied by, by the steps that ran."""
        return self.profile.correction(component) if self.profile else 1.0
