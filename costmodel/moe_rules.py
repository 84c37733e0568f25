"""Rules of mixture-of-experts operators (their definitions: `planner/moe_operators.py`).

    dispatch         x[b, s, h], experts[b, s, k]                -> y[b, s, k, h]
    grouped_linear   x[b, s, k, i], w[e, i, o], experts[b, s, k] -> y[b, s, k, o]
    combine          x[b, s, k, h]                               -> y[b, s, h]

Every copy meets one expert, so that a grouped product's FLOPs are 2·b·s·k·i·o whatever e is. The
tensor axis may split tokens (the weights' gradients are then partial), or i and o as in any
product; it can't split e, whose copies would come from anywhere: that is the expert axis, which
takes ranks of all other axes and exchanges the copies (`pricing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from costmodel.graph import Op
from costmodel.rules import Metas, OpFactors, Rule, ein

DISPATCH, COMBINE, GROUPED = "dispatch", "combine", "grouped_linear"
EXPERT_FACTOR = "e"


def _grouped(op: Op, operands: Metas, results: Metas) -> OpFactors:
    made = ein(
        f"b s k in, {EXPERT_FACTOR} in out, b s k -> b s k out", whole=EXPERT_FACTOR, flops=2.0
    )(op, operands, results)
    counted = tuple(name for name in made.flop_factors if name != EXPERT_FACTOR)
    return replace(made, flop_factors=counted)


MOE_RULES: Mapping[str, Rule] = MappingProxyType({
    f"meshwright.{DISPATCH}": ein("b s h, b s k -> b s k h", whole="k"),
    f"meshwright.{GROUPED}": _grouped,
    f"meshwright.{COMBINE}": ein("b s k h -> b s h", whole="k"),
})  # fmt: skip
