"""The context of lowering: a graph with its data-axis layout, and one rank's place on the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import DataLayout, FactorTable, Placement, R
from meshwright.executor.backward import WeightGradientQueue
from meshwright.executor.lowering.reshard import Axis

State = tuple[Placement, Placement]  # (on the data axis, on the tensor axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What lowering any block of a stage reads.

    `microbatches` is m, for losses that are means, `sums` are the keys of operators that add rows
    up and count m times, `totals` values that are handed in for the whole batch. `weight_gradients`
    takes the weight gradients of `deferrable` parameters where the schedule splits the backward.
    `exchange` are the ranks that share the experts out.
    """

    graph: Graph
    table: FactorTable
    data: DataLayout
    data_axis: Axis
    tensor_axis: Axis
    device: torch.device
    microbatches: int
    sums: frozenset[str] = frozenset()
    totals: frozenset[str] = frozenset()
    exchange: Axis | None = None
    weight_gradients: WeightGradientQueue | None = None
    deferrable: frozenset[str] = frozenset()

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """The mesh axes in the order of a `State`."""
        return self.data_axis, self.tensor_axis

    def boundary(self, value: str, tensor: Placement = R) -> State:
        """State in which a value crosses a block's boundary; the loss and totals leave as they
        are."""
        if value == self.graph.loss or value in self.totals:
            return self.data.states[value], tensor
        return boundary_placement(self.graph, self.data, value), tensor

    def local_shape(self, value: str, state: State) -> list[int]:
        """A value's shape on this rank."""
        shape = list(self.graph.values[value].shape)
        for placement, axis in zip(state, self.axes, strict=True):
            if placement.sharded:
                shape[placement.dim] = axis.part(shape[placement.dim])[1]
        return shape


def boundary_placement(graph: Graph, data: DataLayout, value: str) -> Placement:
    """State on the data axis in which a value goes from block to block, or from stage to stage: its
    rows split or whole, never partial; whole if it replaces a buffer, which every rank holds."""
    state = data.states[value]
    rows = state.sharded and state.split == 1
    return state if rows and value not in graph.updates.values() else R


def local_view(placement: Placement, other: Placement, other_size: int) -> Placement:
    """A placement as seen on a tensor already split by the other axis: parts before it are
    fewer."""
    if (
        placement.sharded
        and other.sharded
        and other.dim == placement.dim
        and other.split < placement.split
    ):
        return Placement("S", placement.dim, placement.split // other_size)
    return placement
