"""What the charts of the page have in common: form, data, tooltips, axes, stacked bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from meshwright.planner.page.cells import Row
from meshwright.planner.plan import GIB

Spec = dict[str, Any]

MANY = 2_000  # marks, from which on a chart is drawn on a canvas
GREY = "#808080"
INK = "currentColor"
BAR = 18  # pixels
OF_LINE = 3  # entries of a legend beside each other
OF_TICK = 70  # pixels between marks of an axis


def specified(chart: Any, title: str, *, height: int | None = None, marks: int = 0) -> Spec:
    """The chart as data, with its label for readers of the screen."""
    canvas = marks > MANY
    ink = GREY if canvas else INK
    own = {"labelColor": ink, "titleColor": ink}
    sized = {"width": "container"} | ({"height": height} if height else {})
    spec: Spec = chart.properties(description=title, **sized).to_dict(validate=False)
    spec["background"] = None
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    spec["usermeta"] = {"embedOptions": {"renderer": "canvas" if canvas else "svg"}}
    spec["config"] = {
        "font": "sans-serif",
        "view": {"stroke": None},
        "axis": own | {
            "domainColor": GREY, "tickColor": GREY, "gridColor": GREY, "gridOpacity": 0.25,
            "labelLimit": 150, "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": 500,
            "labelOverlap": "greedy", "labelSeparation": 6,
        },
        "axisXQuantitative": {"tickCount": {"expr": f"max(2, floor(width / {OF_TICK}))"}},
        "legend": own | {
            "orient": "bottom", "columns": OF_LINE, "labelLimit": 150, "titleFontSize": 11,
            "labelFontSize": 11, "titleFontWeight": 500, "symbolStrokeWidth": 0,
        },
        "rule": {"color": ink},
        "text": {"color": ink},
    }  # fmt: skip
    return spec


def named(rows: Iterable[Row]) -> Any:
    return {"values": list(rows)}


def unnamed(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> Any:
    """A chart of rows without names, which take half the room: fields are taken by their places.
    (The page's policy forbids what Vega reads comma-separated values by.)"""
    places = {name: f"datum[{place}]" for place, name in enumerate(columns)}
    return alt.Chart({"values": rows}).transform_calculate(**places)


def tips_of(**titles: str) -> list[Any]:
    """Tooltips by field, `field="title|format"`."""
    tips = []
    for field, text in titles.items():
        title, _, shown = text.partition("|")
        more: dict[str, Any] = {"type": "nominal"}
        if shown:
            more = {"type": "quantitative", "format": shown}
        tips.append(alt.Tooltip(field=field, title=title, **more))
    return tips


def stacked(
    bars: Mapping[str, Mapping[str, float]], title: str, *, unit: str, colours: Sequence[str] = ()
) -> Any:
    """Bars by name, each stacked of its parts, which all have in one order; a `|` in a name begins
    a line."""
    names, order = list(bars), list(next(iter(bars.values())))
    rows: list[dict[str, Any]] = [
        {"name": name, "part": part, "value": value, "order": k}
        for name, parts in bars.items()
        for k, (part, value) in enumerate(parts.items())
    ]
    scale = alt.Scale(range=list(colours)) if colours else alt.Undefined
    shown = {row["part"] for row in rows if row["value"]}
    legend = alt.Legend(values=[part for part in order if part in shown])
    axis = alt.Axis(title=title)
    if unit == "s":
        axis = seconds_axis(max(row["value"] for row in rows), title)
    return (
        alt.Chart(named(rows))
        .mark_bar()
        .encode(
            x=alt.X("value:Q", stack="zero", axis=axis),
            y=alt.Y(
                "name:N", title=None, sort=names, axis=alt.Axis(labelExpr="split(datum.label, '|')")
            ),
            color=alt.Color("part:N", title=None, sort=order, scale=scale, legend=legend),
            order=alt.Order("order:Q"),
            tooltip=tips_of(name="of", part="part", value=f"{unit}|.4~g"),
        )
    )


def seconds_axis(most: float, title: str) -> Any:
    """An axis of seconds, in the unit that suits the largest."""
    units = (("seconds", 1), ("milliseconds", 1e3), ("microseconds", 1e6))
    unit, factor = next((each for each in units if most * each[1] >= 1), units[-1])
    return alt.Axis(
        title=f"{unit} {title}".strip(), labelExpr=f"format(datum.value * {factor:g}, '.5~g')"
    )


def capacity_line(nbytes: float) -> Any:
    """The line that no device's memory is above."""
    row = {"value": nbytes / GIB, "name": "capacity"}
    return (
        alt.Chart(named([row]))
        .mark_rule(strokeDash=[5, 3], strokeWidth=2)
        .encode(x="value:Q", tooltip=tips_of(value="GiB of a device|.4~g"))
    )
