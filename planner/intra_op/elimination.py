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
eliminated. That leaves pairs, and this core goes to the solver for every x_K.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from meshwright.planner.intra_op.descent import descend, least
from meshwright.planner.intra_op.solvers import objective_of, solve_pairwise

S = TypeVar("S", bound=Hashable)

Pair = tuple[str, str]
Scope = tuple[str, ...]  # the nodes that a cost depends on: one or two in a problem
Index = tuple[int, ...]

SMALL = 1_000  # entries that cost about as much as the call that sums them
LARGEST = 2_000_000  # entries: 16 MB, milliseconds
CORE_S = 10.0  # of the solver for one core, in all states of the kept nodes


@dataclass(slots=True)
class PairwiseProblem:
    """Nodes with states, and costs in seconds; +inf is illegal.

    `unary` are node costs (s,), `pairs` edge costs (s, t), over the states of their nodes.
    """

    states: dict[str, Sequence[Any]] = field(default_factory=dict)
    unary: dict[str, np.ndarray] = field(default_factory=dict)
    pairs: dict[Pair, np.ndarray] = field(default_factory=dict)

    def node(self, name: str, states: Sequence[Any], costs: ArrayLike) -> None:
        self.states[name] = states
        self.unary[name] = np.asarray(costs, dtype=float)

    def edge(self, a: str, b: str, costs: np.ndarray) -> None:
        """Add costs (states of a, states of b) to those of the edge between a and b."""
        if (b, a) in self.pairs:
            self.pairs[b, a] = self.pairs[b, a] + costs.T
        else:
            self.pairs[a, b] = self.pairs.get((a, b), 0.0) + costs

    def costs(self) -> dict[Scope, np.ndarray]:
        """All costs, by the nodes that they depend on: first nodes', then edges'."""
        nodes: dict[Scope, np.ndarray] = {(name,): costs for name, costs in self.unary.items()}
        return nodes | dict(self.pairs.items())

    def changed(self, changes: Mapping[Scope, np.ndarray]) -> PairwiseProblem:
        """The same problem with these costs in the place of its own."""
        unary, pairs = dict(self.unary), dict(self.pairs)
        for scope, costs in changes.items():
            if len(scope) == 1:
                unary[scope[0]] = costs
            else:
                pairs[scope[0], scope[1]] = costs
        return PairwiseProblem(states=self.states, unary=unary, pairs=pairs)


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
    `backwards` all of them, the last first. `core` are the nodes left to the solver, `left` the
    functions left, with their nodes. `position` of a node orders the axes of functions.
    """

    fixed: tuple[_NodeElimination, ...]
    changing: tuple[_NodeElimination, ...]
    backwards: tuple[_NodeElimination, ...]
    core: tuple[int, ...]
    left: tuple[tuple[int, tuple[int, ...]], ...]
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
    left: list[tuple[int, tuple[int, ...]]] = []
    varies = [k in changing for k in range(len(scopes))]

    def add(function: int, scope: tuple[int, ...]) -> None:
        (buckets[scope[0]] if scope else left).append((function, scope))

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
    left += [pair for n in (*core, *keep) for pair in buckets[n]]
    return _Order(
        fixed=tuple(fixed),
        changing=tuple(later),
        backwards=tuple(sorted([*fixed, *later], key=lambda step: -position[step.node])),
        core=core,
        left=tuple(left),
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
        later.update(function for function, _ in self._order.left)
        self._known = {k: array for k, array in known.items() if k in later}

    def solve(self, changes: Mapping[Scope, np.ndarray] | None = None) -> Minimum | None:
        """The least cost for all states of the kept nodes; None where no assignment is legal.
        Changing costs that are not given are as in the problem."""
        known = dict(self._known)
        for scope, costs in (changes or {}).items():
            known[self._changing[scope]] = self._lined_up(scope, costs)
        best = {**self._best, **_run(self._order.changing, known)}
        solved: dict[Index, Mapping[int, int]] = {}
        proved = True
        if self._order.core:
            costs, proved = self._solve_core(known, solved)
        else:
            costs = self._sum(known)
        if not np.isfinite(costs).any():
            return None
        return Minimum(
            costs=costs,
            bound=float(costs.min()) if proved else least(known[f] for f, _ in self._order.left),
            names=self._names,
            keep=self._keep,
            core=solved,
            best=best,
            steps=self._order.backwards,
        )

    def _lined_up(self, scope: Scope, costs: np.ndarray) -> np.ndarray:
        """Costs with axes in the order of elimination, without nodes of one state."""
        lined = costs.T if scope in self._turned else costs
        return lined.squeeze() if len(scope) > 1 else lined

    def _sum(self, known: Mapping[int, np.ndarray]) -> np.ndarray:
        """The sum of the functions left, over the states of the kept nodes."""
        total = np.zeros(self._shape)
        for function, scope in self._order.left:
            axes = zip(self._keep, self._shape, strict=True)
            total += known[function].reshape([size if n in scope else 1 for n, size in axes])
        return total

    def _solve_core(
        self, known: Mapping[int, np.ndarray], solved: dict[Index, Mapping[int, int]]
    ) -> tuple[np.ndarray, bool]:
        """The minimum over the core of the functions left, for all states of the kept nodes, by the
        solver; the core's states go to `solved`. Whether all of it was proved: time may be out."""
        constant, rest = 0.0, PairwiseProblem()
        for function, scope in self._order.left:
            costs, names = known[function], [str(n) for n in scope]
            if not scope:
                constant += float(costs)
            elif len(scope) == 1:
                rest.unary[names[0]] = rest.unary.get(names[0], 0.0) + costs
            else:
                rest.edge(names[0], names[1], costs)
        total, proved = np.full(self._shape, np.inf), True
        ends_s = time.monotonic() + CORE_S
        for index in np.ndindex(self._shape):
            fixed = dict(zip(map(str, self._keep), index, strict=True))
            unary = restricted(rest.unary, fixed)
            if not all(np.isfinite(costs).any() for costs in unary.values()):
                continue
            choice = None
            if (left_s := ends_s - time.monotonic()) > 0:
                certificate = solve_pairwise(unary, rest.pairs, time_limit_s=left_s)
                choice = certificate.choice if certificate else None
            if time.monotonic() >= ends_s:
                proved = False
                like = [{str(n): s for n, s in found.items()} for found in solved.values()]
                choice = choice or descend(unary, rest.pairs, like[-1:])
            if choice is not None:
                total[index] = constant + objective_of(choice, unary, rest.pairs)
                solved[index] = {int(name): state for name, state in choice.items()}
        return total, proved


