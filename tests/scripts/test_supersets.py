"""A superset never loses: drawn cases, planned freely and forced; what judges them."""

from functools import cache, partial

import pytest

from meshwright import Overrides, ParallelModel
from meshwright.planner.search.taste import RISK, quantile_s
from scripts.drawn.cases import drawn
from scripts.record_plans import planned
from scripts.recording.cases import case, gpt2, nodes
from scripts.supersets import Comparison, Outcome, Quantiles, judged, table
from tests.helpers.tiers import second_tier

SEED, CASES = 33, 20


@second_tier("of small nets plans are the best of all there are (test_optimality)")
@pytest.mark.parametrize("number", range(CASES))
def test_a_superset_never_loses(number: int) -> None:
    found = judged(drawn(SEED, number))
    assert not found.violations, table([found])


def test_cases_follow_from_seed_and_number() -> None:
    for number in range(8):
        one, same, other = drawn(0, number), drawn(0, number), drawn(1, number)
        assert (one.name, one.overrides, one.limit_s) == (same.name, same.overrides, same.limit_s)
        assert (one.name, one.overrides) != (other.name, other.overrides)


@cache
def free() -> ParallelModel:
    tiny = partial(gpt2, layers=3, hidden=512, length=512, vocab=32000)
    return planned(case(tiny, nodes("dgx-h100", devices_per_node=4), 12, objective="fastest"))


@second_tier("it is about the judge of those cases")
def test_a_choice_that_loses_is_told() -> None:
    """Of a choice that was forced to be worse everything else is better."""
    slow = free().replan(Overrides(pp=4, num_microbatches=12, recompute="full"))
    out = Outcome(number=0, name="tiny")
    compared = Comparison(slow, slow, out, Quantiles(slow.report.details.problem))
    compared.forced(Overrides())
    compared.forced(Overrides(tp=3))  # refused
    assert (out.forced, out.refused) == (2, 2)
    assert [v.rule for v in out.violations] == ["fastest, forced", "robust, forced"] * 2
    gained = slow.prediction.step_time_s / free().prediction.step_time_s - 1
    assert out.violations[0].excess == pytest.approx(gained) and gained > 0.1
    assert f"| {gained:.2%} |" in table([out])


@second_tier("it is about the judge of those cases")
def test_the_number_of_robust_is_the_searchs() -> None:
    """Found from the plan, and by the search from its draft."""
    answers = free().report.deferred
    found = Quantiles(free().report.details.problem)
    compared = 0
    for draft in (d for d in answers.result.drafts if d.fits):
        plan = answers.search.written(draft)
        if plan.step_time_s == pytest.approx(draft.step_time_s, rel=1e-6):
            own = quantile_s(draft, answers.search.programs.coster)
            cluster = answers.search.problem.cluster
            own *= 1 + RISK * (1 - draft.evaluation.prediction.memory_probability(cluster))
            assert found.of(plan.plan, plan.step_time_s) == pytest.approx(own, rel=0.01)
            compared += 1
    assert compared >= 3
