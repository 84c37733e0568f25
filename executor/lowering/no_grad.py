"""Operators that ran under `torch.no_grad` in the user's model.

A graph records that by results without a gradient; the regions themselves are gone. Blocks run with
gradients on, so such an operator reads its operands without their history: autograd keeps nothing
for it, and no gradient takes a way that the model has closed.
"""

from __future__ import annotations

import torch
from torch import fx

from meshwright.costmodel.graph import Graph, Op


def read_by(op: Op, name: str, node: fx.Node, graph: Graph) -> fx.Node:
    """The node of an operand as the operator reads it."""
    results = [graph.values[r] for r in op.results]
    closed = not any(meta.requires_grad for meta in results)
    if not closed or not graph.values[name].requires_grad or op.short == "detach":
        return node
    if not any(meta.dtype.is_floating_point or meta.dtype.is_complex for meta in results):
        return node  # a comparison, an index: there is nothing that a gradient could pass
    return node.graph.call_function(torch.ops.aten.detach.default, (node,))
