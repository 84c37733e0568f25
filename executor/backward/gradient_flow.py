"""Leaves whose backward leaves operands without a gradient.

A leaf runs user code. An expert without tokens, or a branch not taken, gives its weights no
gradient, and nothing of what is before it: on one device these parameters have None, and an
optimizer passes them over. On ranks a backward must be the same program everywhere, as gathers and
reductions are part of it. So each leaf hands zeros to operands without a gradient, and notes those
that have one. The notes of all ranks and micro-batches together cut the graph where one device's
backward ends; parameters that no other way joins to the loss have no gradient in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.rules import traits_of

Edge: TypeAlias = tuple[str, int]  # a leaf by the name of its operator, and an operand's position


class GradientFlow:
    """Operands of this rank's leaves that a step's backward gave a gradient."""

    def __init__(self) -> None:
        self.arrived = set[Edge]()

    def begin(self) -> None:
        """Before a step."""
        self.arrived.clear()

    def through(
        self,
        leaf: str,
        run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        operands: Sequence[torch.Tensor],
        carries: Sequence[bool],
    ) -> list[torch.Tensor]:
        """The results of `run(operands)`, whose backward is noted for `leaf`. `carries` tells which
        of the first results may have a gradient."""
        positions = [k for k, x in enumerate(operands) if x.requires_grad]
        if not (positions and torch.is_grad_enabled()):
            return [*run(operands)]
        enter: Callable[..., Any] = _Enter.apply
        leave: Callable[..., Any] = _Leave.apply
        edges = [(leaf, k) for k in positions]
        anchor, *entered = enter(self.arrived, edges, *(operands[k] for k in positions))
        inside = [*operands]
        for k, x in zip(positions, entered, strict=True):
            inside[k] = x
        results = [*run(inside)]
        carrying = [k for k, carried in enumerate(carries) if carried]
        left = leave(anchor, *(results[k] for k in carrying)) if carrying else ()
        for k, x in zip(carrying, left, strict=True):
            results[k] = x
        return results


class _Enter(torch.autograd.Function):
    """Operands as they are, after an anchor that ties their backward to the results'."""

    @staticmethod
    def forward(
        ctx: Any, arrived: set[Edge], edges: Sequence[Edge], *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.arrived, ctx.edges = arrived, edges
        ctx.operands = [(x.shape, x.dtype, x.device) for x in operands]
        # `.data` shares memory and is no view, which a function's user might not write to
        return operands[0].new_empty(()), *(x.data for x in operands)

    @staticmethod
    def backward(ctx: Any, _: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.arrived.update(
            edge for edge, g in zip(ctx.edges, gradients, strict=True) if g is not None
        )
        whole = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(gradients, ctx.operands, strict=True)
        ]
        return None, None, *whole


class _Leave(torch.autograd.Function):
    """Results as they are, whose backward reaches the anchor of the operands too."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.anchor = anchor.dtype, anchor.device
        return tuple(x.data for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dtype, device = ctx.anchor
        return torch.zeros((), dtype=dtype, device=device), *gradients


def edges_of(graph: Graph) -> tuple[Edge, ...]:
    """Operands of a graph's leaves that may go without a gradient, in one order on all ranks."""
    return tuple(
        (op.name, k)
        for op in graph.ops
        if traits_of(op).leaf
        for k, value in enumerate(op.operands)
        if graph.values[value].requires_grad
    )


def reached(graph: Graph, cut: Collection[Edge] = ()) -> set[str]:
    """Values that the loss depends on, through values with a gradient and no edge of `cut`."""
    behind = {graph.loss}
    for op in reversed(graph.ops):
        if behind.intersection(op.results):
            operands = [v for k, v in enumerate(op.operands) if (op.name, k) not in cut]
            behind |= {v for v in operands if graph.values[v].requires_grad}
    return behind
