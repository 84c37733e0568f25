"""Exact elimination: the least cost of a pairwise problem for every choice of a few kept nodes.

    minimise  Σ_n c_n(x_n) + Σ_(n,m) c_nm(x_n, x_m)   over all x but x_K, for every x_K

Every cost is a function of the nodes in its scope: an array over their states. A node v is
eliminated by replacing the functions F_v whose scope it is in by one,

    g(x_S) = min over x_v of Σ_(f ∈ F_v) f(x_v, x_S),   S the other nodes of F_v,

which moves no minimum, since no other function depends on v (bucket elimination:
Dechter 1999; non-serial dynamic programming: Bertelè and Brioschi 1972). The functions left depend
on the kept nodes K alone; their sum is the result. Backwards, the best x_v is where the minimum
over x_v was, at the x_S found before. All is numbers of the problem added up: ties go to the first
state of the node eliminated, +inf is illegal, and no tolerance is needed.

Which nodes are eliminated first decides only the effort: the entries of the arrays summed. The next
is always one whose sum is smallest, the first of those. The order depends on the structure alone
and is found once for all problems that share it (`_order`).

Problems that differ in few functions share the elimination of nodes in the scope of none of those:
these come first while their sums are SMALL, and are eliminated once (`Elimination`).

Where a sum would have more than `largest` entries, only nodes with two neighbours at most are
eliminated. That leaves pairs, and this core goes to the solver for every x_K, or to a descent where
the solver's time is over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from meshwright.costmodel.memo import Memo
from meshwright.planner.intra_op.pairwise import PairwiseProblem, Scope, restricted
from meshwright.planner.intra_op.solvers import objective_of, solve_pairwise
from meshwright.planner.intra_op.time_limit import SolverTime

Index = tuple[int, ...]

SMALL = 1_000  # entries that cost about as much as the call that sums them
LARGEST = 2_000_000  # entries: 16 MB, milliseconds


# --- the order, from structure alone -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeElimination:
    """The elimination of one node: functions `inputs`, each with the shape by which its axes are
    broadcast against the others', give function `output` over the nodes `rest`."""

    node: int
    rest: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """An elimination order, of nodes and cost functions counted from 0.

    `fixed` are the eliminations that depend on no function that changes, `changing` the others,
    `backwards` all of them, the last first. `core` are the nodes left to the solver, `remaining`
    the functions that are left, with their nodes. `position` of a node orders the axes of
    functions.
    """

    fixed: tuple[_NodeElimination, ...]
    changing: tuple[_NodeElimination, ...]
    backwards: tuple[_NodeElimination, ...]
    core: tuple[int, ...]
    remaining: tuple[tuple[int, tuple[int, ...]], ...]
    position: tuple[int, ...]


@lru_cache(maxsize=256)
def _order(
    sizes: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    changing: frozenset[int],
    keep: tuple[int, ...],
    largest: int,
) -> _Order:
    """The order for nodes of `sizes` states and functions of these `scopes`, of which those in
    `changing` change. Axes of functions lie in the order of elimination, so that the next node's is
    the first axis of all its functions."""
    free = [n for n in range(len(sizes)) if n not in keep]
    sequence = _sequence(sizes, scopes, changing, free, largest=largest)
    if len(sequence) < len(free):
        sequence = _sequence(sizes, scopes, changing, free, widest=2)
    core = tuple(n for n in free if n not in set(sequence))
    position = {n: k for k, n in enumerate((*sequence, *core, *keep))}
    buckets: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in sizes]
    remaining: list[tuple[int, tuple[int, ...]]] = []
    varies = [k in changing for k in range(len(scopes))]

    def add(function: int, scope: tuple[int, ...]) -> None:
        (buckets[scope[0]] if scope else remaining).append((function, scope))

    for k, scope in enumerate(scopes):
        add(k, tuple(sorted(scope, key=position.__getitem__)))
    fixed: list[_NodeElimination] = []
    later: list[_NodeElimination] = []
    for node in sequence:
        union = sorted({n for _, scope in buckets[node] for n in scope}, key=position.__getitem__)
        inputs = tuple(
            (function, tuple(sizes[n] if n in scope else 1 for n in union))
            for function, scope in buckets[node]
        )
        step = _NodeElimination(node=node, rest=tuple(union[1:]), inputs=inputs, output=len(varies))
        varies.append(any(varies[function] for function, _ in inputs))
        (later if varies[-1] else fixed).append(step)
        add(step.output, step.rest)
    remaining += [function for n in (*core, *keep) for function in buckets[n]]
    return _Order(
        fixed=tuple(fixed),
        changing=tuple(later),
        backwards=tuple(sorted([*fixed, *later], key=lambda step: -position[step.node])),
        core=core,
        remaining=tuple(remaining),
        position=tuple(position[n] for n in range(len(sizes))),
    )


