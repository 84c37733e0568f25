"""The planning problem: a traced model on a cluster, trained by one optimizer in one precision."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.kernels import OpProfile
from meshwright.costmodel.memory import fused
from meshwright.costmodel.sharding import FactorTable, Meeting
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster


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
