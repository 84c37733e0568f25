"""Losses over rows that are split: divided by the count of rows on all ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.graph import Op
from meshwright.costmodel.rules import row_reduction, traits_of
from meshwright.costmodel.sharding import REPLICATE, Strategy
from meshwright.executor.lowering.context import Context
from meshwright.executor.lowering.implementations import GlobalLoss

MEAN = 1  # of `row_reduction`


def is_global(op: Op, context: Context, strategies: Sequence[Strategy]) -> bool:
    """Whether an operator is a loss of class numbers, reduced, of which a rank or a micro-batch has
    some rows or classes only. `strategies` are its own, by axis."""
    if not row_reduction(op) or context.graph.values[op.operands[1]].dtype.is_floating_point:
        return False
    return context.microbatches > 1 or any(s.name != REPLICATE for s in strategies)


def is_counted(op: Op, context: Context, strategies: Sequence[Strategy]) -> bool:
    """Whether such a loss is a mean, whose rows are counted over all micro-batches beforehand if
    its target is known by then."""
    return row_reduction(op) == MEAN and is_global(op, context, strategies)


def global_loss(op: Op, context: Context, strategies: Sequence[Strategy]) -> GlobalLoss:
    """The module in the place of such a loss."""
    on_axes = list(zip(strategies, context.axes, strict=True))
    # the data axis splits classes too where they are rows, as in a contrastive loss
    vocabulary = next((axis for x, axis in on_axes if x.implementation), None)
    sizes, loss = context.table.ops[op.name].sizes, traits_of(op).loss
    assert loss is not None
    return GlobalLoss(
        loss.kind,
        row_reduction(op),
        vocabulary,
        tuple(axis for x, axis in on_axes if x.split_factor and not x.implementation),
        first_class=vocabulary.part(sizes["vocab"])[0] if vocabulary else 0,
    )
