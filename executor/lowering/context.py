"""The context of lowering: a graph with its layouts on the outer axes, and one rank's place on the
mesh.

The outer axes, data and context, split rows and tokens by one pass over the graph; the tensor axis
is as the plan says. Where two axes split one dim, the order of their cuts is: rows, tokens of the
context axis, then what the tensor axis splits; heads that both split, by the tensor axis first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.precisions import SCALED_BY
from meshwright.costmodel.rules import is_narrow
from meshwright.executor.backward import GradientFlow, WeightGradientQueue
from meshwright.executor.context_attention import KeyValueCache
from meshwright.executor.resharding import Axis

# by axis: (data, tensor), or (data, context, tensor) where the sequence is split
State = tuple[sharding.Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Inputs of the lowering of any block of a stage.

    `microbatches` is m, on all workers together, for losses that are means, `sums` are the keys of
    operators that add rows up and count m times, `totals` values that are handed in for the whole
    batch. `weight_gradients` takes the weight gradients of `deferrable` parameters where the
    schedule splits the backward, `flow` notes which operands of leaves have a gradient.
    `exchange` are the ranks that share the experts out. `context` and its axis are None where the
    sequence is whole. `precision` is the plan's. With a `cache` attention reads the keys and values
    of earlier tokens.
    """

    graph: Graph
    table: sharding.FactorTable
    data: sharding.DataLayout
    data_axis: Axis
    tensor_axis: Axis
    device: torch.device
    microbatches: int
    sums: frozenset[str] = frozenset()
    totals: frozenset[str] = frozenset()
    exchange: Axis | None = None
    weight_gradients: WeightGradientQueue | None = None
    deferrable: frozenset[str] = frozenset()
    flow: GradientFlow = field(default_factory=GradientFlow)
    context: sharding.ContextLayout | None = None
    context_axis: Axis | None = None
    precision: str = ""
    cache: KeyValueCache | None = None

    def scaled_by(self, op: Op) -> str | None:
        """The scaling of operands of a product in 8 bits; None if it isn't one."""
        eight = self.precision in SCALED_BY and is_narrow(self.graph, op)
        return SCALED_BY[self.precision] if eight else None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes in the order of a `State`."""
        context = () if self.context_axis is None else (self.context_axis,)
        return self.data_axis, *context, self.tensor_axis

    @property
    def outer(self) -> tuple[sharding.DataLayout, ...]:
        """The layouts of all axes but the tensor axis."""
        return (self.data,) if self.context is None else (self.data, self.context)

    def lies_in_zigzag(self, value: str, k: int, placement: sharding.Placement) -> bool:
        """Whether the k-th axis splits a value into tokens that lie in zigzag."""
        if self.context is None or k != 1 or not self.context.zigzag:
            return False
        return sharding.token_dim(self.table, value, placement)

    def boundary(self, value: str, tensor: sharding.Placement = sharding.R) -> State:
        """State in which a value crosses a block's boundary; the loss and totals leave as they
        are."""
        if value == self.graph.loss or value in self.totals:
            return *(layout.states[value] for layout in self.outer), tensor
        return *(boundary_placement(self.graph, layout, value) for layout in self.outer), tensor

    def local_shape(self, value: str, state: State) -> list[int]:
        """A value's shape on this rank."""
        shape = list(self.graph.values[value].shape)
        for placement, axis in zip(state, self.axes, strict=True):
            if placement.sharded:
                shape[placement.dim] = axis.part(shape[placement.dim])[1]
        return shape


def boundary_placement(graph: Graph, data: sharding.DataLayout, value: str) -> sharding.Placement:
    """State on an outer axis in which a value goes from block to block, or from stage to stage: its
    rows or tokens split or whole, never partial; whole if it replaces a buffer, which every rank
    holds."""
    state = data.states[value]
    rows = state.sharded and state.split == 1
    return state if rows and value not in graph.updates.values() else sharding.R


def local_view(
    placement: sharding.Placement, other: sharding.Placement, axis: Axis
) -> sharding.Placement:
    """A placement as seen on a tensor already split on the other `axis`: parts before it are
    fewer."""
    if (
        placement.sharded
        and other.sharded
        and other.dim == placement.dim
        and other.split < placement.split
    ):
        return sharding.Placement("S", placement.dim, axis.fewer(placement.split))
    return placement


def seen_locally(
    k: int, placement: sharding.Placement, state: State, axes: Sequence[Axis]
) -> sharding.Placement:
    """A placement on the k-th axis as seen on a tensor that the others split as in `state`."""
    for j, (other, axis) in enumerate(zip(state, axes, strict=True)):
        if j != k:
            placement = local_view(placement, other, axis)
    return placement