def _run(steps: Sequence[_NodeElimination], known: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Eliminate a node per step and add the resulting function to `known`; for each node, its best
    state for all states of the step's other nodes."""
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
    Nothing costs less than `bound`, which is the least of the costs where they are proved.
    """

    costs: np.ndarray
    bound: float
    names: Sequence[str]
    keep: Sequence[int]
    core: Mapping[Index, Mapping[int, int]]
    best: Mapping[int, np.ndarray]
    steps: Sequence[_NodeElimination]
    _cache: dict[Index, Mapping[str, int]] = field(default_factory=dict)

    def __getitem__(self, index: Index) -> Mapping[str, int]:
        if index not in self._cache:
            if index not in self:
                raise KeyError(index)
            self._cache[index] = self._way_back(index)
        return self._cache[index]

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
        state = {**dict(zip(self.keep, index, strict=True)), **self.core.get(index, {})}
        for step in self.steps:
            state[step.node] = self.best[step.node].item(*(state[n] for n in step.rest))
        return {name: state[n] for n, name in enumerate(self.names)}


def restricted(unary: Mapping[str, np.ndarray], states: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Node costs by which these nodes must take these states: +inf for all others."""
    fixed = dict(unary)
    for name, state in states.items():
        fixed[name] = np.where(np.arange(len(fixed[name])) == state, fixed[name], np.inf)
    return fixed


def for_all_pairs(
    price: Callable[[S, S], float | tuple[float, ...]], left: Sequence[S], right: Sequence[S]
) -> np.ndarray:
    """(left, right) or (left, right, n): prices of all pairs, of equal pairs found once."""
    rows, columns = ({s: k for k, s in enumerate(dict.fromkeys(side))} for side in (left, right))
    prices = np.array([[price(s, t) for t in columns] for s in rows])
    return prices[np.ix_([rows[s] for s in left], [columns[t] for t in right])]
