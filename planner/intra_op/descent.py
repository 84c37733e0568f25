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


def descend(
    unary: Mapping[str, np.ndarray],
    pairs: Mapping[tuple[str, str], np.ndarray],
    known: Iterable[Mapping[str, int]] = (),
) -> dict[str, int] | None:
    """A cheap assignment, from the states `known` for like problems and from random ones; None
    where none that was met is legal."""
    around: dict[str, list[tuple[str, np.ndarray]]] = {name: [] for name in unary}
    for (a, b), costs in pairs.items():  # (own state, the other's)
        around[a].append((b, costs))
        around[b].append((a, costs.T))
    draw = np.random.default_rng(0)
    starts = [dict(choice) for choice in known]
    starts.append({name: int(np.argmin(costs)) for name, costs in unary.items()})
    for _ in range(0 if starts[1:] else STARTS):  # of a like problem the states are good ones
        starts.append(
            {n: int(draw.choice(np.flatnonzero(np.isfinite(c)))) for n, c in unary.items()}
        )
    best: tuple[float, dict[str, int] | None] = np.inf, None
    for choice in starts:
        _sweep(choice, unary, around)
        cost = objective_of(choice, unary, pairs)
        if cost < best[0]:
            best = cost, choice
    return best[1]


def _sweep(
    choice: dict[str, int],
    unary: Mapping[str, np.ndarray],
    around: Mapping[str, list[tuple[str, np.ndarray]]],
) -> None:
    """Improve a choice until no node has a cheaper state, or one with fewer illegal neighbours."""
    stale = set(unary)  # nodes of which a neighbour has changed since they chose
    for _ in range(SWEEPS):
        for name, own in unary.items():
            if name not in stale:
                continue
            stale.discard(name)
            parts = np.stack([own, *(costs[:, choice[other]] for other, costs in around[name])])
            legal = np.isfinite(parts)
            illegal, costs = (~legal).sum(0), np.where(legal, parts, 0.0).sum(0)
            state = int(np.lexsort((costs, illegal))[0])  # by the last key first
            if state != choice[name]:
                choice[name] = state
                stale.update(other for other, _ in around[name])
        if not stale:
            return


def least(functions: Iterable[np.ndarray]) -> float:
    """No assignment costs less than the sum of the least of each function."""
    return float(sum(f.min() for f in functions))
