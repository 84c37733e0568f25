"""Plans that are refused once their steps are followed: the search goes on without them."""

from __future__ import annotations

import pytest

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import SUMMED, cluster, linears, problem_of
from tests.planner.search.test_search import limited


def searching(memory_bytes: float, target: object = None, devices: int = 4) -> Search:
    on: Cluster = limited(cluster(devices, bandwidth=1e9), int(memory_bytes))
    given = {"target": target} if target else {}
    forbid = ("tp", "pp", "offload")
    return Search(problem_of(linears(512, 4, 8), on, **given), 8, Overrides(forbid=forbid))


def states_bytes() -> int:
    return 18 * linears(512, 4, 8).graph.num_parameters()


@pytest.mark.parametrize("share", [1.0, 0.6, 0.5, 0.45, 0.4, 0.35])
def test_what_is_chosen_fits_in_the_course_of_its_step(share: float) -> None:
    memory_bytes = share * states_bytes()
    prediction = searching(memory_bytes).run().best.evaluation.prediction
    assert max(prediction.course_bytes) <= max(prediction.peak_memory_bytes) <= memory_bytes


def test_the_search_goes_on_without_what_was_refused() -> None:
    """By the most of each kind of memory ZeRO-2 fits; its step holds more."""
    memory_bytes = 0.45 * states_bytes()
    summed = searching(memory_bytes, SUMMED).run().best.plan
    assert summed.stages[0].zero == 2
    first = searching(memory_bytes)
    assert first.attempt() is None
    assert first.refused and first.excess_bytes > 0
    found = searching(memory_bytes).run()
    assert found.best.plan.stages[0].zero == 3
    assert found.phases_s["write out"] > 0


def test_where_nothing_is_left_the_least_that_lacks_is_said() -> None:
    memory_bytes = 1.2 * states_bytes()
    assert searching(memory_bytes, SUMMED, devices=1).run().best.fits
    with pytest.raises(
        InfeasibleError, match=r"in the course of its step .* [KM]iB more"
    ) as caught:
        searching(memory_bytes, devices=1).run()
    assert 0 < caught.value.shortfall_bytes[0] < 0.1 * memory_bytes
    assert caught.value.relaxations


@pytest.mark.parametrize("share", [0.30, 0.285])
def test_a_larger_space_loses_no_plan_that_fits(share: float) -> None:
    """Different meshes draft no plan again that was refused, in place of others like it."""
    on = limited(cluster(4, bandwidth=1e9), int(share * states_bytes()))
    for overrides in (Overrides(forbid=("pp",)), None):
        search = Search(problem_of(linears(512, 4, 8), on), 8, overrides or Overrides())
        assert search.run().best.fits
