"""Plans at other shapes of batches."""

from __future__ import annotations

import pytest

from meshwright.decisions.shapes import plan_of_rows
from meshwright.planner.plan.check import check_plan
from tests.helpers.tiny import cut, net, plan_for


def test_fewer_rows_go_in_as_many_of_the_micro_batches_as_may_be() -> None:
    graph, factors = cut(net())
    plan = plan_for(graph, dp=2, num_microbatches=4)  # of 16 rows
    for rows, microbatches in ((16, 4), (12, 3), (10, 1), (8, 4), (2, 1)):
        found = plan_of_rows(plan, rows)
        assert (found.global_batch_size, found.num_microbatches) == (rows, microbatches)
        check_plan(found, graph, factors)


def test_rows_that_can_t_be_shared_out_name_the_legal_ones() -> None:
    plan = plan_for(cut(net())[0], dp=4, tp=1)
    with pytest.raises(
        ValueError, match=r"batch: dp=4 does not divide 6 rows; legal: .*; give a multiple of 4"
    ):
        plan_of_rows(plan, 6)
    with pytest.raises(ValueError, match="more rows than planned"):
        plan_of_rows(plan, 20)
