"""Elimination and the solver against enumeration of every assignment, where one hands over to the
other, and the time that the solver has."""

import itertools
import math
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.intra_op import elimination, solvers
from meshwright.planner.intra_op.elimination import Elimination, Minimum
from meshwright.planner.intra_op.pairwise import PairwiseProblem
from meshwright.planner.intra_op.solvers import Certificate, objective_of, solve_pairwise
from meshwright.planner.intra_op.time_limit import CORE_S, SolverTime, TimeLimit

Draw = st.DrawFn


@st.composite
def problems(draw: Draw, most_nodes: int = 8) -> PairwiseProblem:
    """A random part of a k-tree, k up to 4: every node is tied to some of a clique of k before it.
    Names in any order; up to a third of the costs infinite, and in half of the problems some states
    altogether."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, width = draw(st.integers(1, most_nodes)), draw(st.integers(1, 4))
    illegal = draw(st.sampled_from([0.0, 0.0, 0.1, 0.35]))
    kept = draw(st.sampled_from([0.6, 1.0]))

    def costs(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < illegal, np.inf, rng.integers(0, 9, shape))

    names = [f"n{i}" for i in rng.permutation(count)]
    cliques: list[list[str]] = [[]]
    pairs: list[tuple[str, str]] = []
    for name in names:
        clique = cliques[rng.integers(len(cliques))]
        pairs += [(a, name) if rng.random() < 0.5 else (name, a) for a in clique]
        cliques.append([*clique, name])
        cliques += [[n for n in cliques[-1] if n != drop] for drop in cliques[-1]]
        cliques = [c for c in cliques if len(c) <= width]
    problem = PairwiseProblem()
    for name in sorted(names):
        size = int(rng.integers(1, 4))
        problem.node(name, range(size), costs(size))
    for a, b in pairs:
        if rng.random() < kept:
            shape = len(problem.states[a]), len(problem.states[b])
            problem.edge(a, b, costs(*shape))
            if rng.random() < 0.2:  # from the other side, too: the edges add up
                problem.edge(b, a, costs(*shape[::-1]))
    return problem


def test_costs_of_an_edge_add_up_from_both_sides() -> None:
    problem, costs = PairwiseProblem(), np.arange(6.0).reshape(2, 3)
    problem.node("a", range(2), [0, 0])
    problem.node("b", range(3), [0, 0, 0])
    for a, b, added in (("a", "b", costs), ("b", "a", 10 * costs.T), ("a", "b", 100 * costs)):
        problem.edge(a, b, added)
    assert [*problem.pairs] == [("a", "b")]
    np.testing.assert_array_equal(problem.pairs["a", "b"], 111 * costs)


def enumerated(problem: PairwiseProblem, keep: list[str]) -> np.ndarray:
    """The least cost by the states of the kept nodes, from the cost of every assignment."""
    names = [*keep, *(n for n in problem.unary if n not in keep)]
    total = np.zeros([len(problem.states[n]) for n in names])
    for scope, costs in problem.costs().items():
        axes = [names.index(n) for n in scope]
        turned = costs if axes == sorted(axes) else costs.T
        shape = [len(problem.states[n]) if n in scope else 1 for n in names]
        total = total + turned.reshape(shape)
    return total.min(axis=tuple(range(len(keep), len(names))))


def check(found: Minimum | None, problem: PairwiseProblem, keep: list[str]) -> None:
    """Table and assignments are those of enumeration. All costs are small integers: no rounding."""
    best = enumerated(problem, keep)
    if found is None:
        assert not np.isfinite(best).any()
        return
    np.testing.assert_array_equal(found.costs, best)
    assert list(found) == [i for i, cost in np.ndenumerate(best) if np.isfinite(cost)]
    assert len(found) == len(list(found)) > 0
    for index, cost in np.ndenumerate(best):
        assert (index in found) == np.isfinite(cost)
        if index in found:
            assert set(found[index]) == set(problem.unary)
            assert [found[index][n] for n in keep] == list(index)
            assert objective_of(found[index], problem.unary, problem.pairs) == cost


def kept_of(problem: PairwiseProblem, count: int, turn: bool) -> list[str]:
    keep = list(problem.unary)[1 : 1 + count]
    return keep[::-1] if turn else keep


@settings(max_examples=200)
@given(problems(), st.integers(0, 3), st.booleans())
def test_elimination_equals_enumeration(problem: PairwiseProblem, count: int, turn: bool) -> None:
    keep = kept_of(problem, count, turn)
    check(Elimination(problem, keep).solve(), problem, keep)


@settings(max_examples=100)
@given(problems(), st.integers(0, 2), st.data())
def test_changed_factors(problem: PairwiseProblem, count: int, data: st.DataObject) -> None:
    """Whatever is given to one solve has no part in the next."""
    keep, factors = kept_of(problem, count, turn=False), problem.costs()
    changing = data.draw(st.sets(st.sampled_from(sorted(factors))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    program = Elimination(problem, keep, changing)
    for _ in range(3):
        given_ = {s: rng.integers(0, 9, factors[s].shape).astype(float) for s in sorted(changing)}
        check(program.solve(given_), problem.changed(given_), keep)
    check(program.solve(), problem, keep)


def test_a_factor_that_was_not_said_to_change_is_refused() -> None:
    problem = chain(3)
    program = Elimination(problem, [], {("n0",)})
    with pytest.raises(KeyError):
        program.solve({("n1",): np.zeros(2)})


@settings(max_examples=40)
@given(problems(most_nodes=6), st.integers(0, 2), st.integers(1, 30))
def test_the_solver_gets_what_is_large(problem: PairwiseProblem, count: int, largest: int) -> None:
    keep = kept_of(problem, count, turn=True)
    check(Elimination(problem, keep, largest=largest).solve(), problem, keep)


def chain(length: int) -> PairwiseProblem:
    problem = PairwiseProblem()
    for k in range(length):
        problem.node(f"n{k}", range(2), [0.0, 1.0])
    for k in range(length - 1):
        problem.edge(f"n{k}", f"n{k + 1}", np.ones((2, 2)))
    return problem


def clique(count: int, states: int) -> PairwiseProblem:
    """Neighbours differ, at a price of 1 for each pair that doesn't."""
    problem = PairwiseProblem()
    for k in range(count):
        problem.node(f"n{k}", range(states), [0.0] * states)
    for a, b in itertools.combinations(problem.unary, 2):
        problem.edge(a, b, np.eye(states))
    return problem


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of nodes that the solver is called with."""
    sizes: list[int] = []

    def counted(unary: dict[str, Any], pairs: Any, **options: float) -> Certificate | None:
        sizes.append(len(unary))
        return solve_pairwise(unary, pairs, **options)

    monkeypatch.setattr(elimination, "solve_pairwise", counted)
    return sizes


def test_the_solver_is_called_for_large_cores_only(calls: list[int]) -> None:
    """The first sum over a clique of 5 nodes of 3 states has 243 entries."""
    problem, keep = clique(5, 3), ["n0"]
    check(Elimination(problem, keep, largest=243).solve(), problem, keep)
    assert not calls
    check(Elimination(problem, keep, largest=242).solve(), problem, keep)
    assert calls == [5, 5, 5]


def test_beside_a_core_all_with_two_neighbours_is_eliminated(calls: list[int]) -> None:
    problem = clique(4, 2)
    for k in range(4):
        problem.node(f"leaf{k}", range(3), [0.0, 1.0, 2.0])
        problem.edge(f"leaf{k}", f"n{k}", np.arange(6.0).reshape(3, 2))
    problem.node("alone", range(2), [5.0, 4.0])
    check(Elimination(problem, [], largest=6).solve(), problem, [])
    assert calls == [4]


def test_no_sum_over_a_long_chain_is_larger_than_a_link(calls: list[int]) -> None:
    problem, keep = chain(400), ["n0", "n399"]
    found = Elimination(problem, keep, largest=8).solve()
    assert not calls
    np.testing.assert_array_equal(found.costs, 399 + np.array([[0, 1], [1, 2]]))


@settings(max_examples=60)
@given(problems(most_nodes=6), st.integers(0, 2))
def test_a_core_without_time_left_gets_legal_states(problem: PairwiseProblem, count: int) -> None:
    keep = kept_of(problem, count, turn=False)
    best = enumerated(problem, keep)
    found = Elimination(problem, keep, largest=1).solve(time=SolverTime(own_s=0.0))
    if found is None:
        return  # descent may meet no legal state; the solver would
    legal = np.isfinite(found.costs)
    assert (found.costs[legal] >= best[legal]).all()
    assert not np.isfinite(found.costs[~np.isfinite(best)]).any()
    assert found.bound <= best.min()
    for index in found:
        cost = objective_of(found[index], problem.unary, problem.pairs)
        assert cost == found.costs[index]


def test_a_large_core_without_enough_time_ends_above_its_bound() -> None:
    found = Elimination(tied(24, 12), ["n0"]).solve(time=SolverTime(own_s=0.5))
    assert len(found) == 12
    assert found.bound < found.costs.min()


def test_ties_go_to_the_first_state_every_time() -> None:
    first, again = (Elimination(clique(3, 3), ["n1"]).solve() for _ in range(2))
    assert [dict(first[i]) for i in first] == [dict(again[i]) for i in again]
    tied = PairwiseProblem()
    tied.node("a", range(3), [2.0, 1.0, 1.0])
    assert Elimination(tied, []).solve()[()] == {"a": 1}


def test_only_legal_states_have_an_assignment() -> None:
    problem = chain(3)
    problem.edge("n0", "n1", np.array([[0.0, 0.0], [np.inf, np.inf]]))
    found = Elimination(problem, ["n0"]).solve()
    assert list(found) == [(0,)]
    for absent in ((1,), (2,), (-1,), (0, 0), (), "n0"):
        assert absent not in found
        with pytest.raises(KeyError):
            found[absent]  # type: ignore[index]


def test_a_problem_without_nodes_costs_nothing() -> None:
    found, proof = Elimination(PairwiseProblem(), []).solve(), solve_pairwise({}, {})
    assert (float(found.costs), dict(found[()])) == (0.0, {})
    assert (proof.objective, dict(proof.choice)) == (0.0, {})


def test_nodes_of_one_state_are_no_dims() -> None:
    """A hub with more neighbours than numpy's arrays have dims."""
    problem = PairwiseProblem()
    problem.node("hub", range(2), [5.0, 3.0])
    for k in range(100):
        problem.node(f"n{k}", range(1), [1.0])
        costs = np.array([[0.0], [1.0 / 32]])
        problem.edge("hub", f"n{k}", costs) if k % 2 else problem.edge(f"n{k}", "hub", costs.T)
    for keep, wanted in (((), 105.0), (("hub",), [105.0, 106.125])):
        found = Elimination(problem, keep).solve()
        np.testing.assert_array_equal(found.costs, wanted)


