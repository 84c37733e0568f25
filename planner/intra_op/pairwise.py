"""A pairwise problem: nodes with states, costs of nodes and of pairs of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

S = TypeVar("S", bound=Hashable)

Pair = tuple[str, str]
Scope = tuple[str, ...]  # the nodes that a cost depends on: one or two in a problem


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
        """The problem with these costs in the place of its own."""
        unary, pairs = dict(self.unary), dict(self.pairs)
        for scope, costs in changes.items():
            if len(scope) == 1:
                unary[scope[0]] = costs
            else:
                pairs[scope[0], scope[1]] = costs
        return PairwiseProblem(states=self.states, unary=unary, pairs=pairs)


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
