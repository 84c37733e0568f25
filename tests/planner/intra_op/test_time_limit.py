"""Limits on a clock that the test moves, and what the solver is given of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest

from meshwright.planner.intra_op import elimination
from meshwright.planner.intra_op.elimination import Elimination
from meshwright.planner.intra_op.pairwise import PairwiseProblem
from meshwright.planner.intra_op.solvers import Certificate, solve_pairwise
from meshwright.planner.intra_op.time_limit import CORE_S, SolverTime, TimeLimit


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tied(nodes: int = 5, states: int = 3) -> PairwiseProblem:
    """All nodes tied to all others: a core, where sums may have few entries."""
    rng = np.random.default_rng(0)
    problem = PairwiseProblem()
    for k in range(nodes):
        problem.node(f"n{k}", range(states), rng.random(states))
    for a, b in itertools.combinations(range(nodes), 2):
        problem.edge(f"n{a}", f"n{b}", rng.random((states, states)))
    return problem


def test_of_nested_limits_the_first_to_end_counts() -> None:
    clock = Clock()
    limit = TimeLimit(clock)
    assert limit.left_s() == math.inf and not limit.over()
    with limit.until(limit.after(30)):
        with limit.until(limit.after(60)):
            assert limit.left_s() == 30
        with limit.until(limit.after(10)):
            clock.now_s += 10
            assert limit.over()
        assert limit.left_s() == 20
        with limit.until(limit.after(None)):
            clock.now_s += 50
            assert limit.over() and limit.left_s() == 0
    assert limit.left_s() == math.inf


def test_a_solver_has_its_own_seconds_and_no_more_than_are_left() -> None:
    clock = Clock()
    limit = TimeLimit(clock)
    time = SolverTime(limit)
    assert time.left_s() == CORE_S
    with time.spent():
        clock.now_s += 4
    assert time.left_s() == CORE_S - 4
    with limit.until(limit.after(1)):
        assert time.left_s() == 1
    with pytest.raises(TimeoutError), time.spent():
        clock.now_s += 50
        raise TimeoutError
    assert time.left_s() == 0


def test_solves_of_a_kind_of_block_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the solver takes four seconds here: of two problems with three states at an end
    the third call has what is left, and nothing is asked after it."""
    clock, given = Clock(), list[float]()

    def solve(
        unary: Mapping[str, np.ndarray],
        pairs: Mapping[tuple[str, str], np.ndarray],
        *,
        time_limit_s: float,
    ) -> Certificate | None:
        given.append(time_limit_s)
        clock.now_s += 4
        return solve_pairwise(unary, pairs)

    monkeypatch.setattr(elimination, "solve_pairwise", solve)
    time = SolverTime(TimeLimit(clock))
    first, second = (Elimination(tied(), ["n0"], largest=1).solve(time=time) for _ in range(2))
    assert given == [CORE_S, CORE_S - 4, CORE_S - 8]
    assert first is not None and second is not None
    assert len(first) == len(second) == 3
    assert second.bound <= first.costs.min()


def test_a_bound_without_time_is_no_more_than_the_least_cost() -> None:
    problem = tied()
    exact = Elimination(problem, ["n0"]).bound()
    core = Elimination(problem, ["n0"], largest=1)
    assert core.bound() == pytest.approx(exact)
    assert 0 < core.bound(time=SolverTime(own_s=0.0)) < exact


def test_the_solver_says_when_the_time_was_too_short() -> None:
    problem = tied()
    with pytest.raises(TimeoutError):
        solve_pairwise(problem.unary, problem.pairs, time_limit_s=1e-9)
