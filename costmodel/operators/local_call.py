"""Local operator calls: shapes cut by strategy and rows, sizes localised, as signatures to time.

    local size of a dim = size, the largest of tp parts of it where its placement splits it,
                          times rows / traced rows where the batch atom is one of its factors

Views cost nothing and have no signature, nor have calls that the executor replaces by another
program (vocabulary-parallel loss, dropout by counter): timing the plain operator would say nothing
about those. Operators are measured on contiguous operands; `contiguous` itself, whose time is all
in the strides, has no signature either.
"""

from __future__ import annotations

from meshwright.costmodel.graph import Graph, Op, map_refs
from meshwright.costmodel.operators.fusion import is_free
from meshwright.costmodel.rules import IMPLEMENTATIONS, divided, draws, traits_of
from meshwright.costmodel.sharding import FactorTable, Placement, Strategy, largest_part
from meshwright.profiles.op_signature import Operand, OperandIndex, OpSignature


def signature(
    graph: Graph, table: FactorTable, op: Op, strategy: Strategy, *, rows: float, tp: int
) -> OpSignature | None:
    """The call that one rank of a tensor axis of `tp` makes for `op` at `rows` batch rows; None
    where there is nothing to time (see above), or where `rows` gives no whole sizes."""
    factors, traits = table.ops[op.name], traits_of(op)
    if is_free(table, op) or traits.stride_bound or draws(op) or traits.leaf:
        return None
    if IMPLEMENTATIONS[strategy.implementation].exchanges:
        return None
    operands: list[Operand] = []
    for value, placement in zip(op.operands, strategy.operands, strict=True):
        meta = graph.values[value]
        shape = local_shape(graph, table, value, placement, rows=rows, tp=tp)
        if shape is None:
            return None
        grad = meta.requires_grad and meta.dtype.is_floating_point
        operands.append((str(meta.dtype).removeprefix("torch."), shape, grad))
    count = iter(range(len(operands)))
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda _: OperandIndex(next(count)))
    if (factor := strategy.split_factor) in factors.sizes:
        local = {factor: largest_part(factors.sizes[factor], tp)}
        args, kwargs = divided(op, factors, args, kwargs, local)
    index = factors.shape_arg
    if index is not None and index < len(args):  # a factory's: the result's sizes
        shape = local_shape(graph, table, op.results[0], strategy.results[0], rows=rows, tp=tp)
        if shape is None:
            return None
        args = [*args[:index], list(shape), *args[index + 1 :]]
    return OpSignature.of_call(op.target, operands, args, kwargs)


def local_shape(
    graph: Graph, table: FactorTable, value: str, placement: Placement, *, rows: float, tp: int
) -> tuple[int, ...] | None:
    """The local shape of a value; None where `rows` gives no whole size."""
    shape = []
    for d, size in enumerate(graph.values[value].shape):
        if table.batch is not None and table.batch in table.dims[value][d]:
            scaled = size * rows / graph.batch_size
            if scaled != int(scaled) or scaled < 1:
                return None
            size = int(scaled)
        split = placement.sharded and placement.dim == d
        shape.append(largest_part(size, tp) if split else size)
    return tuple(shape)
