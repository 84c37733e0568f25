"""Cells of the page's tables: a text and the number that it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.plan import GIB, seconds, sized

Row = Mapping[str, Any]
MOST_ENDS = 3  # names that are all written
REHEARSED = "rehearsed"  # peak beside the predicted one
SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Text to read; `value` is the number that it shows, as the report's data has it."""

    text: str
    value: float | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under heads; the first cell of a row is its name."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def words(text: object) -> Cell:
    return Cell(text=str(text))


def number(value: float) -> Cell:
    """A count, or a number of up to four digits, or all before the point."""
    integer = float(value).is_integer() or abs(value) >= 1e4
    return Cell(text=f"{value:,.0f}" if integer else f"{value:.4g}", value=value)


def share(value: float) -> Cell:
    return Cell(text=f"{value:.1%}", value=value)


def time(value: float) -> Cell:
    """Seconds; less than a nanosecond is nothing."""
    return Cell(text=seconds(value) if abs(value) >= 1e-9 else "0", value=value)


def more_time(value: float) -> Cell:
    """Seconds more or less than another plan's."""
    sign = "+" if value >= 0 else "−"
    text = f"{sign}{seconds(abs(value))}" if abs(value) >= 1e-9 else "0"
    return Cell(text=text, value=value)


def gib(value: float) -> Cell:
    """Bytes of a device; of a small model in smaller units."""
    small = 0 < abs(value) < GIB / 10
    return Cell(text=sized(value) if small else f"{value / GIB:.2f} GiB", value=value)


def between(cell: Callable[[float], Cell], interval: Sequence[float]) -> str:
    """An interval to read."""
    low, high = (cell(value).text for value in interval)
    return f"{low} to {high}"


def sent(value: float) -> Cell:
    """Bytes on links, in decimal units as links are."""
    return scaled(value, "B")


def scaled(value: float, unit: str) -> Cell:
    """A number with a decimal prefix."""
    for size, prefix in SI:
        if abs(value) >= size:
            space = " " * (unit[:1].islower())  # 58.7 k tokens/s, 378 TFLOP/s
            return Cell(text=f"{value / size:.3g} {prefix}{space}{unit}", value=value)
    return Cell(text=f"{value:.3g} {unit}".strip(), value=value)


def stage_words(stages: Sequence[int]) -> str:
    """`stage 3`, `stages 0, 4`, or `stages 0, 4 … 60`."""
    return f"stage{'s' * (len(stages) > 1)} {ends([*map(str, stages)], ', ')}"


def ends(names: Sequence[str], between: str) -> str:
    """All names, or of many the first two and the last."""
    if len(names) <= MOST_ENDS:
        return between.join(names)
    return f"{between.join(names[:2])} … {names[-1]}"


def many(count: int, thing: str) -> str:
    """`1 rank`, `16,384 ranks`."""
    return f"{count:,} {thing}" + "s" * (count != 1)


def peaks_of(summary: Row) -> dict[str, float]:
    """Bytes at the peak of the fullest device: predicted and, after a rehearsal, rehearsed."""
    peaks = {
        "predicted peak": summary["peak_memory_bytes"],
        REHEARSED: summary.get("rehearsed_memory_bytes"),
    }
    return {name: max(nbytes) for name, nbytes in peaks.items() if nbytes}
