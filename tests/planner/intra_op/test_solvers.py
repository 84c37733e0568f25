"""The pairwise program against enumeration of every assignment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.intra_op import solvers
from meshwright.planner.intra_op.solvers import Certificate, objective_of, solve_pairwise

Unary = Mapping[str, np.ndarray]
Pairs = Mapping[tuple[str, str], np.ndarray]

# An odd cycle that wants neighbours to differ: half of each state satisfies the relaxation.
TRIANGLE: Pairs = {pair: np.eye(2) for pair in itertools.combinations("abc", 2)}


def brute_force(unary: Unary, pairs: Pairs) -> float:
    every = itertools.product(*(range(len(costs)) for costs in unary.values()))
    return min(objective_of(dict(zip(unary, s, strict=True)), unary, pairs) for s in every)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[tuple[str, str], np.ndarray]]:
    """Up to five nodes of up to three states, any edges, up to a third of the entries infinite."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 10.0 ** draw(st.integers(-6, 3))
    illegal = draw(st.sampled_from([0.0, 0.1, 0.35]))

    def costs(*shape: int) -> np.ndarray:
        values = rng.integers(0, 9, shape) * scale
        return np.where(rng.random(shape) < illegal, np.inf, values)

    names = "abcde"[: draw(st.integers(1, 5))]
    unary = {name: costs(draw(st.integers(1, 3))) for name in names}
    edges = [pair for pair in itertools.combinations(names, 2) if draw(st.booleans())]
    flipped = [pair if draw(st.booleans()) else pair[::-1] for pair in edges]
    return unary, {(a, b): costs(len(unary[a]), len(unary[b])) for a, b in flipped}


@settings(max_examples=80)
@given(problems())
def test_solution_equals_enumeration(
    problem: tuple[dict[str, np.ndarray], dict[tuple[str, str], np.ndarray]],
) -> None:
    unary, pairs = problem
    best = brute_force(unary, pairs)
    found = solve_pairwise(unary, pairs)
    if best == np.inf:
        assert found is None
        return
    assert found is not None
    assert found.objective == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert found.objective == objective_of(found.choice, unary, pairs)
    assert set(found.choice) == set(unary)
    assert found.bound <= best + 1e-6 * abs(best) + 1e-12
    assert found.gap >= -1e-6


def test_an_integral_relaxation_is_its_own_proof() -> None:
    unary = {"a": np.array([3.0, 1.0]), "b": np.array([0.0, 5.0])}
    found = solve_pairwise(unary, {("a", "b"): np.array([[0.0, 0.0], [9.0, 0.0]])})
    assert found is not None
    assert (found.choice, found.objective) == ({"a": 0, "b": 0}, 3.0)
    assert found.integral_relaxation
    assert found.bound == pytest.approx(3.0)
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    assert found.solver == "HiGHS"
    assert found.time_s > 0


def test_a_fractional_relaxation_leaves_a_gap() -> None:
    found = solve_pairwise({name: np.zeros(2) for name in "abc"}, TRIANGLE)
    assert found is not None
    assert found.objective == 1.0
    assert not found.integral_relaxation
    assert found.bound < 1.0
    assert found.gap == pytest.approx(1.0 - found.bound)


def test_what_no_node_or_edge_allows_has_no_solution() -> None:
    inf = np.inf
    assert solve_pairwise({"a": np.array([inf, inf])}, {}) is None
    blocked = {("a", "b"): np.array([[inf, 1.0], [inf, inf]])}
    assert solve_pairwise({"a": np.array([1.0, 1.0]), "b": np.array([1.0, inf])}, blocked) is None


def test_a_feasible_relaxation_without_an_integral_solution_has_none() -> None:
    differ = {pair: np.where(same > 0, np.inf, 0.0) for pair, same in TRIANGLE.items()}
    assert solve_pairwise({name: np.zeros(2) for name in "abc"}, differ) is None
    assert (
        solve_pairwise(
            {name: np.zeros(3) for name in "abc"},
            {pair: np.where(np.eye(3) > 0, np.inf, 0.0) for pair in TRIANGLE},
        )
        is not None
    )


def test_no_nodes_cost_nothing() -> None:
    found = solve_pairwise({}, {})
    assert found is not None
    assert (dict(found.choice), found.objective) == ({}, 0.0)


def _unavailable(*names: str) -> dict[str, Any]:
    """Stand-ins for solver classes that are not installed."""

    class Missing:
        def __init__(self, **options: object) -> None: ...

        def available(self) -> bool:
            return False

    return dict.fromkeys(names, Missing)


@pytest.mark.skipif(not pulp.PULP_CBC_CMD(msg=False).available(), reason="no CBC binary here")
def test_cbc_where_highs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, missing in _unavailable("HiGHS").items():
        monkeypatch.setattr(pulp, name, missing)
    found = solve_pairwise({name: np.zeros(2) for name in "abc"}, TRIANGLE)
    assert found is not None
    assert (found.solver, found.objective) == ("PULP_CBC_CMD", 1.0)


def test_no_solver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, missing in _unavailable("HiGHS", "PULP_CBC_CMD", "COIN_CMD").items():
        monkeypatch.setattr(pulp, name, missing)
    with pytest.raises(RuntimeError, match="pip install highspy"):
        solve_pairwise({"a": np.zeros(2)}, {})


def test_a_solver_class_that_pulp_does_not_have_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(pulp, "COIN_CMD")
    monkeypatch.setattr(pulp, "PULP_CBC_CMD", _unavailable("x")["x"])
    assert solvers._solver(None)[1] == "HiGHS"


def test_gap_is_relative() -> None:
    proof = Certificate(
        choice={}, objective=2.0, bound=1.5, solver="", integral_relaxation=False, time_s=0.0
    )
    assert proof.gap == 0.25
