"""Curve: a quantity that depends on a size, as the points at which it was measured.

Between (x0, y0) and (x1, y1) it is a straight line in log x,

    y = y0 + (y1 - y0) * (log x - log x0) / (log x1 - log x0)

and outside of the points it stays at the nearest one: nothing is extrapolated. One point is a
constant. Points are in SI units (bytes, FLOP) and curves are frozen, hashable and equal by value.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.inputs import HardwareError, shown
from meshwright.profiles.inputs.limits import LEAST_NUMBER, MOST_NUMBER, is_number

FloatOrArray = TypeVar("FloatOrArray", float, NDArray[np.float64])
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """y at x for every x >= 0, from `points` (x, y) in increasing order of x.

    Raises ValueError where there is no point, x does not increase from above 0, or a y is not a
    finite number above 0.
    """

    points: Points

    def __post_init__(self) -> None:
        if _checked(self.points) != self.points:
            raise HardwareError(
                f"points are {shown(self.points)}", place="curve", legal="a tuple of pairs (x, y)"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.points)

    @cached_property
    def _x(self) -> tuple[float, ...]:
        return tuple(x for x, _ in self.points)

    @cached_property
    def _y(self) -> tuple[float, ...]:
        return tuple(y for _, y in self.points)

    @cached_property
    def _log_x(self) -> tuple[float, ...]:
        return tuple(map(math.log, self._x))

    @cached_property
    def _slope(self) -> tuple[float, ...]:
        """Slopes of y over log x, (len(points) + 1,): level before the first and after the last."""
        steps = zip(self._log_x, self._log_x[1:], self._y, self._y[1:], strict=False)
        return (0.0, *((y1 - y0) / (x1 - x0) for x0, x1, y0, y1 in steps), 0.0)

    @classmethod
    def through(cls, points: object) -> Curve:
        """The curve through a sequence of pairs (x, y). Raises ValueError as the class does."""
        return cls(points=_checked(points))

    @classmethod
    def constant(cls, y: float) -> Curve:
        """The curve that is `y` everywhere."""
        return cls.through(((1.0, y),))

    @property
    def is_constant(self) -> bool:
        """Whether y is the same at every x."""
        return not any(self._slope)

    @property
    def largest(self) -> float:
        """The largest y."""
        return max(self._y)

    def __call__(self, x: FloatOrArray) -> FloatOrArray:
        """y at `x` >= 0, a number or an array, of the same shape."""
        if isinstance(x, np.ndarray):
            logs = np.log(np.maximum(x, self._x[0]))
            return np.interp(logs, self._log_x, self._y)
        right = bisect_right(self._x, x)
        slope, below = self._slope[right], max(right - 1, 0)
        return (
            self._y[below] + slope * (math.log(x) - self._log_x[below]) if slope else self._y[below]
        )

    def steepest(self) -> float:
        """The largest d log y / d log x: below 1, x / y(x) grows with x."""
        steps = zip(self._slope[1:-1], self._y, strict=False)
        return max((slope / y for slope, y in steps), default=0.0)

    def to_plain(self) -> float | list[list[float]]:
        """A number if constant, else [[x, y], ...]; `as_curve` reads both."""
        return self._y[0] if self.is_constant else [list(point) for point in self.points]


def as_curve(value: object) -> Curve:
    """`value` as a Curve: one already, a number, or a sequence of (x, y) pairs. Raises ValueError
    for anything else."""
    if isinstance(value, Curve):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Curve.through(value)
    return Curve.through(((1.0, value),))


def _checked(points: object) -> Points:
    """`points` as a tuple of pairs of floats, or ValueError."""
    legal = "pairs (x, y), x increasing from above 0, y finite and above 0"
    if not isinstance(points, Sequence) or isinstance(points, str) or not points:
        raise HardwareError(f"points are {shown(points)}", place="curve", legal=legal)
    checked: list[tuple[float, float]] = []
    last_x = 0.0
    for point in points:
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
            raise HardwareError(f" is {shown(point)}", place="curve: a point", legal=legal)
        x, y = point
        for name, number, least in (("x", x, last_x), ("y", y, 0.0)):
            finite = is_number(number) and LEAST_NUMBER <= number <= MOST_NUMBER
            if not finite or number <= least:
                above, place = f"finite, above {least:g}", f"curve: {name}"
                raise HardwareError(f" is {shown(number)}", place=place, legal=above)
        if checked and math.log(x) <= math.log(last_x):
            what = f" is {shown(x)} after {last_x!r}"
            raise HardwareError(what, place="curve: x", legal="further apart")
        checked.append((float(x), float(y)))
        last_x = float(x)
    return tuple(checked)


FULL = Curve.constant(1.0)
"""All of a peak, at every size."""
