"""A plot of predicted against measured step times, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SIZE, MARGIN, LEGEND = 560, 56, 150  # pixels
BAND = 0.2  # error that the outer lines show
# Okabe and Ito's palette, told apart by most eyes
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


@dataclass(frozen=True, slots=True)
class Point:
    """A row: its group, seconds measured and predicted, whether constants may have been fitted on
    it, and what it is."""

    group: str
    measured_s: float
    predicted_s: float
    fitted: bool
    label: str


def scatter(points: Sequence[Point], title: str) -> str:
    """The plot: both axes logarithmic, rows that nothing was fitted on filled, a colour a group.
    Raises ValueError without points."""
    if not points:
        raise ValueError("scatter: no points to plot")
    times = [x for p in points for x in (p.measured_s, p.predicted_s)]
    axis = _Axis(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))))
    groups = list(dict.fromkeys(sorted(p.group for p in points)))
    colour = {group: COLOURS[k % len(COLOURS)] for k, group in enumerate(groups)}
    width, height = SIZE + 2 * MARGIN + LEGEND, SIZE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(MARGIN + SIZE / 2, MARGIN / 2, title, "middle"),
        *_grid(axis),
    ]
    for p in points:
        x, y = axis.x(p.measured_s), axis.y(p.predicted_s)
        fill = "none" if p.fitted else colour[p.group]
        said = escape(f"{p.label}: {p.measured_s:.4g} s, predicted {p.predicted_s:.4g} s")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" fill-opacity="0.7" '
            f'stroke="{colour[p.group]}"><title>{said}</title></circle>'
        )
    for k, group in enumerate(groups):
        y = MARGIN + 20 * k + 10
        x = MARGIN + SIZE + 20
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour[group]}"/>')
        parts.append(_text(x + 12, y + 4, group))
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class _Axis:
    """Decades of seconds on either axis."""

    first: int
    last: int

    def _part(self, seconds: float) -> float:
        return SIZE * (math.log10(seconds) - self.first) / (self.last - self.first)

    def x(self, seconds: float) -> float:
        return MARGIN + self._part(seconds)

    def y(self, seconds: float) -> float:
        return MARGIN + SIZE - self._part(seconds)


def _grid(axis: _Axis) -> list[str]:
    """Decades, the diagonal, and the lines of 20 % error."""
    parts = []
    for decade in range(axis.first, axis.last + 1):
        seconds = 10.0**decade
        x, y = axis.x(seconds), axis.y(seconds)
        parts += [
            _line(x, MARGIN, x, MARGIN + SIZE, "#dddddd"),
            _line(MARGIN, y, MARGIN + SIZE, y, "#dddddd"),
            _text(x, MARGIN + SIZE + 18, f"{seconds:g} s", "middle"),
            _text(MARGIN - 8, y + 4, f"{seconds:g} s", "end"),
        ]
    low, high = 10.0**axis.first, 10.0**axis.last
    for factor, colour in ((1.0, "#555555"), (1 + BAND, "#aaaaaa"), (1 - BAND, "#aaaaaa")):
        start, end = max(low, low / factor), min(high, high / factor)
        ends = axis.x(start), axis.y(start * factor), axis.x(end), axis.y(end * factor)
        parts.append(_line(*ends, colour))
    parts.append(_text(MARGIN + SIZE / 2, MARGIN + SIZE + 40, "measured", "middle"))
    middle = MARGIN + SIZE / 2
    parts.append(f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, "predicted")}</g>')
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, said: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'
