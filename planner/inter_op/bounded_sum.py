"""Minimum of F(T) + c·T, with a proof, where F(T) falls with T in steps and is costly to evaluate.

In a pipeline ``T`` bounds every stage, ``F(T)`` is the least sum over partitions within that bound,
and ``c = m - 1`` counts the micro-batches behind the first.  For every ``T`` in ``[a, b]`` the
objective is at least ``F(b) + c·a``.  The search branches on intervals of the distinct stage times,
the lowest bound first, and drops those whose bound does not beat the incumbent, or the cutoff where
there is none yet.  A partition found at ``b`` also settles every ``T`` down to its own largest
stage, and the value to beat caps the ``T`` worth trying at ``(target - F(b)) / c``.  An interval is
split in its middle, unless its bound is loose: where ``F`` is only known for a ``T`` beyond its
end, what ``F`` is at the end may drop it whole.

The least bound of all that was dropped or not looked at is a lower bound on the optimum.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

import numpy as np

from meshwright.planner.inter_op.table import Floats

ROUNDING = 1e-12
"""Improvements below this fraction of a cost are rounding, and are not pursued."""
_GALLOP = 1.1
"""First step between values of T while there is nothing to beat; steps grow."""

Partition = TypeVar("Partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Generic[Partition]):
    """One evaluation of F(T) under a cutoff: its value, or a lower bound on it."""

    bound_s: float
    """F(T) if there is a partition; otherwise a lower bound on it that is at least the cutoff."""
    partition: Partition | None
    """One that attains F(T), if that is below the cutoff."""
    t_max_s: float = np.inf
    sum_s: float = np.inf
    """Of that partition."""


@dataclass(slots=True, kw_only=True)
class Staircase(Generic[Partition]):
    """A search under way; ``run`` ends it, and ``attempt`` may give it an incumbent before."""

    program: Callable[[float, float], Attempt[Partition]]
    """Evaluates F at T as far as it is below a cutoff."""
    later: float
    """c"""
    gap: float = 0.0
    """Relative gap to the optimum at which the search may stop."""
    cutoff_s: float = np.inf
    """Only objectives below it count."""
    deadline: float | None = None
    """The time.monotonic() after which no further T is tried."""
    best: Attempt[Partition] | None = None
    objective_s: float = np.inf
    tried: int = 0
    _least_dropped: float = np.inf
    _heap: list[tuple[float, int, int, float, bool]] = field(default_factory=list)
    """(bound on the objective, first T, last T, bound on F there, whether that is loose)"""

    @property
    def bound_s(self) -> float:
        """A lower bound on the optimum, up to rounding; meaningful once something was found."""
        return min(self.objective_s, self._least_dropped)

    @property
    def target_s(self) -> float:
        """Exclusive upper limit on objectives that are worth finding."""
        return min(self.objective_s * (1 - max(self.gap, ROUNDING)), self.cutoff_s)

    def attempt(self, t_max: float, smallest: float) -> Attempt[Partition]:
        """Evaluate F(t_max), settling what it can of the values from ``smallest`` to ``t_max``."""
        self.tried += 1
        attempt = self.program(t_max, self.target_s - self.later * smallest)
        if attempt.partition is None:
            self._least_dropped = min(self._least_dropped, attempt.bound_s + self.later * smallest)
            return attempt
        objective = attempt.sum_s + self.later * attempt.t_max_s
        if objective < min(self.objective_s, self.cutoff_s):
            self.best, self.objective_s = attempt, objective
        return attempt

    def run(self, times: Floats, total: float = 0.0) -> None:
        """Search the ascending values ``times``, where F is known to be at least ``total``."""
        self._push(times, 0, len(times) - 1, total, loose=True)
        while self._heap:
            bound, first, last, total, loose = heappop(self._heap)
            if bound >= self.target_s or self._late():
                self._least_dropped = min(self._least_dropped, bound)
                return
            worth = max(first, self._last_worth_trying(times, total))
            if worth < last:
                beyond = total + self.later * float(times[worth + 1])
                self._least_dropped = min(self._least_dropped, beyond)
            last, cut = min(worth, last), worth < last
            middle = self._split(times, first, last, loose)
            attempt = self.attempt(float(times[middle]), float(times[first]))
            self._push(times, middle + 1, last, total, loose or cut)
            if attempt.partition is not None:
                middle = int(np.searchsorted(times, attempt.t_max_s))
                self._push(times, first, middle - 1, max(attempt.bound_s, total), loose=False)

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _push(self, times: Floats, first: int, last: int, total: float, loose: bool) -> None:
        """Keep candidates first..last, where F is at least total, if they can still win."""
        if first > last:
            return
        bound = total + self.later * float(times[first])
        if bound < self.target_s:
            heappush(self._heap, (bound, first, last, total, loose))
        else:
            self._least_dropped = min(self._least_dropped, bound)

    def _last_worth_trying(self, times: Floats, total: float) -> int:
        """The last candidate T with total + c·T below the target."""
        target = self.target_s
        if self.later == 0 or target == np.inf:
            return len(times) - 1
        return int(np.searchsorted(times, (target - total) / self.later)) - 1

    def _split(self, times: Floats, first: int, last: int, loose: bool) -> int:
        """The T to try: low while nothing is to beat, then the end or the middle."""
        if self.target_s == np.inf:
            value = times[first] * _GALLOP**self.tried
        elif loose:
            return last
        else:
            value = (times[first] + times[last]) / 2
        return min(last, max(first, int(np.searchsorted(times, value, side="right")) - 1))
