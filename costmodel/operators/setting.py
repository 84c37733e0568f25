"""The planning problem; the setting of a stage in it. A price is remembered by the parts of a
setting that it depends on (`Setting.of_pass`, `Setting.of_step`), and reads no others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.kernels import Group, OpProfile, bytes_sent, collective_time, group_for
from meshwright.costmodel.memory import Optimizer, fused, optimizer_named
from meshwright.costmodel.mesh import NOT_AWAY, Batch, HostParts, Mesh, Parts, Stepping
from meshwright.costmodel.operators.cost import Axis, Entry
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.sharding import FactorTable, Meeting
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.steps import DATA_AXIS, TENSOR_AXIS, linked


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model to plan: the inputs that all its prices and plans have in common.

    `graph` is the traced model cut into blocks, `factors` the factors of its tensors' dims;
    `precision` a name of `costmodel/precisions.py`; `optimizer` a name of `memory/optimizers.py`;
    `target` the software that is priced, `profile` measurements on this kind of device, if any.
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
    def stepped(self) -> Optimizer:
        """Optimizer whose step is counted: frameworks beside ours run fused ones."""
        name = fused(self.optimizer) if self.target.fused_optimizer else self.optimizer
        return optimizer_named(name, PRECISIONS[self.precision].kept_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights that are computed with."""
        return PRECISIONS[self.precision].weight_bytes

    @property
    def products(self) -> str:
        """Precision of products."""
        return "tf32" if self.tf32 else self.precision


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A stage's mesh in a problem, its batch, sharing of its states, parts in host memory, and how
    its optimizer steps."""

    problem: Problem
    mesh: Mesh
    batch: Batch
    sharing: Sharing = UNSHARED
    host: HostParts = NOT_AWAY
    stepping: Stepping = "at_end"

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster

    @property
    def precision(self) -> str:
        return self.problem.precision

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights that are computed with."""
        return self.problem.weight_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of an element of the weights that the optimizer steps, and of gradients as
        `train_step` adds them up."""
        return self.optimizer.kept_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of gradients as the target accumulates and reduces them."""
        return min(self.target.gradient_bytes, self.kept_bytes)

    @property
    def optimizer(self) -> Optimizer:
        return self.problem.stepped

    @property
    def target(self) -> Target:
        return self.problem.target

    @property
    def profile(self) -> OpProfile | None:
        return self.problem.profile

    @property
    def validated(self) -> bool:
        """Whether steps are validated afterwards, and keep what they may have to undo."""
        return self.stepping == "validated"

    @property
    def late(self) -> bool:
        """Whether gradients are of an earlier step, so that weights come in versions."""
        return self.stepping == "stale"

    @property
    def in_backward(self) -> bool:
        """Whether each parameter is stepped as its gradient is whole."""
        return self.stepping == "in_backward"

    @property
    def parts(self) -> Parts:
        """The setting without its problem."""
        return Parts(self.mesh, self.batch, self.sharing, self.host, self.stepping)

    @cached_property
    def of_pass(self) -> Setting:
        """Setting of a pass: its rows, not the ranks that have others."""
        batch = Batch(rows=self.batch.rows, slices=self.batch.slices)
        return Setting(problem=self.problem, mesh=self.mesh.alone, batch=batch)

    @cached_property
    def of_step(self) -> Setting:
        """Setting of a block's costs in a step, in any ZeRO stage and with nothing off the device:
        of micro-batches whether there are several, of a secondary shard who would have one."""
        any_stage = replace(self, sharing=self.sharing.of_any_stage)
        plain = replace(any_stage, sharing=replace(any_stage.sharing, hpz=None))
        return replace(
            plain if plain.secondary == self.secondary and not self.hops else any_stage,
            batch=replace(self.batch, microbatches=min(self.batch.microbatches, 2)),
            host=NOT_AWAY,
            stepping=self.stepping if self.in_backward else "at_end",
        )

    @cached_property
    def of_parameters(self) -> Setting:
        """Setting of a parameter's costs in a step."""
        step = self.of_step
        return replace(step, mesh=step.mesh.of_kind(None), batch=replace(step.batch, rows=0.0))

    def group(self, *, size: int, stride: int) -> Group:
        """The costliest group of `size` ranks that lie `stride` apart in the mesh's own order."""
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
            over_pools=-(-rows.over_pools // near),
        )

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides."""
        return self.sharing.among(self.mesh.holders)

    @property
    def secondary(self) -> int:
        """Ranks that divide a secondary shard, or would: a node's; `shards` where these don't."""
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
        return self.weight_bytes / self.sharing.hpz if self.sharing.hpz else 0.0

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
        measured = profile if not group.over_pools else None  # within one pool
        timing = measured.collective(kind, nbytes, group.size, group.per_node) if measured else None
        if timing:
            seconds, source = timing
        else:
            seconds = collective_time(kind, nbytes, group, self.cluster)
        corrected = linked(TENSOR_AXIS if axis == "tensor" else DATA_AXIS, crosses=crosses)
        return Entry(
            column,
            "collective",
            calls * seconds * self.correction(corrected),
            axis=axis,
            collective=kind,
            calls=calls,
            sent_bytes=calls * bytes_sent(kind, nbytes, group.size),
            crosses=crosses,
            source=source,
        )

    def correction(self, component: str) -> float:
        """Factor on the seconds of a component, from the steps that ran."""
        return self.profile.correction(component) if self.profile else 1.0
