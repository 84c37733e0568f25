"""Bits that are known where numbers are finite: whether something overflowed.

`isinf(x)` is false of every finite x, and so is what `any` makes of it. Clamps behind such a bit,
as half precision needs them, leave each row to itself although the bit is one of all rows. Nothing
is claimed of what need not be finite: raw inputs (missing labels are NaN), infinities that the
graph writes, as masks do, logarithms of zero; up to the product that reads what comes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import VIEWS, traits_of

# what an operator says of finite numbers
OF_FINITE: Mapping[str, bool] = {
    "isinf": False, "isposinf": False, "isneginf": False, "isnan": False, "isfinite": True,
}  # fmt: skip
# what becomes of known bits
OF_BITS: Mapping[str, Callable[[Sequence[bool]], bool]] = {
    **dict.fromkeys(("any", "all", "clone", "expand", "select", "transpose", *VIEWS), all),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), all),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), any),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda bits: not all(bits)),
}
COMPARED = {"eq": True, "ne": False}  # what comes of a number beside itself
POLES = frozenset({"log", "log2", "log10", "log1p", "logit", "xlogy"})
MADE_FINITE = frozenset({"nan_to_num"})


class FiniteBits:
    """The bit that all elements of a value are, by value, of operators told in their order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bits: dict[str, bool] = {}
        given = (n for n in graph.inputs if graph.values[n].dtype.is_floating_point)
        written = (n for n, x in graph.constants.items() if not x.isfinite().all())
        self.infinite = {*given, *written}  # values that need not be finite

    def add(self, op: Op) -> bool | None:
        """The bit that an operator makes; None where it is not known."""
        bit = self._bit(op)
        if bit is not None:
            self.bits |= dict.fromkeys(op.results, bit)
        elif self._infinite(op):
            self.infinite.update(op.results)
        return bit

    def _bit(self, op: Op) -> bool | None:
        import torch

        if any(self.graph.values[v].dtype != torch.bool for v in op.results):
            return None
        if op.operands and self.bits.keys() >= set(op.operands):
            how = OF_BITS.get(op.short)
            return how([self.bits[v] for v in op.operands]) if how else None
        if not self.infinite.isdisjoint(op.operands):
            return None
        return OF_FINITE.get(op.short, _compared(op))

    def _infinite(self, op: Op) -> bool:
        """Whether what an operator makes need not be finite."""
        foreign = op.short.count(".") > 0  # may do anything
        if op.short in POLES or foreign or traits_of(op).leaf:
            return True
        if op.short in MADE_FINITE or traits_of(op).main:
            return False
        floats = any(self.graph.values[v].dtype.is_floating_point for v in op.results)
        own = any(True for _ in _infinities((op.args, *op.kwargs.values())))
        return floats and (own or not self.infinite.isdisjoint(op.operands))


def _compared(op: Op) -> bool | None:
    """What comes of a finite number beside itself, or an infinity; None for others."""
    if op.short not in COMPARED:
        return None
    alike = COMPARED[op.short]
    if len(op.operands) == 2 and len(set(op.operands)) == 1:
        return alike
    return not alike if any(True for _ in _infinities(op.args)) else None


def _infinities(tree: Any) -> Iterator[float]:
    """Numbers that are not finite in nested arguments."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _infinities(item)
    elif isinstance(tree, float) and not math.isfinite(tree):
        yield tree
