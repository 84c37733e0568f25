"""Charts of the page, as Vega-Lite specifications made by Altair.

Text is in the page's colour (`currentColor`), in light, in dark and on paper. Many marks are drawn
on a canvas, which knows no such colour: a grey that both backgrounds allow stands for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import altair as alt

from meshwright.planner.page.cells import REHEARSED, Row, many, peaks_of, stage_words
from meshwright.planner.page.tables import busiest_stage, operator_words
from meshwright.planner.plan import GIB, expand_ranks

Spec = dict[str, Any]

BLOCK_COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "communication": "#e45756"}
MOST_LETTERS = 24  # of an operator and its module
ROOM = 2.2  # times the longest bar: what is written beside bars has room


def charts(data: Row) -> dict[str, Spec]:
    """Specifications by the name of the view they are in; a view without data has none."""
    specs = {
        "fit": fit(data),
        "alternatives": alternatives(data),
        "memory": memory(data),
        "components": components(data),
        "communication": communication(data),
        **{f"block-{k}": _block(block) for k, block in enumerate(data["blocks"])},
        "ranks": rank_map(data),
        "sensitivity": sensitivity(data),
        "sources": sources(data),
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


def fit(data: Row) -> Spec:
    """The peaks of the fullest device against its memory, the price's with its interval."""
    summary = data["summary"]
    peaks = {name: nbytes / GIB for name, nbytes in peaks_of(summary).items()}
    capacity = summary["memory_bytes"]
    low, high = (nbytes / GIB for nbytes in summary["memory_interval_bytes"])
    rows = [{"name": name, "peak": peak} for name, peak in peaks.items()]
    y = alt.Y("name:N", title=None, sort=list(peaks))
    bars = (
        chart_of(rows)
        .mark_bar(color="#4c78a8")
        .encode(
            x=alt.X("peak:Q", title="GiB of the fullest device"),
            y=y,
            tooltip=tips_of(name="peak", peak="GiB|.4~g"),
        )
    )
    interval = (
        chart_of([{"name": next(iter(peaks)), "low": low, "high": high}])
        .mark_rule(strokeWidth=3)
        .encode(x="low:Q", x2="high:Q", y=y, tooltip=tips_of(low="from, GiB|.4~g", high="to|.4~g"))
    )
    listed = ", ".join(f"{name} {peak:.1f} GiB" for name, peak in peaks.items())
    label = f"Peak memory of the fullest device: {listed}; a device has {capacity / GIB:.1f} GiB"
    chart = alt.layer(bars, interval, capacity_line(capacity))
    return specified(chart, label, height=BAR * (len(rows) + 1))


def alternatives(data: Row) -> Spec | None:
    """Step time against memory of the chosen plan and the others, with the Pareto front."""
    rows = [row for row in data["compared"] if row["peak_memory_bytes"] is not None]
    if len(rows) < 2:
        return None
    points = [
        {
            "id": row["id"],
            "name": row["name"],
            "step": row["step_time_s"],
            "memory": row["peak_memory_bytes"] / GIB,
            "kind": "chosen" if row["chosen"] else "alternative",
        }
        for row in rows
    ]
    front, least = [], float("inf")
    for point in sorted(points, key=lambda p: (p["step"], p["memory"])):
        if point["memory"] < least:
            least = point["memory"]
            front.append(point)
    axis = seconds_axis(points[-1]["step"], "of a step")
    x = alt.X("step:Q", scale=alt.Scale(zero=False), axis=axis)
    y = alt.Y("memory:Q", title="GiB of the fullest device", scale=alt.Scale(zero=False))
    line = chart_of(front).mark_line(interpolate="step-after", strokeDash=[4, 3], color=GREY)
    on_top = sorted(points, key=lambda p: p["kind"] == "chosen")
    marks = chart_of(on_top).mark_point(filled=True, size=140, cursor="pointer", opacity=1)
    kinds = alt.Scale(domain=["chosen", "alternative"], range=["#e45756", "#4c78a8"])
    color = alt.Color("kind:N", title="plan", scale=kinds)
    shape = alt.Shape("kind:N", title="plan", scale=alt.Scale(domain=["chosen", "alternative"]))
    tips = tips_of(name="plan", step="s a step|.4~g", memory="GiB|.4~g")
    chart = alt.layer(
        line.encode(x=x, y=y), marks.encode(x=x, y=y, color=color, shape=shape, tooltip=tips)
    )
    label = f"Step time against memory of {len(points)} plans; the dashed line is the Pareto front"
    return specified(chart, label, height=260)


