"""Wherever a time limit ends a search there is a plan that fits, and a bound that holds or none."""

from __future__ import annotations

import itertools
import math
import time

import pytest

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from tests.helpers.enumeration import instance
from tests.helpers.planning import problem_of

FOREVER_S = 1e6
LIMITS_S = (0.0, 3.0, 10.0, 30.0, FOREVER_S)


@pytest.mark.parametrize("seed", [1, 4])
def test_time_may_end_anywhere(seed: int) -> None:
    """On a clock that goes on by a second whenever it is read: limits end while bounds are found,
    while blocks are solved, while plans are explored."""
    of, on, batch, _ = instance(seed)
    problem = problem_of(of, on)
    free = Search(problem, batch, Overrides()).run()
    bounded, complete = [], []
    for limit_s in LIMITS_S:
        search = Search(problem, batch, Overrides(), time_limit_s=limit_s)
        search.programs.time.clock = itertools.count(0.0).__next__
        hurried = search.run()
        assert hurried.best.fits
        assert hurried.best.step_time_s >= free.best.step_time_s * (1 - 1e-9)
        assert hurried.bound_s <= free.best.step_time_s * (1 + 1e-9)
        complete.append(hurried.complete)
        assert math.isinf(hurried.gap) is (hurried.bound_s == 0)
        bounded.append(hurried.bound_s > 0)
        search.programs.time.clock = time.monotonic  # nothing solved in a hurry is left
        again = Search(problem, batch, Overrides(), programs=search.programs).run()
        assert again.best.plan == free.best.plan
    assert (bounded[0], bounded[-1], complete[0], complete[-1]) == (False, True, False, True)
    assert complete == sorted(complete)
