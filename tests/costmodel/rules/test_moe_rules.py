"""What experts work on, and where blocks may end."""

from __future__ import annotations

from functools import cache

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, copies_of, inside_experts
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.tracing.trace import trace
from tests.models.experts_models import batch, language_model, token_loss


@cache
def routed() -> Graph:
    return trace(
        language_model("routed", "none"),
        batch(4, 0),
        loss_fn=lambda made, targets: token_loss(made[0], targets) + made[1],
    )


def test_copies_are_what_lies_between_dispatch_and_combine() -> None:
    graph = routed()
    table = analyse(graph)
    assert table.copies == copies_of(graph.ops)
    assert table.experts and not table.experts & table.alone  # shared out evenly
    for op in graph.ops:
        inside = table.copies.intersection(op.results)
        assert bool(inside) or op.short != DISPATCH
        assert not inside or op.short != COMBINE
        assert not inside or ".experts" in op.module


def test_no_block_ends_where_copies_are_away() -> None:
    graph = routed()
    away = 0
    for k, op in enumerate(graph.ops):  # counted along the way
        assert (k in inside_experts(graph.ops)) == bool(away)
        away += (op.short == DISPATCH) - (op.short == COMBINE)
    cut = cut_blocks(graph, analyse(graph))
    for block in cut.blocks:
        shorts = [op.short for op in block.ops]
        assert shorts.count(DISPATCH) == shorts.count(COMBINE)
