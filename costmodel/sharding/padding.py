"""Rows that fill up a smaller batch: labels that losses ignore, and masks that are zero, make them
count nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.costmodel.graph import Graph, Op, argument
from meshwright.costmodel.rules import (
    VIEWS,
    row_reduction,
    takes_batch_statistics,
    updates_statistics,
)

# operators that move labels and flags, and leave them what they are
MOVES = frozenset({
    "to", "_to_copy", "clone", "contiguous", "alias", "detach", "slice", "pad", "constant_pad_nd",
    "transpose", "permute", *VIEWS,
})  # fmt: skip
COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
# operators that replace numbers under flags: of integers alone, as a row of which all is masked has
# no softmax
REPLACES = frozenset({"masked_fill", "where"})

Filling = tuple[str, int]  # an input, and what its rows are filled with


def counting_nothing(graph: Graph, ends: Iterable[Op]) -> Mapping[str, int] | None:
    """The inputs (by path) that keep rows from counting, each with what these are filled with; None
    where rows would count all the same.

    `ends` are the operators at which rows come together on the way to the loss. Each is a loss of
    class numbers that are inputs, moved at most, or a sum of what such labels or a mask among the
    inputs make zero. Nothing else may look up by them, and no row may leave a trace in a buffer.
    """
    calls = (*graph.derived, *graph.ops)
    if graph.updates or any(takes_batch_statistics(o) or updates_statistics(o) for o in calls):
        return None
    maker = {v: op for op in calls for v in op.results}
    found: dict[str, int] = {}
    ended = set()
    for op in ends:
        if row_reduction(op) and graph.values[op.operands[1]].dtype.is_floating_point:
            return None  # probabilities of classes, of which none is ignored
        filling = _filling(op, maker)
        if filling is None or filling[0] not in graph.batched:
            return None
        if found.setdefault(*filling) != filling[1]:
            return None
        ended.add(op.name)
    moved = set(found)
    for op in calls:
        if moved.isdisjoint(op.operands) or op.name in ended or op.short == "mul":
            continue
        if op.short in REPLACES and not graph.values[op.results[0]].dtype.is_floating_point:
            continue
        if op.short not in MOVES | COMPARES:
            return None
        moved.update(op.results)
    return {graph.inputs[name]: filled for name, filled in found.items()} if found else None


def _filling(end: Op, maker: Mapping[str, Op]) -> Filling | None:
    """What keeps rows from counting where they come together."""
    if row_reduction(end):
        return _source(end.operands[1], maker), int(argument(end, 4, "ignore_index", -100))
    return _zero(end.operands[0], maker) if end.short == "sum" else None


def _zero(value: str, maker: Mapping[str, Op]) -> Filling | None:
    """What makes the rows of a value zero."""
    op = maker.get(value)
    if op is None:
        return value, 0
    if op.short in MOVES or op.short in ("sum", "neg", "div"):
        return _zero(op.operands[0], maker)
    if op.short == "ne" and len(op.operands) == 1 and isinstance(op.args[1], int):
        return _source(op.operands[0], maker), op.args[1]
    if op.short == "mul":
        flags = [_source(v, maker) for v in op.operands]
        each = [v for v, flag in zip(op.operands, flags, strict=True) if _zero_at(flag, maker)]
        return _zero(each[0], maker) if each else None
    return None


def _zero_at(value: str, maker: Mapping[str, Op]) -> bool:
    """Whether a value is an input, or flags of one."""
    return value not in maker or maker[value].short == "ne"


def _source(value: str, maker: Mapping[str, Op]) -> str:
    """What a value was before it was moved."""
    while value in maker and maker[value].short in MOVES:
        value = maker[value].operands[0]
    return value