# --- limits on a clock that the test moves, and what the solver is given of them ------------------


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

    def solve(unary: Any, pairs: Any, *, time_limit_s: float) -> Certificate | None:
        given.append(time_limit_s)
        clock.now_s += 4
        return solve_pairwise(unary, pairs)

    monkeypatch.setattr(elimination, "solve_pairwise", solve)
    time = SolverTime(TimeLimit(clock))
    first, second = (Elimination(tied(), ["n0"], largest=1).solve(time=time) for _ in range(2))
    assert given == [CORE_S, CORE_S - 4, CORE_S - 8]
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


# --- the solver ----------------------------------------------------------------------------------

# An odd cycle that wants neighbours to differ: half of each state satisfies the relaxation.
TRIANGLE = {pair: np.eye(2) for pair in itertools.combinations("abc", 2)}


@settings(max_examples=80)
@given(problems(most_nodes=5), st.integers(-6, 3))
def test_the_solvers_solution_equals_enumeration(problem: PairwiseProblem, power: int) -> None:
    scale = 10.0**power
    unary, pairs = (
        {scope: scale * costs for scope, costs in of.items()}
        for of in (problem.unary, problem.pairs)
    )
    best = scale * float(enumerated(problem, []))
    found = solve_pairwise(unary, pairs)
    if best == np.inf:
        assert found is None
        return
    assert found.objective == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert found.objective == objective_of(found.choice, unary, pairs)
    assert set(found.choice) == set(unary)
    assert found.bound <= best + 1e-6 * abs(best) + 1e-12
    assert found.gap >= -1e-6


