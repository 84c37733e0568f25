"""Exact elimination: the least cost of a pairwise problem for every choice of a few kept nodes.

    minimise  Σ_n c_n(x_n) + Σ_(n,m) c_nm(x_n, x_m)   over all x but x_K, for every x_K

Every cost is a factor: an array over the states of the nodes it knows. A node v is eliminated by
replacing the factors F_v that know it by one,

    g(x_S) = min over x_v of Σ_(f ∈ F_v) f(x_v, x_S),   S the other nodes of F_v,

which moves no minimum, since no other factor knows v (bucket elimination:
Dechter 1999; non-serial dynamic programming: Bertelè and Brioschi 1972). The factors left know only
the kept nodes K, and their sum is the table that was asked for. Backwards, the best x_v is where
the minimum over x_v was, at the x_S found before. All is numbers of the problem added up: ties go
to the first state of the node eliminated, +inf is illegal, and no tolerance is needed.

Which nodes are eliminated first decides only the effort: the entries of the arrays summed. The next
is always one whose sum is smallest, the first of those. The order depends on the structure alone
and is found once for all problems that share it (`_order`).

Problems that differ in few factors share the elimination of nodes that know none of those: these
come first while their sums are SMALL, and are eliminated once (`Elimination`).

Where a sum would have more than `largest` entries, only nodes with two neighbours at most are
eliminated. That leaves pairs, and this core goes to the solver for every x_K.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meshwright.planner.intra_op.solvers import objective_of, solve_pairwise

Pair = tuple[str, str]
Scope = tuple[str, ...]  # the nodes that a factor knows: one or two in a problem
Index = tuple[int, ...]

SMALL = 1_000  # entries that cost about as much as the call that sums them
LARGEST = 2_000_000  # entries: 16 MB, milliseconds


@dataclass(slots=True)
class PairwiseProblem:
    """Nodes with states, node costs and edge costs (seconds); +inf is illegal."""

    states: dict[str, Sequence[Any]] = field(default_factory=dict)
    unary: dict[str, np.ndarray] = field(default_factory=dict)
    pairs: dict[Pair, np.ndarray] = field(default_factory=dict)

    def node(self, name: str, states: Sequence[Any], costs: ArrayLike) -> None:
        self.states[name] = states
        self.unary[name] = np.asarray(costs, dtype=float)

    def edge(self, a: str, b: str, costs: np.ndarray) -> None:
        if (b, a) in self.pairs:
            self.pairs[b, a] = self.pairs[b, a] + costs.T
        else:
            self.pairs[a, b] = self.pairs.get((a, b), 0.0) + costs

    def factors(self) -> dict[Scope, np.ndarray]:
        """All costs, by the nodes that they depend on."""
        nodes: dict[Scope, np.ndarray] = {(name,): costs for name, costs in self.unary.items()}
        return nodes | dict(self.pairs.items())

    def changed(self, factors: Mapping[Scope, np.ndarray]) -> PairwiseProblem:
        """The same problem with these costs instead of its own."""
        unary, pairs = dict(self.unary), dict(self.pairs)
        for scope, costs in factors.items():
            if len(scope) == 1:
                unary[scope[0]] = costs
            else:
                pairs[scope[0], scope[1]] = costs
        return PairwiseProblem(states=self.states, unary=unary, pairs=pairs)


# --- the order, from structure alone -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Node `node` is eliminated: factors `inputs`, each with the shape that lines its axes up with
    the others', give factor `output` over the nodes `rest`."""

    node: int
    rest: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Steps that depend on no factor that changes, and the others; all, last first; the nodes left
    as a core; the factors left, with their nodes; `place` of every node among a factor's axes."""

    fixed: tuple[_Step, ...]
    changing: tuple[_Step, ...]
    backwards: tuple[_Step, ...]
    core: tuple[int, ...]
    left: tuple[tuple[int, tuple[int, ...]], ...]
    place: tuple[int, ...]


