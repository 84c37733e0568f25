"""SVG pictures as text: marks, a frame with axes, a legend. Colours follow the reader's scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

# Okabe and Ito's palette, told apart by most eyes, without black
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_STYLE = (
    "text{font-family:sans-serif;fill:#222}.bg{fill:#fff}.idle{fill:#eee}"
    ".line{stroke:#ccc}.dim{fill:#666}.on{fill:#111}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.bg{fill:#181a1b}.idle{fill:#2b2e30}"
    ".line{stroke:#444}.dim{fill:#aaa}}"
)


@dataclass(slots=True)
class Picture:
    """A picture of a size in pixels, with a title that screen readers read."""

    width: float
    height: float
    title: str
    marks: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, said: str, *, anchor: str = "start", **more: object) -> None:
        """A line of text; `more` are attributes."""
        at = f'x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}"'
        self.marks.append(f"<text {at}{_attributes(more)}>{escape(said)}</text>")

    def box(self, x: float, y: float, width: float, height: float, **more: object) -> None:
        """A rectangle."""
        at = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
        self.marks.append(f"<rect {at}{_attributes(more)}/>")

    def path(self, points: Iterable[tuple[float, float]], **more: object) -> None:
        """A line through points, or an area where `fill` says so."""
        along = "L".join(f"{_px(x)} {_px(y)}" for x, y in points)
        self.marks.append(f'<path d="M{along}"{_attributes({"fill": "none", **more})}/>')

    def dot(self, x: float, y: float, said: str, **more: object) -> None:
        """A point with a text that appears beside the pointer."""
        label = f"<title>{escape(said)}</title>"
        at = f'cx="{_px(x)}" cy="{_px(y)}" r="4"'
        self.marks.append(f"<circle {at}{_attributes(more)}>{label}</circle>")

    def svg(self) -> str:
        """The file's text."""
        width, height = _px(self.width), _px(self.height)
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="12"'
        title = f' role="img"><title>{escape(self.title)}</title><style>{_STYLE}</style>'
        ground = '<rect class="bg" width="100%" height="100%" rx="6"/>'
        return "\n".join([head + title, ground, *self.marks, "</svg>\n"])


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _attributes(named: Mapping[str, object]) -> str:
    """`class_` is class, `stroke_width` is stroke-width."""
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in named.items()
    )


# --- charts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values over pixels from `start` to `end`, in logarithms or not; `ticks` with
    their words."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        scale: Callable[[float], float] = math.log if self.logarithmic else float
        part = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.start + part * (self.end - self.start)


def frame(picture: Picture, x: Axis, y: Axis, said: tuple[str, str]) -> None:
    """Lines at the ticks of both axes, with their words, and what the axes are of."""
    for value, words in x.ticks:
        at = x(value)
        picture.path([(at, y.start), (at, y.end)], class_="line")
        picture.text(at, y.start + 16, words, anchor="middle", class_="dim", font_size=10)
    for value, words in y.ticks:
        at = y(value)
        picture.path([(x.start, at), (x.end, at)], class_="line")
        picture.text(x.start - 6, at + 4, words, anchor="end", class_="dim", font_size=10)
    picture.text((x.start + x.end) / 2, y.start + 32, said[0], anchor="middle")
    picture.text(x.start, y.end - 8, said[1])


def curve(
    picture: Picture, x: Axis, y: Axis, points: Iterable[tuple[float, float]], **more: object
) -> None:
    """A line through points in the axes' values."""
    picture.path([(x(a), y(b)) for a, b in points], stroke_width=2, **more)


def legend(picture: Picture, x: float, y: float, names: Mapping[str, str]) -> None:
    """Words beside their colours, one under the other."""
    for k, (words, colour) in enumerate(names.items()):
        picture.box(x, y + 18 * k, 12, 12, fill=colour)
        picture.text(x + 18, y + 18 * k + 10, words)
