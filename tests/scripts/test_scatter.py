"""The plot of predicted against measured."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from scripts.experts.scatter import Point, scatter

POINTS = [
    Point("A100 dense", 1.0, 1.0, False, "a <model>"),
    Point("A100 dense", 0.3, 0.9, True, "b"),
    Point("H100 experts", 20.0, 2.0, False, "c"),
]
SVG = "{http://www.w3.org/2000/svg}"


def test_every_row_is_a_point_and_every_group_a_colour() -> None:
    root = ElementTree.fromstring(scatter(POINTS, "predicted & measured"))
    dots = [c for c in root.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    assert [c.get("fill") == "none" for c in dots] == [False, True, False]
    assert len({c.get("stroke") for c in dots}) == 2
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"A100 dense", "H100 experts", "predicted & measured", "0.1 s", "100 s"} <= set(texts)


def test_what_is_right_lies_on_the_diagonal_and_too_slow_predictions_above() -> None:
    root = ElementTree.fromstring(scatter(POINTS, ""))
    dots = [c for c in root.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    right, above, below = ((float(c.get("cx", 0)), float(c.get("cy", 0))) for c in dots)
    assert right[0] - 56 == pytest.approx(56 + 560 - right[1])
    assert above[0] - 56 < 56 + 560 - above[1]
    assert below[0] - 56 > 56 + 560 - below[1]


def test_no_rows_are_no_plot() -> None:
    with pytest.raises(ValueError, match="no points"):
        scatter([], "")