def memory(data: Row) -> Spec:
    """Bytes of each device group by what holds them, against the capacity."""
    parts = {
        stage_words(row["stages"]): {part: nbytes / GIB for part, nbytes in row["parts"].items()}
        for row in data["memory"]
    }
    bars = stacked(parts, "GiB of a device", of="memory of", unit="GiB")
    rehearsed = data["summary"].get("rehearsed_memory_bytes", [])
    peaks = [
        {"name": stage_words(row["stages"]), "peak": REHEARSED, "value": nbytes / GIB}
        for row, nbytes in zip(data["memory"], rehearsed, strict=False)
    ]
    layers = [bars, capacity_line(data["summary"]["memory_bytes"])]
    layers += [_peak_marks(peaks)] if peaks else []
    label = "Memory of a device of each group by what holds it; the dashed line is what it has"
    chart = alt.layer(*layers).resolve_scale(color="independent", shape="independent")
    return specified(chart, label, height=BAR * (len(data["memory"]) + 1))


def _peak_marks(rows: Sequence[Row]) -> Any:
    """A mark at `value`, GiB, in the row of its `name`."""
    scale = alt.Scale(domain=[REHEARSED], range=["circle"])
    return (
        chart_of(rows)
        .mark_point(filled=True, size=60, opacity=1, stroke=GREY, strokeWidth=1)
        .encode(
            x="value:Q",
            y=alt.Y("name:N", sort=list(dict.fromkeys(row["name"] for row in rows))),
            shape=alt.Shape("peak:N", title=None, scale=scale),
            color=alt.value(INK),
            tooltip=tips_of(name="of", peak="peak", value="GiB|.4~g"),
        )
    )


def components(data: Row) -> Spec:
    """Seconds of each device group by what it does."""
    bars = {stage_words(row["stages"]): row["components_s"] for row in data["device_groups"]}
    chart = stacked(bars, "of a step", of="seconds of", unit="s")
    label = "Seconds of a step of each device group by what it does"
    return specified(chart, label, height=BAR * (len(bars) + 1))


def communication(data: Row) -> Spec | None:
    """Seconds of the busiest stage's collectives, exposed and hidden."""
    rows = data["communication"]
    if not rows:
        return None
    stage = busiest_stage(rows)
    by_name: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["stage"] == stage:
            name = f"{row['axis']} {row['collective']}|{row['link']}"
            parts = by_name.setdefault(name, {"exposed": 0.0, "hidden": 0.0})
            parts["exposed"] += row["exposed_s"]
            parts["hidden"] += row["seconds"] - row["exposed_s"]
    bars = dict(sorted(by_name.items(), key=lambda bar: -sum(bar[1].values())))
    colours = ("#e45756", "#9ecae9")
    chart = stacked(bars, "of a step", of="communication", unit="s", colours=colours)
    label = f"Seconds of communication of stage {stage} by axis, collective and link"
    return specified(chart, label, height=2 * BAR * len(bars))


def _block(block: Row) -> Spec | None:
    """Seconds and shardings in a block, from top to bottom; None where nothing takes time."""
    lines = list(_lines(block["steps"]))
    if not lines:
        return None
    names = [name for name, _, _ in lines]
    bars = [
        {"line": k, "name": name, "part": part, "value": value}
        for k, (name, _, parts) in enumerate(lines)
        for part, value in parts.items()
    ]
    ends = [
        {"line": k, "states": states, "value": sum(parts.values())}
        for k, (_, states, parts) in enumerate(lines)
    ]
    most = max(sum(parts.values()) for _, _, parts in lines)
    y = alt.Y("line:O", title=None, axis=alt.Axis(labelExpr=f"{json.dumps(names)}[datum.value]"))
    x = alt.X(
        "value:Q",
        stack="zero",
        axis=seconds_axis(most, ""),
        scale=alt.Scale(domain=[0, ROOM * most], nice=False),
    )
    kinds = [kind for kind in BLOCK_COLOURS if any(bar["part"] == kind for bar in bars)]
    scale = alt.Scale(domain=kinds, range=[BLOCK_COLOURS[kind] for kind in kinds])
    drawn = (
        chart_of(bars)
        .mark_bar()
        .encode(
            x=x,
            y=y,
            color=alt.Color("part:N", title="seconds in the", sort=kinds, scale=scale),
            order=alt.Order("part:N", sort="descending"),
            tooltip=tips_of(name="what", part="in", value="s|.4~g"),
        )
    )
    beside = chart_of(ends).mark_text(align="left", dx=4, fontSize=9, color=GREY)
    written = beside.encode(x="value:Q", y=y, text="states:N")
    label = (
        "What runs in a block, its seconds in one micro-batch and its shardings, from top to bottom"
    )
    return specified(alt.layer(drawn, written), label, height=BAR * len(lines))


