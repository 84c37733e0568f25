"""A pairwise problem without a proof: coordinate descent, for what the solver has no time left for.

Every node in turn takes its cheapest state given its neighbours', until none changes; several
starts, the best of them. The cost is that of a legal assignment, no less than the least one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from meshwright.planner.intra_op.solvers import objective_of

SWEEPS = 50
STARTS = 4  # random ones, of a fixed seed
ILLEGAL = 1e9  # seconds: more than any legal assignment costs

Pairs = Mapping[tuple[str, str], np.ndarray]


class Descent:
    """Descents in problems with the same `pairs`."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._around: dict[str, list[tuple[str, np.ndarray]]] = {}  # (the other's state, own)
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
        own = {name: _finite(costs) for name, costs in unary.items()}
        best: tuple[float, dict[str, int] | None] = np.inf, None
        for choice in starts:
            self._sweep(choice, own)
            cost = objective_of(choice, unary, self.pairs)
            if cost < best[0]:
                best = cost, choice
        return best[1]

    def _sweep(self, choice: dict[str, int], unary: Mapping[str, np.ndarray]) -> None:
        """Improve a choice until no node has a cheaper state, or one with fewer illegal
        neighbours."""
        stale = set(unary)  # nodes of which a neighbour has changed since they chose
        for _ in range(SWEEPS):
            for name, own in unary.items():
                if name not in stale:
                    continue
                stale.discard(name)
                around = self._around.get(name, [])
                costs = sum((rows[choice[other]] for other, rows in around), own)
                state = int(costs.argmin())
                if state != choice[name]:
                    choice[name] = state
                    stale.update(other for other, _ in around)
            if not stale:
                return


def _finite(costs: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(costs), costs, ILLEGAL)


def least(functions: Iterable[np.ndarray]) -> float:
    """No assignment costs less than the sum of the least of each function."""
    return float(sum(f.min() for f in functions))