def _sequence(
    sizes: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    changing: Collection[int],
    free: Sequence[int],
    *,
    largest: float = math.inf,
    widest: float = math.inf,
) -> list[int]:
    """Nodes in the order of elimination, up to the first that would need a sum of more than
    `largest` entries or has more than `widest` neighbours."""
    around: list[set[int]] = [set() for _ in sizes]
    varies = [False] * len(sizes)
    for k, scope in enumerate(scopes):
        for n in scope:
            around[n] |= set(scope) - {n}
            varies[n] |= k in changing

    def priority(n: int) -> tuple[bool, bool, int, int]:
        entries = sizes[n] * math.prod(sizes[m] for m in around[n])
        refused = entries > largest or len(around[n]) > widest
        return refused, varies[n] or entries > SMALL, entries, n

    priorities = {n: priority(n) for n in free}
    sequence: list[int] = []
    while priorities:
        n = min(priorities, key=priorities.__getitem__)
        if priorities.pop(n)[0]:
            break
        sequence.append(n)
        for m in around[n]:
            around[m] = (around[m] | around[n]) - {m, n}
            varies[m] |= varies[n]
        priorities |= {m: priority(m) for m in around[n] if m in priorities}
    return sequence


# --- the numbers ---------------------------------------------------------------------------------


