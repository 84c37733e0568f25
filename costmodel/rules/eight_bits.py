"""Which products precision "fp8" runs in 8 bits (`costmodel/fp8.py`)."""

from __future__ import annotations

from meshwright.costmodel.fp8 import SIDE
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules.traits import traits_of


def is_fp8(graph: Graph, op: Op) -> bool:
    """Whether "fp8" multiplies an operator's operands in 8 bits: a layer's product with a parameter
    whose sides are multiples of `SIDE`, plus a vector or nothing."""
    product = traits_of(op).product
    if product is None or op.name not in graph.in_layers:
        return False
    if op.kwargs or len(op.args) != len(op.operands):  # factors of the sum
        return False
    weight, x = op.operands[product.weight], op.operands[product.x]
    shape = graph.values[weight].shape
    vector = len(op.operands) < 3 or len(graph.values[op.operands[product.bias]].shape) == 1
    return (
        weight in graph.parameters
        and x not in graph.parameters
        and len(shape) == 2
        and all(side % SIDE == 0 for side in shape)
        and len(graph.values[x].shape) >= 2
        and vector
    )
