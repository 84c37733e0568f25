"""Token slices: the sequence cut in time, for a pipeline that each micro-batch goes through in
parts (TeraPipe, arXiv 2102.07988; Seq1F1B, 2406.03488).

A slice is to tokens what a rank of the context axis is, one after the other in place of beside each
other: the same layout splits the same values. Nothing travels on this axis. What a slice needs of
earlier ones is kept for it (keys and values of causal attention), what is summed over slices is
summed as micro-batches are (losses, gradients of weights), and what needs anything else can't be
sliced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.mesh import ALL_GATHER
from meshwright.costmodel.rules import is_causal, takes_batch_statistics, traits_of
from meshwright.costmodel.sharding.context_axis import (
    BY_BLOCKS,
    MASK,
    ContextLayout,
    context_layout,
)
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.strategies import P, Placement


def slice_layout(graph: Graph, table: FactorTable) -> ContextLayout:
    """States of every value on the axis of slices, however many there are and of which sizes."""
    length = table.length
    degree = next((n for n in range(2, length) if length % n == 0), length)
    return replace(context_layout(graph, table, degree, ALL_GATHER), zigzag=False)


def why_not_sliced(graph: Graph, table: FactorTable) -> str:
    """Why a model's micro-batches can't go through a pipeline in token slices; empty where they
    can."""
    if table.sequence is None:
        return table.tokens.why
    if graph.updates:
        return f"each forward writes {len(graph.updates)} of the model's buffers"
    layout = slice_layout(graph, table)
    entering = {v: block.name for block in graph.blocks for v in block.inputs}
    for op in graph.ops:
        if why := _why_whole(graph, table, op, layout, entering):
            return f"{op.key} ({op.target}) {why}"
    if layout.states[graph.loss] != P:
        return "the loss is no sum, or mean, over tokens"
    return ""


def _why_whole(
    graph: Graph, table: FactorTable, op: Op, layout: ContextLayout, entering: Mapping[str, str]
) -> str:
    strategy, traits = layout.strategies[op.name], traits_of(op)
    if takes_batch_statistics(op):
        return "takes statistics of all tokens"
    if strategy.implementation not in ("", BY_BLOCKS):
        return "needs tokens of the next slice, or the one before"
    if strategy.implementation == BY_BLOCKS and (not is_causal(op) or len(op.operands) > MASK):
        return "is attention that is not causal by itself: a mask may let it see later tokens"
    for value, wanted in zip(op.operands, strategy.operands, strict=True):
        state = layout.states[value]
        whole = state.kind in ("R", "Rp") and wanted.kind in ("R", "Rp")
        if value in entering and not whole and not _may_enter(state):
            return f"reads {value}, of which slices have parts of its rows' tokens between blocks"
        if state != wanted and state.kind in ("S", "P"):
            return "needs whole sequences"
    repeats = traits.product is not None and any(map(table.has_batch, op.operands))
    if repeats and not strategy.results[0].sharded:
        return "works on rows that have no tokens, which each slice would do again"
    return ""


def _may_enter(state: Placement) -> bool:
    """Whether a value may go from block to block so: tokens split, or whole."""
    return state.kind in ("R", "Rp") or (state.sharded and state.split == 1)
