"""Time limits of planning, and within it of the solver for one class of blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CORE_S = 10.0  # of the solver for one class of blocks, in all their settings


@dataclass(slots=True)
class TimeLimit:
    """The time of a `clock` (seconds) at which to stop; limits nest, the first to end counts."""

    clock: Callable[[], float] = time.monotonic
    ends_s: float = math.inf

    @contextmanager
    def until(self, ends_s: float) -> Iterator[None]:
        before = self.ends_s
        self.ends_s = min(before, ends_s)
        try:
            yield
        finally:
            self.ends_s = before

    def after(self, seconds: float | None) -> float:
        """The time in so many seconds; without a number, never."""
        return math.inf if seconds is None else self.clock() + seconds

    def left_s(self) -> float:
        return max(0.0, self.ends_s - self.clock())

    def over(self) -> bool:
        return self.left_s() == 0


@dataclass(slots=True)
class SolverTime:
    """Wall seconds left to the solver for one class of blocks, within the limit."""

    limit: TimeLimit = field(default_factory=TimeLimit)
    own_s: float = CORE_S

    def left_s(self) -> float:
        return min(self.own_s, self.limit.left_s())

    @contextmanager
    def spent(self) -> Iterator[None]:
        """The seconds within count."""
        started = self.limit.clock()
        try:
            yield
        finally:
            self.own_s = max(0.0, self.own_s - (self.limit.clock() - started))
