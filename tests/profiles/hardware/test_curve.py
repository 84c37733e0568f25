"""Curves: interpolation against numpy and by hand, level ends, arrays as scalars, bad points."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.hardware.curve import FULL, Curve, as_curve

CURVE = Curve(points=((1.0, 2.0), (100.0, 4.0), (1000.0, 3.0)))
AMOUNTS = st.floats(min_value=0, max_value=1e30)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    xs = draw(st.lists(st.floats(1e-3, 1e18), min_size=1, max_size=6, unique_by=math.log))
    ys = draw(st.lists(st.floats(1e-6, 1.0), min_size=len(xs), max_size=len(xs)))
    return Curve(points=tuple(zip(sorted(xs), ys, strict=True)))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (0.0, 2.0),  # level before the first point
        (1.0, 2.0),
        (10.0, 3.0),  # half of the way from 1 to 100, as decades go
        (100.0, 4.0),
        (math.sqrt(100 * 1000), 3.5),
        (1e9, 3.0),  # level after the last one
    ],
)
def test_by_hand(x: float, y: float) -> None:
    assert CURVE(x) == pytest.approx(y, rel=1e-12)


@given(curve=curves(), x=AMOUNTS)
def test_scalars_equal_numpy(curve: Curve, x: float) -> None:
    xs, ys = zip(*curve.points, strict=True)
    oracle = np.interp(math.log(max(x, 1e-300)), np.log(xs), ys)
    assert curve(x) == pytest.approx(oracle, rel=1e-9)


@given(curve=curves(), amounts=st.lists(AMOUNTS, max_size=5))
def test_arrays_equal_scalars(curve: Curve, amounts: list[float]) -> None:
    values = curve(np.array(amounts, dtype=float))
    assert values.tolist() == pytest.approx([curve(x) for x in amounts], rel=1e-9)


@given(curve=curves(), x=AMOUNTS, more=AMOUNTS)
def test_work_never_takes_less_where_it_is_not_too_steep(
    curve: Curve, x: float, more: float
) -> None:
    if curve.steepest() <= 1.0:
        assert x / curve(x) <= (x + more) / curve(x + more) * (1 + 1e-9)


def test_steepest_is_the_exponent_of_the_steepest_place() -> None:
    x = 1.0 + 1e-7
    assert CURVE.steepest() == pytest.approx(math.log(CURVE(x) / 2.0) / math.log(x), rel=1e-6)
    assert FULL.steepest() == 0.0


def test_equal_by_value_hashable_and_frozen() -> None:
    same = Curve.through([[1, 2], [100, 4], [1000, 3]])
    assert same == CURVE != FULL
    assert len({same, CURVE, FULL}) == 2
    assert dataclasses.replace(CURVE, points=((1.0, 1.0),)) == FULL
    with pytest.raises(dataclasses.FrozenInstanceError):
        CURVE.points = ()  # type: ignore[misc]


@given(curve=curves())
def test_plain_form_is_read_back(curve: Curve) -> None:
    again = as_curve(curve.to_plain())
    assert again == curve or (curve.is_constant and again.is_constant and again(1.0) == curve(1.0))


def test_what_counts_as_a_curve() -> None:
    assert as_curve(CURVE) is CURVE
    assert as_curve(0.5) == Curve.constant(0.5)
    assert as_curve([[1, 2], [100, 4], [1000, 3]]) == CURVE
    assert Curve.constant(0.5).to_plain() == 0.5
    assert CURVE.largest == 4.0


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), r"points are \(\); legal: pairs \(x, y\), x increasing"),
        ("12", "points are '12'"),
        (1.0, "points are 1.0"),
        (((1, 2, 3),), r"a point is \(1, 2, 3\)"),
        ((5,), "a point is 5"),
        (((0, 1),), "x is 0; legal: finite, above 0"),
        (((2, 1), (2, 1)), "x is 2; legal: finite, above 2"),
        (((2, 1), (1, 1)), "x is 1; legal: finite, above 2"),
        (((1, 0),), "y is 0; legal: finite, above 0"),
        (((1, -1),), "y is -1"),
        (((1, math.inf),), "y is inf"),
        (((math.nan, 1),), "x is nan"),
        (((1, True),), "y is True"),
        ((("1", 1),), "x is '1'"),
    ],
)
def test_bad_points_are_refused(points: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"curve: {message}"):
        Curve.through(points)