def _lines(steps: list[Row]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Name, shardings and seconds of steps that take time; a collective has the states of the value
    that it moves."""
    states = ""
    for step in steps:
        match step["kind"]:
            case "move":
                states = f"{step['from']} → {step['to']}"
            case "collective" if step["seconds"]:
                name = f"{step['collective']} ({step['pass']})"
                yield name, states, {"communication": step["seconds"]}
            case "run":
                states = _states(step)
                both = {"forward": step["forward_s"], "backward": step["backward_s"]}
                if sum(both.values()):
                    yield _short(*operator_words(step)), states, both


def _short(module: str, operator: str) -> str:
    """Both in the room that a label has."""
    room = MOST_LETTERS - len(operator)
    if len(module) > room:
        module = module[: max(room - 1, 1)] + "…"
    return f"{module} {operator}".strip()


def _states(step: Row) -> str:
    """Operands → results; equal neighbours are counted."""

    def side(states: Sequence[str]) -> str:
        counts = ((state, len(list(run))) for state, run in groupby(states))
        return ", ".join(f"{state} ×{n}" if n > 1 else state for state, n in counts)

    return " → ".join(filter(None, (side(step["operands"]), side(step["results"]))))


def sensitivity(data: Row) -> Spec | None:
    """The factor on each property of the cluster that flips the decision."""
    rows = [row for row in data.get("sensitivity", ()) if row["factor"] is not None]
    if not rows:
        return None
    bars = [
        {
            "name": row["property"],
            "factor": row["factor"],
            "one": 1,
            "plan": row["plan"] or "no plan known from the search fits",
        }
        for row in sorted(rows, key=lambda row: max(row["factor"], 1 / row["factor"]))
    ]
    chart = (
        chart_of(bars)
        .mark_bar()
        .encode(
            x=alt.X("one:Q", title="times what it is", scale=alt.Scale(type="log", base=2)),
            x2="factor:Q",
            y=alt.Y("name:N", title=None, sort=[bar["name"] for bar in bars]),
            tooltip=tips_of(name="property", factor="times|.3~g", plan="then"),
        )
    )
    label = "The factor on each property of the cluster from which on another plan is chosen"
    return specified(chart, label, height=BAR * (len(bars) + 1))


def sources(data: Row) -> Spec:
    """Sources of the operators' seconds."""
    bars, colours = {"seconds": data["summary"]["rests_on"]}, ("#54a24b", "#eeca3b", "#9d755d")
    title = "share of the operators' seconds"
    chart = stacked(bars, title, of="seconds that are", unit="share", colours=colours)
    label = "Share of the operators' seconds by what they rest on"
    return specified(chart, label, height=2 * BAR)


# --- map of ranks: nodes beside each other, a node's ranks below each other, coloured by axis -----


AXES = ("group", "dp", "cp", "ep", "tp")
COLUMNS = ("rank", "node", "slot", *AXES)
NODES_OF_LINE = 64  # nodes beside each other
FEW = 16  # places on an axis that have a colour each in a legend
MAX_NUMBERED = 64  # ranks whose numbers are written
SIDE = 0.92  # of a cell that is filled
BRIGHT = 0.6  # part of the scale of colours from which on black is read better than white


def rank_map(data: Row) -> Spec:
    """Nodes × ranks, coloured by the place on an axis."""
    groups, cluster = data["device_groups"], data["cluster"]
    node = cluster["devices_per_node"]
    rows = rank_rows(groups, node)
    axes = axes_in_use(groups)
    lines = -(-cluster["num_nodes"] // NODES_OF_LINE)
    of_line = f"floor(datum.node / {NODES_OF_LINE}) * {node + 1} + datum.slot"
    in_line = f"datum.node % {NODES_OF_LINE}"
    base = unnamed(rows, COLUMNS).transform_calculate(
        x=in_line,
        x2=f"{in_line} + {SIDE}",
        y=of_line,
        y2=f"{of_line} + {SIDE}",
        middle_x=f"{in_line} + {SIDE / 2}",
        middle_y=f"{of_line} + {SIDE / 2}",
        colour="toNumber(datum[by])",
    )
    x, y = _sides(cluster["num_nodes"], node, lines)
    cells = base.mark_rect().encode(
        x=x, x2="x2:Q", y=y, y2="y2:Q", color=_colour(groups, axes),
        tooltip=tips_of(**{name: name for name in ("rank", "node", *axes)}),
    )  # fmt: skip
    buttons: Any = alt.binding_radio(options=axes, name="colour by ")
    by = alt.param(name="by", value=axes[0], bind=buttons if len(axes) > 1 else alt.Undefined)
    layers = [cells, *([_numbers(base, rows, axes)] if len(rows) <= MAX_NUMBERED else [])]
    where = many(cluster["num_nodes"], "node")
    label = f"{many(len(rows), 'rank')} on {where}, coloured by {_of(axes)}"
    height = max(3 if lines > 4 else BAR // 2, min(BAR, 220 // (lines * node)))
    chart = alt.layer(*layers).add_params(by)
    return specified(chart, label, height=height * (lines * (node + 1) - 1), marks=len(rows))


def rank_rows(groups: Sequence[Row], devices_per_node: int) -> list[tuple[int, ...]]:
    """`COLUMNS` of each rank, by rank."""
    rows = []
    for number, group in enumerate(groups):
        cp, ep, tp = group["cp"], group["ep"], group["tp"]
        for place, rank in enumerate(expand_ranks(group["ranks"])):
            node, slot = divmod(rank, devices_per_node)
            axes = (place // (cp * tp), place // tp % cp, place // group["ep_stride"] % ep)
            rows.append((rank, node, slot, number, *axes, place % tp))
    return sorted(rows)


def axes_in_use(groups: Sequence[Row]) -> list[str]:
    """Axes on which ranks differ; the device group, where they differ on none."""
    used = [axis for axis in AXES[1:] if any(group[axis] > 1 for group in groups)]
    return ["group", *used] if len(groups) > 1 or not used else used


def _of(axes: Sequence[str]) -> str:
    words = {"group": "device group"}
    return " or ".join(words.get(axis, f"place on {axis}") for axis in axes)


def _colour(groups: Sequence[Row], axes: Sequence[str]) -> Any:
    few = max(len(groups), *(group[axis] for group in groups for axis in AXES[1:])) <= FEW
    return alt.Color(
        "colour:O" if few else "colour:Q",
        title="place on the axis" if len(axes) > 1 else _of(axes),
        scale=alt.Scale(scheme="viridis"),
        legend=alt.Legend(symbolLimit=FEW, labelExpr="by + ' ' + datum.label")
        if few
        else alt.Legend(format="d"),
    )


def _numbers(base: Any, rows: Sequence[tuple[int, ...]], axes: Sequence[str]) -> Any:
    """The number of each rank in its cell, to be read on any colour."""
    most = {axis: max(row[COLUMNS.index(axis)] for row in rows) for axis in axes}
    bright = f"datum.colour > {BRIGHT} * {json.dumps(most)}[by]"
    return base.mark_text(fontSize=10).encode(
        x="middle_x:Q",
        y="middle_y:Q",
        text="rank:Q",
        color=alt.condition(bright, alt.value("black"), alt.value("white")),
    )


def _sides(num_nodes: int, node: int, lines: int) -> tuple[Any, Any]:
    """Both axes: with the number of each node and slot, or of the nodes at the left."""
    columns, long = min(num_nodes, NODES_OF_LINE), lines * (node + 1) - 1
    if lines == 1:
        x = _side(alt.X, "node", columns, [k + SIDE / 2 for k in range(columns)])
        y = _side(alt.Y, "rank of the node", long, [k + SIDE / 2 for k in range(node)])
        return x, y
    lefts = [line * (node + 1) + node / 2 for line in range(lines)]
    number = f"floor(datum.value / {node + 1}) * {NODES_OF_LINE}"
    x = _side(alt.X, f"nodes, {columns} a line", columns, [])
    return x, _side(alt.Y, "node at the left", long, lefts, number)


def _side(
    kind: Any, title: str, size: int, values: Sequence[float], number: str = "floor(datum.value)"
) -> Any:
    """A side of the map, `size` long, with a `number` at values; the first rank is at the top."""
    field = "x:Q" if kind is alt.X else "y:Q"
    return kind(
        field,
        title=title,
        scale=alt.Scale(domain=[0, size - 1 + SIDE], nice=False, reverse=kind is alt.Y),
        axis=alt.Axis(
            grid=False, ticks=False, domain=False, labels=bool(values),
            values=list(values), labelExpr=number,
        ),
    )  # fmt: skip


# --- form, data, tooltips, axes, stacked bars -----------------------------------------------------


MANY = 2_000  # marks, from which on a chart is drawn on a canvas
GREY = "#808080"
INK = "currentColor"
BAR = 18  # pixels
OF_LINE = 3  # entries of a legend beside each other
OF_TICK = 70  # pixels between marks of an axis


def specified(chart: Any, title: str, *, height: int, marks: int = 0) -> Spec:
    """The chart as data, with its label for readers of the screen."""
    canvas = marks > MANY
    ink = GREY if canvas else INK
    colours = {"labelColor": ink, "titleColor": ink}
    sized = chart.properties(description=title, width="container", height=height)
    spec: Spec = sized.to_dict(validate=False)
    spec["background"] = None
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    spec["usermeta"] = {"embedOptions": {"renderer": "canvas" if canvas else "svg"}}
    spec["config"] = {
        "font": "sans-serif",
        "view": {"stroke": None},
        "axis": colours | {
            "domainColor": GREY, "tickColor": GREY, "gridColor": GREY, "gridOpacity": 0.25,
            "labelLimit": 150, "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": 500,
            "labelOverlap": "greedy", "labelSeparation": 6,
        },
        "axisXQuantitative": {"tickCount": {"expr": f"max(2, floor(width / {OF_TICK}))"}},
        "legend": colours | {
            "orient": "bottom", "columns": OF_LINE, "labelLimit": 150, "titleFontSize": 11,
            "labelFontSize": 11, "titleFontWeight": 500, "symbolStrokeWidth": 0,
        },
        "rule": {"color": ink},
        "text": {"color": ink},
    }  # fmt: skip
    return spec


def chart_of(rows: Iterable[Row]) -> Any:
    return alt.Chart({"values": list(rows)})


def unnamed(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> Any:
    """A chart of rows without names, which take half the room: fields are taken by their places.
    (The page's policy forbids what Vega reads comma-separated values by.)"""
    places = {name: f"datum[{place}]" for place, name in enumerate(columns)}
    return alt.Chart({"values": rows}).transform_calculate(**places)


def tips_of(**titles: str) -> list[Any]:
    """Tooltips by field, `field="title|format"`."""
    tips = []
    for field, text in titles.items():
        title, _, style = text.partition("|")
        kind: Any = {"type": "quantitative", "format": style} if style else {"type": "nominal"}
        tips.append(alt.Tooltip(field=field, title=title, **kind))
    return tips


def stacked(
    bars: Mapping[str, Mapping[str, float]],
    title: str,
    *,
    of: str,
    unit: str,
    colours: Sequence[str] = (),
) -> Any:
    """Bars by name, each stacked of its parts, which all have in one order; a `|` in a name begins
    a line. `of` says what the colours are of."""
    order = list(next(iter(bars.values())))
    rows: list[dict[str, Any]] = [
        {"name": name, "part": part, "value": value, "order": k}
        for name, parts in bars.items()
        for k, (part, value) in enumerate(parts.items())
    ]
    scale = alt.Scale(range=list(colours)) if colours else alt.Undefined
    legend = alt.Legend(values=[n for n in order if any(parts[n] for parts in bars.values())])
    axis = alt.Axis(title=title)
    if unit == "s":
        axis = seconds_axis(max(row["value"] for row in rows), title)
    return (
        chart_of(rows)
        .mark_bar()
        .encode(
            x=alt.X("value:Q", stack="zero", axis=axis),
            y=alt.Y(
                "name:N",
                title=None,
                sort=list(bars),
                axis=alt.Axis(labelExpr="split(datum.label, '|')"),
            ),
            color=alt.Color("part:N", title=of, sort=order, scale=scale, legend=legend),
            order=alt.Order("order:Q"),
            tooltip=tips_of(name="of", part="part", value=f"{unit}|.4~g"),
        )
    )


def seconds_axis(most: float, title: str) -> Any:
    """An axis of seconds, in the unit that suits the largest."""
    units = (("seconds", 1), ("milliseconds", 1e3), ("microseconds", 1e6))
    unit, factor = next(((name, n) for name, n in units if most * n >= 1), units[-1])
    return alt.Axis(
        title=f"{unit} {title}".strip(), labelExpr=f"format(datum.value * {factor:g}, '.5~g')"
    )


def capacity_line(nbytes: float) -> Any:
    """The line of a device's memory."""
    return (
        chart_of([{"value": nbytes / GIB, "name": "capacity"}])
        .mark_rule(strokeDash=[5, 3], strokeWidth=2)
        .encode(x="value:Q", tooltip=tips_of(value="GiB of a device|.4~g"))
    )
