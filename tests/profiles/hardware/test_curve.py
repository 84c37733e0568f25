"""Curves: interpolation against numpy and by hand, level ends, arrays as scalars, bad points."""

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


def test_by_hand() -> None:
    """Half of the way from 1 to 100, as decades go; level before the first point and after."""
    for x, y in ((0.0, 2.0), (1.0, 2.0), (10.0, 3.0), (math.sqrt(1e5), 3.5), (1e9, 3.0)):
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
def test_more_work_never_takes_less(curve: Curve, x: float, more: float) -> None:
    if curve.steepest() <= 1.0:
        assert x / curve(x) <= (x + more) / curve(x + more) * (1 + 1e-9)


def test_what_counts_as_a_curve() -> None:
    assert len({Curve.through([[1, 2], [100, 4], [1000, 3]]), CURVE, FULL}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        CURVE.points = ()  # type: ignore[misc]
    assert as_curve(CURVE) is CURVE
    assert as_curve(0.5) == Curve.constant(0.5)
    assert as_curve([[1, 2], [100, 4], [1000, 3]]) == CURVE
    assert Curve.constant(0.5).to_plain() == 0.5
    assert CURVE.largest == 4.0
    x = 1.0 + 1e-7
    assert CURVE.steepest() == pytest.approx(math.log(CURVE(x) / 2.0) / math.log(x), rel=1e-6)
    assert FULL.steepest() == 0.0


@given(curve=curves())
def test_plain_form_is_read_back(curve: Curve) -> None:
    again = as_curve(curve.to_plain())
    assert again == curve or (curve.is_constant and again.is_constant and again(1.0) == curve(1.0))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), r"points are \(\); legal: pairs \(x, y\), x increasing"),
        ("12", "points are '12'"),
        (((1, 2, 3),), r"a point is \(1, 2, 3\)"),
        ((5,), "a point is 5"),
        (((0, 1),), "x is 0; legal: finite, above 0"),
        (((2, 1), (2, 1)), "x is 2; legal: finite, above 2"),
        (((1, 0),), "y is 0; legal: finite, above 0"),
        (((1, math.inf),), "y is inf"),
        (((math.nan, 1),), "x is nan"),
        (((1, True),), "y is True"),
    ],
)
def test_bad_points_are_refused(points: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"curve: {message}"):
        Curve.through(points)
