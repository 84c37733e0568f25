"""The kind of context parallelism that is taken, against the price of each."""

from __future__ import annotations

import dataclasses

from meshwright.costmodel.sharding.context_axis import CONTEXT_KINDS
from meshwright.costmodel.sharding.strategies import replicated
from meshwright.planner.pricing.context_kinds import cheapest_kind
from tests.costmodel.operators.test_pricing import net, pricer, talking


def test_the_cheapest_kind_is_taken() -> None:
    """Free sends: a ring's are hidden; a network alone: all-to-all moves least of many heads."""
    of = net()
    setting = pricer(of, talking()).setting
    priced = {
        kind: pricer(of, talking(), cp=2, cp_kind=kind).op_cost(op, replicated(op))
        for kind in CONTEXT_KINDS
        for op in of.graph.ops
        if op.short == "scaled_dot_product_attention"
    }
    on_two = dataclasses.replace(setting, cp=2)
    found = cheapest_kind(of.graph, of.table, on_two, CONTEXT_KINDS)
    seconds = {kind: cost.forward_s + cost.backward_s for kind, cost in priced.items()}
    assert seconds[found] == min(seconds.values())
