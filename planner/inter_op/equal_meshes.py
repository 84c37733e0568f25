"""Exact search for the cuts of a chain of blocks into P stages on equal meshes.

Stage ``k`` of ``P`` covers blocks ``c_k..c_{k+1}-1`` and runs at a given level: the table of costs
that its position in the pipeline imposes.  Minimise

    Σ_k g[l(k), c_k, c_{k+1}] + c · max_k t[l(k), c_k, c_{k+1}],    0 = c_0 < c_1 < ... < c_P = C,

with times ``t``, fills ``g`` and ``c`` micro-batches behind the first.  The least possible maximum
comes from one pass over the stages,

    r_k[j] = min over i of max(r_{k-1}[i], t[l(k-1), i, j]),

which also says for every ``T`` where the k-th cut can lie at all: where ``r_k <= T``.  The least
sum under ``T`` comes from another pass, from the last stage to the first and within these windows,

    f_k[i] = min over j of g[l(k), i, j] + f_{k+1}[j]     with     t[l(k), i, j] <= T,

and ``planner.inter_op.bounded_sum`` minimises over ``T``.  ``F`` without a bound and ``F`` at the
least ``T`` nearly meet where blocks are alike, and then close the staircase at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.inter_op.bounded_sum import Attempt, Staircase
from meshwright.planner.inter_op.table import Floats, Ints, Masks

_ANY_TIME = float(np.finfo(np.float64).max)
"""A bound that every legal stage meets and no illegal one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenCut:
    """The best cut: stage k covers blocks cuts[k]..cuts[k+1]-1."""

    cuts: tuple[int, ...]
    """P+1 ascending positions, from 0 to C."""
    objective_s: float
    """sum_s + later · t_max_s"""
    t_max_s: float
    sum_s: float
    """Of the stages' fills."""


def cut_evenly(
    time_s: Floats,
    fill_s: Floats | None,
    level_of_stage: Sequence[int] | Ints,
    later: float,
    cutoff: float = np.inf,
) -> EvenCut | None:
    """The cut of least objective, or None where no cut is legal and below the cutoff.

    ``time_s`` and ``fill_s`` are (L, C+1, C+1); ``time_s`` is +inf where i >= j and where blocks
    i..j-1 may not be a stage of that level; without ``fill_s`` the fill is the time.
    ``level_of_stage`` has one of the L levels for each of the P stages, the first stage first.  Of
    the cuts that attain the least sum under the same bound on the stages the lexicographically
    smallest is taken.  Raises ValueError on malformed input.
    """
    program = _program(time_s, fill_s, level_of_stage)
    lowest = float(program.window[-1, -1])
    if lowest == np.inf:
        return None
    search = Staircase(program=program, later=later, cutoff_s=cutoff)
    free = search.attempt(_ANY_TIME, lowest)
    if free.partition is not None and later > 0 and lowest < free.t_max_s:
        search.attempt(lowest, lowest)
        worth = min(free.t_max_s, (search.target_s - free.sum_s) / later)
        levels = program.time_s[np.unique(program.levels)]
        search.run(np.unique(levels[(levels > lowest) & (levels < worth)]), free.sum_s)
    if search.best is None or search.best.partition is None:
        return None
    return EvenCut(
        cuts=search.best.partition,
        objective_s=search.objective_s,
        t_max_s=search.best.t_max_s,
        sum_s=search.best.sum_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeastSum:
    """The program F(T)."""

    time_s: Floats
    fill_s: Floats
    """(L, C+1, C+1) each"""
    levels: Ints
    """(P,)"""
    window: Floats
    """(P+1, C+1): r_k[j]"""

    def __call__(self, t_max: float, cutoff: float) -> Attempt[tuple[int, ...]]:
        """F(t_max) as far as it is below the cutoff."""
        stages, positions = len(self.levels), self.time_s.shape[1]
        open_ = self.window <= t_max
        least = np.full((stages + 1, positions), np.inf)
        least[stages, positions - 1] = 0.0
        j0, j1 = positions - 1, positions
        for k in range(stages - 1, -1, -1):
            i0, i1 = _span(open_[k])
            run = self.levels[k], slice(i0, i1), slice(j0, j1)
            through = self.fill_s[run] + least[k + 1, j0:j1]
            least[k, i0:i1] = np.where(self.time_s[run] <= t_max, through, np.inf).min(axis=1)
            j0, j1 = _span(np.isfinite(least[k]))
            if j0 == j1:
                return Attempt(bound_s=np.inf, partition=None)
        total = float(least[0, 0])
        if total >= cutoff:
            return Attempt(bound_s=total, partition=None)
        return self._walk(least, t_max)

    def _walk(self, least: Floats, t_max: float) -> Attempt[tuple[int, ...]]:
        """The cuts of F(t_max), from the first stage on."""
        cuts, slowest = [0], 0.0
        for k, level in enumerate(self.levels):
            i = cuts[-1]
            time_s = self.time_s[level, i]
            through = np.where(time_s <= t_max, self.fill_s[level, i] + least[k + 1], np.inf)
            cuts.append(int(through.argmin()))
            slowest = max(slowest, float(time_s[cuts[-1]]))
        total = float(least[0, 0])
        return Attempt(bound_s=total, partition=tuple(cuts), t_max_s=slowest, sum_s=total)


def _program(
    time_s: Floats, fill_s: Floats | None, level_of_stage: Sequence[int] | Ints
) -> _LeastSum:
    """The program of a checked input, with its windows."""
    levels = np.asarray(level_of_stage, dtype=np.int64)
    shape = np.shape(time_s)
    if len(shape) != 3 or shape[1] < 2 or shape[1] != shape[2]:
        raise ValueError(f"time_s has shape {shape}; it must be (L, C+1, C+1) with C > 0")
    if fill_s is not None and np.shape(fill_s) != shape:
        raise ValueError(f"fill_s has shape {np.shape(fill_s)}; expected that of time_s, {shape}")
    if levels.ndim != 1 or not len(levels) or levels.min() < 0 or levels.max() >= shape[0]:
        raise ValueError(
            f"level_of_stage={levels.tolist()} must name one of the levels 0..{shape[0] - 1} of "
            "time_s for each stage"
        )
    if (np.diagonal(time_s, axis1=1, axis2=2) < np.inf).any() or (time_s[:, :, 0] < np.inf).any():
        raise ValueError(
            "time_s[l, i, j] is finite for some i >= j; a stage without blocks is +inf"
        )
    window = np.full((len(levels) + 1, shape[1]), np.inf)
    window[0, 0] = 0.0
    for k, level in enumerate(levels):
        i0, i1 = _span(np.isfinite(window[k]))
        if i0 == i1:
            break
        slowest = np.maximum(time_s[level, i0:i1, i0:], window[k, i0:i1, None])
        window[k + 1, i0:] = slowest.min(axis=0)
    fill = time_s if fill_s is None else fill_s
    return _LeastSum(time_s=time_s, fill_s=fill, levels=levels, window=window)


def _span(mask: Masks) -> tuple[int, int]:
    """The first true position and one past the last; (0, 0) if there is none."""
    where = np.flatnonzero(mask)
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
