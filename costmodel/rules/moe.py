"""Rules of mixture-of-experts operators (their definitions: `planner/operators/moe.py`).

    dispatch         x[b, s, h], experts[b, s, k]                -> y[b, s, k, h]
    grouped_linear   x[b, s, k, i], w[e, i, o], experts[b, s, k] -> y[b, s, k, o]
    combine          x[b, s, k, h]                               -> y[b, s, h]

A grouped product may have biases [e, o], and matrices stored as [e, o, i]. Every copy meets one
expert, so that its FLOPs are 2·b·s·k·i·o whatever e is. The tensor axis may split tokens (the
weights' gradients are then partial), or i and o as in any product; it can't split e, whose copies
would come from anywhere: that is the expert axis, which takes ranks of all other axes and exchanges
the copies (`operators/communication.py`).

Routers count their choices and mark them with operators that all models may use (`histc` in
`registry.py`, `scatter` in `auto.py`). Counts of a split batch are summed: a load-balancing
loss is a product of two of them, and finds both whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from meshwright.costmodel.graph import Op, argument
from meshwright.costmodel.rules.language import Metas, OpFactors, Rule, ein
from meshwright.costmodel.rules.traits import traits_of

DISPATCH, COMBINE, GROUPED = "dispatch", "combine", "grouped_linear"
EXPERT_FACTOR = "e"
TOKEN_FACTORS = frozenset({"b", "s"})  # split along one, ranks have tokens of their own


def copies_of(ops: Iterable[Op]) -> frozenset[str]:
    """The values made from a `dispatch` on and before its `combine`: what experts work on."""
    copies: set[str] = set()
    for op in ops:
        if traits_of(op).experts == "dispatch" or (
            traits_of(op).experts != "combine" and not copies.isdisjoint(op.operands)
        ):
            copies.update(op.results)
    return frozenset(copies)


def inside_experts(ops: Sequence[Op]) -> frozenset[int]:
    """Positions of operators before which no block may end: copies are read there or later."""
    copies = copies_of(ops)
    first = {value: k for k, op in enumerate(ops) for value in op.results if value in copies}
    last = {value: k for k, op in enumerate(ops) for value in op.operands if value in copies}
    return frozenset(at for value, k in last.items() for at in range(first[value] + 1, k + 1))


def _grouped(op: Op, operands: Metas, results: Metas) -> OpFactors:
    matrices = "out in" if argument(op, 4, "transposed", False) else "in out"
    biases = f", {EXPERT_FACTOR} out" if len(operands) > 3 else ""
    factors = ein(
        f"b s k in, {EXPERT_FACTOR} {matrices}, b s k{biases} -> b s k out",
        whole=EXPERT_FACTOR,
        pinned=(3,),
        flops=2.0,
    )(op, operands, results)
    counted = tuple(name for name in factors.flop_factors if name != EXPERT_FACTOR)
    return replace(factors, flop_factors=counted)


MOE_RULES: Mapping[str, Rule] = MappingProxyType({
    f"meshwright.{DISPATCH}": ein("b s h, b s k -> b s k h", whole="k"),
    f"meshwright.{GROUPED}": _grouped,
    f"meshwright.{COMBINE}": ein("b s k h -> b s h", whole="k"),
})  # fmt: skip
