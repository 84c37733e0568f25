"""Seconds of a tensor-parallel collective that its own product does not hide.

What a product takes is gathered, or what it makes is summed and scattered, part by part round a
ring of n ranks while other parts are multiplied (Wang et al., ASPLOS 2023; Transformer Engine's
user buffers, torch's async tensor parallelism). A rank begins, or ends, with its own part, so that
the n products of p seconds each run beside n - 1 sends of c seconds; while both run, a product
loses the part s of the shorter to the send (`Device.overlap_slowdown`):

    time = p + (n - 1) max(p + s min(p, c), c)

The parts are issued to several streams, so that together they fill a device as the whole product
does. What is left of the collective is that time less the whole product's n p. In a backward the
same is taken of the gradient of what was scattered, which is gathered, and of what was gathered.
Collectives without a product beside them (an embedding's) wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators.fusion import is_free
from meshwright.costmodel.operators.products import split_product_seconds
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import FactorTable


def products_beside(graph: Graph, table: FactorTable) -> Mapping[str, tuple[Op, ...]]:
    """Value -> the products that make it or, where none does, that take it, but for views."""
    made: dict[str, tuple[Op, ...]] = {}
    taken: dict[str, tuple[Op, ...]] = {}
    source: dict[str, str] = {}
    for op in graph.ops:
        if is_free(table, op) and op.operands:
            first = source.get(op.operands[0], op.operands[0])
            source |= dict.fromkeys(op.results, first)
            made |= {value: made[first] for value in op.results if first in made}
        elif table.ops[op.name].matmul and traits_of(op).kernel != "attention":
            made |= {value: (op,) for value in op.results}
            for value in {source.get(v, v) for v in op.operands if v not in graph.parameters}:
                taken[value] = (*taken.get(value, ()), op)
    taken |= {view: taken[first] for view, first in source.items() if first in taken}
    return {**taken, **made}


def exposed_seconds(sizes: LocalSizes, seconds: float, products: tuple[Op, ...]) -> float:
    """What is left of a collective of so many seconds over the tensor axis beside products."""
    ranks, slowdown = sizes.setting.mesh.tp, sizes.setting.cluster.device.overlap_slowdown
    whole = sum(split_product_seconds(sizes, op) for op in products)
    part = whole / ranks
    send = seconds / (ranks - 1)
    together = part + (ranks - 1) * max(part + slowdown * min(part, send), send)
    return min(seconds, together - whole)
