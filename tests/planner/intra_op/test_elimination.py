"""Elimination against enumeration of every assignment, and where it hands over to the solver."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.intra_op import elimination
from meshwright.planner.intra_op.elimination import Elimination, Minimum
from meshwright.planner.intra_op.pairwise import Pair, PairwiseProblem, restricted
from meshwright.planner.intra_op.solvers import Certificate, objective_of, solve_pairwise
from meshwright.planner.intra_op.time_limit import SolverTime

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
def test_factors_that_change_are_solved_anew(
    problem: PairwiseProblem, count: int, data: st.DataObject
) -> None:
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
def test_what_is_too_large_goes_to_the_solver(
    problem: PairwiseProblem, count: int, largest: int
) -> None:
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

    def counted(
        unary: dict[str, np.ndarray], pairs: dict[Pair, np.ndarray], **options: float
    ) -> Certificate | None:
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
    assert found is not None
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
    rng = np.random.default_rng(0)
    problem = PairwiseProblem()
    for k in range(24):
        problem.node(f"n{k}", range(12), rng.random(12))
    for a, b in itertools.combinations(range(24), 2):
        problem.edge(f"n{a}", f"n{b}", rng.random((12, 12)))
    found = Elimination(problem, ["n0"]).solve(time=SolverTime(own_s=0.5))
    assert found is not None and len(found) == 12
    assert found.bound < found.costs.min()


def test_ties_go_to_the_first_state_every_time() -> None:
    problem = clique(3, 3)
    again = [Elimination(clique(3, 3), ["n1"]).solve() for _ in range(2)]
    assert again[0] is not None
    assert again[1] is not None
    assert [dict(again[0][i]) for i in again[0]] == [dict(again[1][i]) for i in again[1]]
    tied = PairwiseProblem()
    tied.node("a", range(3), [2.0, 1.0, 1.0])
    found = Elimination(tied, []).solve()
    assert found is not None
    assert found[()] == {"a": 1}
    assert enumerated(problem, []) == 0


def test_only_legal_states_have_an_assignment() -> None:
    problem = chain(3)
    problem.edge("n0", "n1", np.array([[0.0, 0.0], [np.inf, np.inf]]))
    found = Elimination(problem, ["n0"]).solve()
    assert found is not None
    assert list(found) == [(0,)]
    for absent in ((1,), (2,), (-1,), (0, 0), (), "n0"):
        assert absent not in found
        with pytest.raises(KeyError):
            found[absent]  # type: ignore[index]


def test_restricted_nodes_keep_one_state() -> None:
    unary = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 4.0])}
    found = restricted(unary, {"b": 1})
    np.testing.assert_array_equal(found["a"], [1.0, 2.0])
    np.testing.assert_array_equal(found["b"], [np.inf, 4.0])


def test_a_problem_without_nodes_costs_nothing() -> None:
    found = Elimination(PairwiseProblem(), []).solve()
    assert found is not None
    assert (float(found.costs), dict(found[()])) == (0.0, {})


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
        assert found is not None
        np.testing.assert_array_equal(found.costs, wanted)