def test_an_integral_relaxation_is_its_own_proof() -> None:
    unary = {"a": np.array([3.0, 1.0]), "b": np.array([0.0, 5.0])}
    found = solve_pairwise(unary, {("a", "b"): np.array([[0.0, 0.0], [9.0, 0.0]])})
    assert (found.choice, found.objective) == ({"a": 0, "b": 0}, 3.0)
    assert found.integral_relaxation
    assert found.bound == pytest.approx(3.0)
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    assert found.solver == "HiGHS"
    assert found.time_s > 0


def test_a_fractional_relaxation_leaves_a_gap() -> None:
    twice = {pair: 2 * same for pair, same in TRIANGLE.items()}
    found = solve_pairwise({name: np.zeros(2) for name in "abc"}, twice)
    assert found.objective == 2.0
    assert not found.integral_relaxation
    assert found.bound < 2.0
    assert found.gap == pytest.approx(1.0 - found.bound / 2.0)


def test_what_no_node_or_edge_allows_has_no_solution() -> None:
    inf = np.inf
    assert solve_pairwise({"a": np.array([inf, inf])}, {}) is None
    blocked = {("a", "b"): np.array([[inf, 1.0], [inf, inf]])}
    assert solve_pairwise({"a": np.array([1.0, 1.0]), "b": np.array([1.0, inf])}, blocked) is None


def test_a_feasible_relaxation_without_an_integral_solution_has_none() -> None:
    for states, solved in ((2, False), (3, True)):
        differ = np.where(np.eye(states) > 0, np.inf, 0.0)
        found = solve_pairwise(
            {name: np.zeros(states) for name in "abc"}, dict.fromkeys(TRIANGLE, differ)
        )
        assert (found is not None) == solved


class Missing:
    """Stand-in for a solver class that is not installed."""

    def __init__(self, **options: object) -> None: ...

    def available(self) -> bool:
        return False


@pytest.mark.skipif(not pulp.PULP_CBC_CMD(msg=False).available(), reason="no CBC binary here")
def test_cbc_where_highs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp, "HiGHS", Missing)
    found = solve_pairwise({name: np.zeros(2) for name in "abc"}, TRIANGLE)
    assert (found.solver, found.objective) == ("PULP_CBC_CMD", 1.0)


def test_no_solver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HiGHS", "PULP_CBC_CMD", "COIN_CMD"):
        monkeypatch.setattr(pulp, name, Missing)
    with pytest.raises(RuntimeError, match="pip install highspy"):
        solve_pairwise({"a": np.zeros(2)}, {})


def test_a_solver_that_pulp_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pulp, "COIN_CMD")
    monkeypatch.setattr(pulp, "PULP_CBC_CMD", Missing)
    assert solvers._solver(None)[1] == "HiGHS"