@lru_cache(maxsize=256)
def _order(
    sizes: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    changing: frozenset[int],
    keep: tuple[int, ...],
    largest: int,
) -> _Order:
    """Nodes, with numbers of states, and factors are counted from 0; `changing` are factors. Axes
    of factors lie in the order of elimination, so that the next node's is the first of all its
    factors."""
    free = [n for n in range(len(sizes)) if n not in keep]
    sequence = _sequence(sizes, scopes, changing, free, largest=largest)
    if len(sequence) < len(free):
        sequence = _sequence(sizes, scopes, changing, free, widest=2)
    core = tuple(n for n in free if n not in set(sequence))
    place = {n: k for k, n in enumerate((*sequence, *core, *keep))}
    buckets: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in sizes]
    left: list[tuple[int, tuple[int, ...]]] = []
    varies = [k in changing for k in range(len(scopes))]

    def add(factor: int, scope: tuple[int, ...]) -> None:
        (buckets[scope[0]] if scope else left).append((factor, scope))

    for k, scope in enumerate(scopes):
        add(k, tuple(sorted(scope, key=place.__getitem__)))
    fixed: list[_Step] = []
    later: list[_Step] = []
    for node in sequence:
        union = sorted({n for _, scope in buckets[node] for n in scope}, key=place.__getitem__)
        inputs = tuple(
            (factor, tuple(sizes[n] if n in scope else 1 for n in union))
            for factor, scope in buckets[node]
        )
        step = _Step(node=node, rest=tuple(union[1:]), inputs=inputs, output=len(varies))
        varies.append(any(varies[factor] for factor, _ in inputs))
        (later if varies[-1] else fixed).append(step)
        add(step.output, step.rest)
    left += [pair for n in (*core, *keep) for pair in buckets[n]]
    return _Order(
        fixed=tuple(fixed),
        changing=tuple(later),
        backwards=tuple(sorted([*fixed, *later], key=lambda step: -place[step.node])),
        core=core,
        left=tuple(left),
        place=tuple(place[n] for n in range(len(sizes))),
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
    """Nodes in the order of elimination, up to where one would need a sum of more than `largest`
    entries or has more than `widest` neighbours."""
    around: list[set[int]] = [set() for _ in sizes]
    varies = [False] * len(sizes)
    for k, scope in enumerate(scopes):
        for n in scope:
            around[n] |= set(scope) - {n}
            varies[n] |= k in changing

    def rank(n: int) -> tuple[bool, bool, int, int]:
        entries = sizes[n] * math.prod(sizes[m] for m in around[n])
        refused = entries > largest or len(around[n]) > widest
        return refused, varies[n] or entries > SMALL, entries, n

    ranks = {n: rank(n) for n in free}
    sequence: list[int] = []
    while ranks:
        n = min(ranks, key=ranks.__getitem__)
        if ranks.pop(n)[0]:
            break
        sequence.append(n)
        for m in around[n]:
            around[m] = (around[m] | around[n]) - {m, n}
            varies[m] |= varies[n]
        ranks |= {m: rank(m) for m in around[n] if m in ranks}
    return sequence


# --- the numbers ---------------------------------------------------------------------------------


class Elimination:
    """A problem with all nodes but `keep` eliminated. The factors `changing` are given anew to each
    `solve`; what doesn't depend on them is eliminated here, once."""

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
        factors = problem.factors()
        # a node of one state is no axis of a pair: arrays have few dims, and its row's sum is known
        scopes = tuple(
            tuple(number[name] for name in scope if len(scope) == 1 or len(problem.unary[name]) > 1)
            for scope in factors
        )
        self._keep = tuple(number[name] for name in keep)
        self._shape = tuple(sizes[n] for n in self._keep)
        self._changing = {scope: k for k, scope in enumerate(factors) if scope in changing}
        self._order = _order(sizes, scopes, frozenset(self._changing.values()), self._keep, largest)
        place = self._order.place
        self._turned = {
            scope
            for scope, nodes in zip(factors, scopes, strict=True)
            if len(nodes) > 1 and place[nodes[0]] > place[nodes[1]]
        }
        known = {k: self._lined_up(*factor) for k, factor in enumerate(factors.items())}
        self._best = _run(self._order.fixed, known)
        later = {factor for step in self._order.changing for factor, _ in step.inputs}
        later.update(factor for factor, _ in self._order.left)
        self._known = {factor: costs for factor, costs in known.items() if factor in later}

    def solve(self, factors: Mapping[Scope, np.ndarray] | None = None) -> Minimum | None:
        """The least cost for all states of the kept nodes; None where no assignment is legal. Of
        the factors that change, those not given are as in the problem."""
        known = dict(self._known)
        for scope, costs in (factors or {}).items():
            known[self._changing[scope]] = self._lined_up(scope, costs)
        best = {**self._best, **_run(self._order.changing, known)}
        solved: dict[Index, Mapping[int, int]] = {}
        costs = self._solve_core(known, solved) if self._order.core else self._sum(known)
        if not np.isfinite(costs).any():
            return None
        return Minimum(
            costs=costs,
            names=self._names,
            keep=self._keep,
            core=solved,
            best=best,
            steps=self._order.backwards,
        )

    def _lined_up(self, scope: Scope, costs: np.ndarray) -> np.ndarray:
        lined = costs.T if scope in self._turned else costs
        return lined.squeeze() if len(scope) > 1 else lined

    def _sum(self, known: Mapping[int, np.ndarray]) -> np.ndarray:
        """What is left, over the kept nodes."""
        total = np.zeros(self._shape)
        for factor, scope in self._order.left:
            axes = zip(self._keep, self._shape, strict=True)
            total += known[factor].reshape([size if n in scope else 1 for n, size in axes])
        return total

    def _solve_core(
        self, known: Mapping[int, np.ndarray], solved: dict[Index, Mapping[int, int]]
    ) -> np.ndarray:
        """What is left, by the solver; the states it found go to `solved`."""
        constant, rest = 0.0, PairwiseProblem()
        for factor, scope in self._order.left:
            costs, names = known[factor], [str(n) for n in scope]
            if not scope:
                constant += float(costs)
            elif len(scope) == 1:
                rest.unary[names[0]] = rest.unary.get(names[0], 0.0) + costs
            else:
                rest.edge(names[0], names[1], costs)
        total = np.full(self._shape, np.inf)
        for index in np.ndindex(self._shape):
            fixed = dict(zip(map(str, self._keep), index, strict=True))
            found = solve_pairwise(restricted(rest.unary, fixed), rest.pairs)
            if found is not None:
                total[index] = constant + objective_of(found.choice, rest.unary, rest.pairs)
                solved[index] = {int(name): state for name, state in found.choice.items()}
        return total


def _run(steps: Sequence[_Step], known: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Eliminate a node per step, adding what comes out to the factors; the best state of each
    node for all states of the step's other nodes."""
    best: dict[int, np.ndarray] = {}
    for step in steps:
        (factor, shape), *more = step.inputs
        total = known[factor].reshape(shape)
        for factor, shape in more:
            total = total + known[factor].reshape(shape)
        known[step.output] = np.minimum.reduce(total, axis=0)
        best[step.node] = total.argmin(axis=0)
    return best


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minimum(Mapping[Index, Mapping[str, int]]):
    """The least cost for all states of the kept nodes and, as a mapping from their legal states,
    the states of all nodes behind it, found when they are asked for."""

    costs: np.ndarray
    names: Sequence[str]
    keep: Sequence[int]
    core: Mapping[Index, Mapping[int, int]]
    best: Mapping[int, np.ndarray]
    steps: Sequence[_Step]
    _found: dict[Index, Mapping[str, int]] = field(default_factory=dict)

    def __getitem__(self, index: Index) -> Mapping[str, int]:
        if index not in self._found:
            if index not in self:
                raise KeyError(index)
            self._found[index] = self._way_back(index)
        return self._found[index]

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
    """Node costs with these nodes in these states."""
    found = dict(unary)
    for name, state in states.items():
        found[name] = np.where(np.arange(len(found[name])) == state, found[name], np.inf)
    return found
