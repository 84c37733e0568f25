"""Rules of mixtures of experts and of routers: each operator on shards, forward and backward; what
experts work on, and where blocks may end."""

from __future__ import annotations

import pytest
import torch

from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, copies_of, inside_experts
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.operators.moe import combine, dispatch, grouped_linear
from meshwright.planner.tracing.trace import trace
from tests.costmodel.rules.rule_cases import Case, case, ids, w, x
from tests.costmodel.rules.test_rules import operator, ranks  # noqa: F401
from tests.helpers.threaded_ranks import Ranks
from tests.models.experts_models import batch, language_model, token_loss


def grouped(**options: bool) -> object:
    def call(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *bias: torch.Tensor):
        return grouped_linear(x, weight, experts, *(bias or (None,)), **options)

    return call


def count(x: torch.Tensor) -> torch.Tensor:
    return torch.histc(x.float(), bins=6, min=0, max=6)


def marked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.scatter(1, index, 1.0)


CHOSEN = ids(6, 4, 2, 2)
CASES = [
    case("dispatch", "R S(0) S(1) S(3)", lambda a, i: dispatch(a, i), x(4, 2, 8), CHOSEN),
    case("combine", "R S(0) S(1) S(2)", lambda a: combine(a), x(4, 2, 2, 8)),
    case("grouped_linear", "R S(0) S(1) S(2) S(3) P", grouped(), x(4, 2, 2, 8), w(6, 8, 4), CHOSEN),
    case(
        "grouped_linear transposed", "R S(0) S(1) S(2) S(3) P",
        grouped(transposed=True), x(4, 2, 2, 8), w(6, 4, 8), CHOSEN,
    ),
    case(
        "grouped_linear bias", "R S(0) S(1) S(2) S(3) P",
        grouped(), x(4, 2, 2, 8), w(6, 8, 4), CHOSEN, w(6, 4),
    ),
    case("histc", "R P", count, ids(6, 4, 2)),
    case("histc of the data's bounds", "R", lambda a: torch.histc(a, 4), x(4, 2), known=False),
    case("scatter", "R S(0)", marked, x(4, 6), ids(6, 4, 2)),
    case(
        "scatter source", "R S(0) S(2)",
        lambda a, i, b: a.scatter(1, i, b), x(4, 6, 8), ids(6, 4, 2, 8), x(4, 2, 8),
    ),
    case(
        "scatter corner", "R S(0)",
        lambda a, i, b: a.scatter(1, i, b), x(4, 6, 8), ids(6, 4, 2, 4), x(4, 2, 4),
    ),
    case("scatter_add", "R P", lambda a, i, b: a.scatter_add(0, i, b), w(6), ids(6, 4), x(4)),
    case(
        "scatter_add dims", "R S(0) P",
        lambda a, i, b: a.scatter_add(1, i, b), x(4, 6), ids(6, 4, 2), x(4, 2),
    ),
    case(
        "new_zeros", "R S(0) S(1)",
        lambda a, b: torch.cat([a, b], 1) + a.new_zeros(4, 10), x(4, 6), x(4, 4),
    ),
]  # fmt: skip


@pytest.mark.parametrize("of", CASES, ids=lambda of: of.name)
def test_operator_on_shards_is_the_operator(of: Case, ranks: Ranks) -> None:  # noqa: F811
    check = operator(of)
    found = {str(s.results[0]) for data in (False, True) for s in check.options(2, data=data)}
    assert check.sample.table.ops[check.op.name].known == of.known
    assert found == of.splits
    check.everything(ranks)


def test_copies_are_what_lies_between_dispatch_and_combine() -> None:
    graph = trace(
        language_model("routed", "none"),
        batch(4, 0),
        loss_fn=lambda made, targets: token_loss(made[0], targets) + made[1],
    )
    table = analyse(graph)
    assert table.copies == copies_of(graph.ops)
    for op in graph.ops:
        inside = table.copies.intersection(op.results)
        assert bool(inside) or op.short != DISPATCH
        assert not inside or op.short != COMBINE
        assert not inside or ".experts" in op.module


def test_no_block_ends_where_copies_are_away() -> None:
    graph = trace(
        language_model("routed", "none"),
        batch(4, 0),
        loss_fn=lambda made, targets: token_loss(made[0], targets) + made[1],
    )
    away = 0
    for k, op in enumerate(graph.ops):  # counted along the way
        assert (k in inside_experts(graph.ops)) == bool(away)
        away += (op.short == DISPATCH) - (op.short == COMBINE)
    cut = cut_blocks(graph, analyse(graph))
    for block in cut.blocks:
        shorts = [op.short for op in block.ops]
        assert shorts.count(DISPATCH) == shorts.count(COMBINE)
