"""Exact elimination: a pairwise problem with its series-parallel parts folded away.

A node n with neighbours a and b, at most, becomes the edge min_n(c_an + c_n + c_nb), and its best
state for every state of theirs is remembered. What is left is a core, whose nodes have three
neighbours or more; only that goes to the solver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.solvers import objective_of, solve_pairwise

Pair = tuple[str, str]


@dataclass(slots=True)
class PairwiseProblem:
    """Nodes with states, node costs and edge costs (seconds); +inf is illegal."""

    states: dict[str, Sequence[Any]] = field(default_factory=dict)
    unary: dict[str, np.ndarray] = field(default_factory=dict)
    pairs: dict[Pair, np.ndarray] = field(default_factory=dict)

    def node(self, name: str, states: Sequence[Any], costs: Sequence[float]) -> None:
        self.states[name] = states
        self.unary[name] = np.asarray(costs, dtype=float)

    def edge(self, a: str, b: str, costs: np.ndarray) -> None:
        if (b, a) in self.pairs:
            self.pairs[b, a] = self.pairs[b, a] + costs.T
        else:
            self.pairs[a, b] = self.pairs.get((a, b), 0.0) + costs


@dataclass(slots=True)
class Reduced:
    """A problem after elimination: the core, how to get the eliminated nodes back, and whether what
    was eliminated to the last node has a finite assignment."""

    unary: dict[str, np.ndarray]
    pairs: dict[Pair, np.ndarray]
    steps: list[tuple[str, tuple[str, ...], np.ndarray]]
    feasible: bool = True

    def finish(self, fixed: Mapping[str, int]) -> dict[str, int] | None:
        """The best states given those of the fixed nodes; None if no finite assignment exists."""
        if not self.feasible:
            return None
        choice = dict(fixed)
        core = [name for name in self.unary if name not in fixed]
        if core:
            unary = {
                n: np.where(np.arange(len(c)) == fixed[n], c, np.inf) if n in fixed else c
                for n, c in self.unary.items()
            }
            found = solve_pairwise(unary, self.pairs)
            if found is None:
                return None
            choice = dict(found.choice)
        if not np.isfinite(objective_of(choice, self.unary, self.pairs)):
            return None
        for name, neighbours, best in reversed(self.steps):
            choice[name] = int(best[tuple(choice[n] for n in neighbours)])
        return choice


def eliminate(problem: PairwiseProblem, keep: Sequence[str]) -> Reduced:
    """Fold every node with at most two neighbours, except `keep`, into its neighbours. Exact."""
    unary = {n: c.copy() for n, c in problem.unary.items()}
    around: dict[str, dict[str, np.ndarray]] = {n: {} for n in unary}
    for (a, b), costs in problem.pairs.items():
        around[a][b], around[b][a] = costs, costs.T
    steps: list[tuple[str, tuple[str, ...], np.ndarray]] = []
    feasible = True
    queue = [n for n in unary if n not in keep]
    while queue:
        name = queue.pop()
        if name not in unary or len(around[name]) > 2:
            continue
        costs, neighbours = unary.pop(name), list(around[name])
        edges = [around[name][n] for n in neighbours]
        if not neighbours:
            feasible &= bool(np.isfinite(costs.min()))
            steps.append((name, (), np.asarray(costs.argmin())))
            continue
        if len(neighbours) == 1:
            combined = edges[0] + costs[:, None]
            unary[neighbours[0]] = unary[neighbours[0]] + combined.min(axis=0)
        else:
            combined = (edges[0] + costs[:, None])[:, :, None] + edges[1][:, None, :]
            a, b = neighbours
            merged = combined.min(axis=0)
            around[a][b] = around[a].get(b, 0.0) + merged
            around[b][a] = around[a][b].T
        steps.append((name, tuple(neighbours), combined.argmin(axis=0)))
        for n in neighbours:
            del around[n][name]
            if n not in keep:
                queue.append(n)
    order = {n: i for i, n in enumerate(unary)}
    pairs = {(a, b): m for a in unary for b, m in around[a].items() if order[a] < order[b]}
    return Reduced(unary, pairs, steps, feasible)