class Elimination:
    """A problem with all nodes but `keep` eliminated. The costs of the scopes `changing` are given
    anew to each `solve`; what doesn't depend on them is eliminated here, once."""

    def __init__(
        self,
        problem: PairwiseProblem,
        keep: Sequence[str],
        changing: Collection[Scope] = (),
        *,
        largest: int = LARGEST,
    ) -> None:
        self._names = tuple(problem.unary)
        number = {name: k for k, name in enumerate(self._names)}
        sizes = tuple(map(len, problem.unary.values()))
        costs = problem.costs()
        # a node of one state is no axis of a pair: arrays have few dims, and its row's sum is known
        scopes = tuple(
            tuple(number[name] for name in scope if len(scope) == 1 or len(problem.unary[name]) > 1)
            for scope in costs
        )
        self._keep = tuple(number[name] for name in keep)
        self._shape = tuple(sizes[n] for n in self._keep)
        self._changing = {scope: k for k, scope in enumerate(costs) if scope in changing}
        self._order = _order(sizes, scopes, frozenset(self._changing.values()), self._keep, largest)
        position = self._order.position
        self._turned = {
            scope
            for scope, nodes in zip(costs, scopes, strict=True)
            if len(nodes) > 1 and position[nodes[0]] > position[nodes[1]]
        }
        known = {k: self._lined_up(*item) for k, item in enumerate(costs.items())}
        self._best = _run(self._order.fixed, known)
        later = {function for step in self._order.changing for function, _ in step.inputs}
        later.update(function for function, _ in self._order.remaining)
        self._known = {k: array for k, array in known.items() if k in later}
        self._descended: list[dict[str, int]] = []  # states of the core that descent found last

    def solve(
        self, changes: Mapping[Scope, np.ndarray] | None = None, time: SolverTime | None = None
    ) -> Minimum | None:
        """The least cost for all states of the kept nodes; None where no assignment is legal.
        Changing costs that are not given are as in the problem. A core is solved exactly in the
        `time` that its solver has, by default CORE_S."""
        known, best = self._eliminated(changes)
        solved: dict[Index, Mapping[int, int]] = {}
        costs, bound = self._least(known, solved, time or SolverTime())
        if not np.isfinite(costs).any():
            return None
        return Minimum(
            costs=costs,
            bound=bound,
            names=self._names,
            keep=self._keep,
            core=solved,
            best=best,
            steps=self._order.backwards,
        )

    def bound(
        self, changes: Mapping[Scope, np.ndarray] | None = None, time: SolverTime | None = None
    ) -> float:
        """Lower bound on the cost: the least one, where the solver has the time to find it."""
        known, _ = self._eliminated(changes)
        return self._least(known, {}, time or SolverTime(), descends=False)[1]

    def _eliminated(
        self, changes: Mapping[Scope, np.ndarray] | None
    ) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """The functions known with these changes, and the best state of each node eliminated."""
        known = dict(self._known)
        for scope, costs in (changes or {}).items():
            known[self._changing[scope]] = self._lined_up(scope, costs)
        return known, {**self._best, **_run(self._order.changing, known)}

    def _least(
        self,
        known: Mapping[int, np.ndarray],
        solved: dict[Index, Mapping[int, int]],
        time: SolverTime,
        *,
        descends: bool = True,
    ) -> tuple[np.ndarray, float]:
        """The least costs of the functions left, for all states of the kept nodes, and a bound."""
        costs, proved = (
            self._solve_core(known, solved, time, descends=descends)
            if self._order.core
            else (self._sum(known), True)
        )
        if proved:
            return costs, float(costs.min())
        # no assignment costs less than the least of each function together
        return costs, float(sum(known[function].min() for function, _ in self._order.remaining))

    def _lined_up(self, scope: Scope, costs: np.ndarray) -> np.ndarray:
        """Costs with axes in the order of elimination, without nodes of one state."""
        lined = costs.T if scope in self._turned else costs
        return lined.squeeze() if len(scope) > 1 else lined

    def _sum(self, known: Mapping[int, np.ndarray]) -> np.ndarray:
        """The sum of the functions left, over the states of the kept nodes."""
        total = np.zeros(self._shape)
        for function, scope in self._order.remaining:
            axes = zip(self._keep, self._shape, strict=True)
            total += known[function].reshape([size if n in scope else 1 for n, size in axes])
        return total

    def _solve_core(
        self,
        known: Mapping[int, np.ndarray],
        solved: dict[Index, Mapping[int, int]],
        time: SolverTime,
        *,
        descends: bool,
    ) -> tuple[np.ndarray, bool]:
        """The minimum over the core of the functions left, for all states of the kept nodes, by the
        solver, and after its time by a descent where one is wanted; the core's states go to
        `solved`. Whether all of it was proved."""
        constant, rest = 0.0, PairwiseProblem()
        for function, scope in self._order.remaining:
            costs, names = known[function], [str(n) for n in scope]
            if not scope:
                constant += float(costs)
            elif len(scope) == 1:
                rest.unary[names[0]] = rest.unary.get(names[0], 0.0) + costs
            else:
                rest.edge(names[0], names[1], costs)
        total, proved = np.full(self._shape, np.inf), True
        descent: Descent | None = None
        for index in np.ndindex(self._shape):
            fixed = dict(zip(map(str, self._keep), index, strict=True))
            unary = restricted(rest.unary, fixed)
            if not all(np.isfinite(costs).any() for costs in unary.values()):
                continue
            choice, in_time = _solved_in(time, unary, rest.pairs)
            proved &= in_time
            if not proved and not descends:
                break
            if choice is None and not in_time:
                descent = descent or Descent(rest.pairs)
                choice = descent.best(unary, self._descended)
                self._descended = [choice] if choice else self._descended
            if choice is not None:
                total[index] = constant + objective_of(choice, unary, rest.pairs)
                solved[index] = {int(name): state for name, state in choice.items()}
        return total, proved


def _solved_in(
    time: SolverTime, unary: Mapping[str, np.ndarray], pairs: Mapping[tuple[str, str], np.ndarray]
) -> tuple[Mapping[str, int] | None, bool]:
    """The solver's states, None without any, and whether it had the time to prove them."""
    if time.left_s() == 0:
        return None, False
    try:
        with time.spent():
            proof = solve_pairwise(unary, pairs, time_limit_s=time.left_s())
    except TimeoutError:
        return None, False
    return (proof.choice if proof else None), time.left_s() > 0


