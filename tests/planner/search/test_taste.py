"""What is chosen among plans that prices can't tell apart."""

from __future__ import annotations

import pytest

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from meshwright.planner.search.taste import TIE, axes_of, by_taste, quantile_s, simplicity
from tests.helpers.planning import cluster, large_gpt2, problem_of
from tests.helpers.tiny import net, planned, with_stage


def searched(objective: str, margin: float = 0.0) -> Search:
    on = cluster(8, flops=5e13, bandwidth=5e10)
    return Search(
        problem_of(large_gpt2(), on), 24, Overrides(), objective=objective, memory_margin=margin
    )


def test_fewer_axes_come_before_everything_else() -> None:
    plan = planned(net(), 2).plan
    wide = with_stage(plan, tp=2, dp=1) if plan.stages[0].tp == 1 else plan
    narrow = with_stage(plan, tp=1, dp=2)
    assert axes_of(wide.stages, 1) == 1 + axes_of(narrow.stages, 1)
    assert simplicity(narrow, 99.0, 100.0) < simplicity(wide, 1.0, 100.0)


def test_less_memory_is_simpler_in_steps() -> None:
    plan = planned(net(), 1).plan
    assert simplicity(plan, 70.0, 100.0) < simplicity(plan, 79.0, 100.0)
    assert simplicity(plan, 70.1, 100.0) == simplicity(plan, 70.2, 100.0)


def test_errors_only_add() -> None:
    search = searched("fastest")
    for draft in [d for d in search.run().drafts if d.fits][:6]:
        assert quantile_s(draft, search.programs.coster) >= draft.step_time_s


def test_ties_go_to_the_simplest_and_stay_within_the_tolerance() -> None:
    fastest, robust = (searched(objective).run() for objective in ("fastest", "robust"))
    assert robust.best.step_time_s >= fastest.best.step_time_s * (1 - 0.005)
    search = searched("robust")
    drafts = [d for d in search.run().drafts if d.fits]
    first, *others = by_taste(drafts, search.programs.coster)
    least = min(own.quantile_s for own in (first, *others))
    assert first.quantile_s <= least * (1 + TIE)
    assert axes_of(first.draft.plan.stages, len(first.draft.plan.devices)) == min(
        axes_of(own.draft.plan.stages, len(own.draft.plan.devices))
        for own in (first, *others)
        if own.quantile_s <= least * (1 + TIE)
    )


@pytest.mark.parametrize("margin", [0.0, 0.3, 0.6])
def test_a_margin_stays_free(margin: float) -> None:
    search = searched("fastest", margin)
    best = search.run().best
    used = max(best.evaluation.prediction.peak_memory_bytes)
    assert used <= (1 - margin) * search.problem.cluster.device.memory_bytes