def _run(steps: Sequence[_NodeElimination], known: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Eliminate a node per step, adding to `known`; the best states of each node."""
    best: dict[int, np.ndarray] = {}
    for step in steps:
        (function, shape), *more = step.inputs
        total = known[function].reshape(shape)
        for function, shape in more:
            total = total + known[function].reshape(shape)
        known[step.output] = np.minimum.reduce(total, axis=0)
        best[step.node] = total.argmin(axis=0)
    return best


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minimum(Mapping[Index, Mapping[str, int]]):
    """The least cost for all states of the kept nodes, `costs` (states of the first, ...), +inf
    where illegal; and, as a mapping from their legal states, the states of all nodes that cost it.
    `bound` is a lower bound on the costs, the least of them where they are proved.
    """

    costs: np.ndarray
    bound: float
    names: Sequence[str]
    keep: Sequence[int]
    core: Mapping[Index, Mapping[int, int]]
    best: Mapping[int, np.ndarray]
    steps: Sequence[_NodeElimination]
    _choices: Memo[Index, Mapping[str, int]] = field(default_factory=Memo)

    def __getitem__(self, index: Index) -> Mapping[str, int]:
        return self._choices.of(index, lambda: self._way_back(index))

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, tuple) or len(index) != self.costs.ndim:
            return False
        inside = all(0 <= i < n for i, n in zip(index, self.costs.shape, strict=True))
        return inside and bool(self.costs[index] < np.inf)

    def __iter__(self) -> Iterator[Index]:
        return (index for index, cost in np.ndenumerate(self.costs) if cost < np.inf)

    def __len__(self) -> int:
        return int(np.isfinite(self.costs).sum())

    def _way_back(self, index: Index) -> dict[str, int]:
        if index not in self:
            raise KeyError(index)
        state = {**dict(zip(self.keep, index, strict=True)), **self.core.get(index, {})}
        for step in self.steps:
            state[step.node] = self.best[step.node].item(*(state[n] for n in step.rest))
        return {name: state[n] for n, name in enumerate(self.names)}


# --- without a proof -----------------------------------------------------------------------------
#
# Coordinate descent, for what the solver has no time left for: every node in turn takes its
# cheapest state given its neighbours', until none changes; several starts, the best of them. The
# cost is that of a legal assignment, no less than the least one.


SWEEPS = 50
STARTS = 4  # random ones, of a fixed seed
ILLEGAL = 1e9  # seconds: more than any legal assignment costs

Pairs = Mapping[tuple[str, str], np.ndarray]


class Descent:
    """Descents in problems with the same `pairs`."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._around: dict[str, list[tuple[str, np.ndarray]]] = {}  # (neighbour's state, node's)
        for (a, b), costs in pairs.items():
            finite = _finite(costs)
            self._around.setdefault(a, []).append((b, np.ascontiguousarray(finite.T)))
            self._around.setdefault(b, []).append((a, finite))

    def best(
        self, unary: Mapping[str, np.ndarray], known: Iterable[Mapping[str, int]] = ()
    ) -> dict[str, int] | None:
        """A cheap assignment, from the states `known` for like problems or from random ones; None
        where none that was met is legal."""
        draw = np.random.default_rng(0)
        starts = [dict(choice) for choice in known]
        starts.append({name: int(np.argmin(costs)) for name, costs in unary.items()})
        for _ in range(0 if starts[1:] else STARTS):  # of a like problem the states are good ones
            starts.append(
                {n: int(draw.choice(np.flatnonzero(np.isfinite(c)))) for n, c in unary.items()}
            )
        finite = {name: _finite(costs) for name, costs in unary.items()}
        best_s, best = np.inf, None
        for choice in starts:
            self._sweep(choice, finite)
            cost = objective_of(choice, unary, self.pairs)
            if cost < best_s:
                best_s, best = cost, choice
        return best

    def _sweep(self, choice: dict[str, int], unary: Mapping[str, np.ndarray]) -> None:
        """Improve a choice until no node has a cheaper state."""
        stale = set(unary)  # nodes of which a neighbour has changed since they chose
        for _ in range(SWEEPS):
            for name, node_costs in unary.items():
                if name not in stale:
                    continue
                stale.discard(name)
                around = self._around.get(name, [])
                costs = sum((rows[choice[other]] for other, rows in around), node_costs)
                state = int(costs.argmin())
                if state != choice[name]:
                    choice[name] = state
                    stale.update(other for other, _ in around)
            if not stale:
                return


def _finite(costs: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(costs), costs, ILLEGAL)
