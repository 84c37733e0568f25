"""The charts of the page, as Vega-Lite specifications made by Altair.

Text is in the page's own colour (`currentColor`), so that a chart is right in light, in dark and on
paper without being drawn again. Where there are many marks they are drawn on a canvas, which knows
no such colour: a grey that both backgrounds allow stands for it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import altair as alt

from meshwright.planner.page import drawing
from meshwright.planner.page.blocks import operator_words
from meshwright.planner.page.cells import REHEARSED, Row, many, peaks_of, stage_words
from meshwright.planner.page.tables import busiest_stage
from meshwright.planner.plan import GIB, expand_ranks

KINDS = {  # of events, and the colours that they have in every window
    "forward": "#4c78a8",
    "backward": "#f58518",
    "backward (inputs)": "#f58518",
    "backward (weights)": "#ffbf79",
    "optimizer": "#54a24b",
    "send": "#72b7b2",
    "gradient reduction": "#e45756",
}
SAID = ("send", "gradient reduction")  # kinds of communication
EVENT = ("group", "stage", "kind", "microbatch", "start", "ticks")
TICKS = 1_000_000  # of a window: its events are drawn to this part of it
BLOCK_COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "communication": "#e45756"}
MOST_LETTERS = 24  # of an operator and its module
ROOM = 2.2  # times the longest bar: what is written beside bars has room


def charts(data: Row) -> dict[str, drawing.Spec]:
    """Specifications by the name of the view they are in; a view without data has none."""
    found = {
        "fit": fit(data),
        "alternatives": alternatives(data),
        "memory": memory(data),
        "components": components(data),
        **timelines(data),
        "communication": communication(data),
        **block_charts(data),
        "ranks": rank_map(data),
        "sensitivity": sensitivity(data),
        "sources": sources(data),
    }
    return {name: spec for name, spec in found.items() if spec is not None}


def fit(data: Row) -> drawing.Spec:
    """The peaks of the fullest device against its memory, the price's with its interval."""
    summary = data["summary"]
    peaks = {name: nbytes / GIB for name, nbytes in peaks_of(summary).items()}
    capacity = summary["memory_bytes"]
    low, high = (nbytes / GIB for nbytes in summary["memory_interval_bytes"])
    names = list(peaks)
    rows = [{"name": name, "peak": peak} for name, peak in peaks.items()]
    whole = {"name": names[0], "low": low, "high": high}
    y = alt.Y("name:N", title=None, sort=names)
    bars = (
        alt.Chart(drawing.named(rows))
        .mark_bar(color="#4c78a8")
        .encode(
            x=alt.X("peak:Q", title="GiB of the fullest device"),
            y=y,
            tooltip=drawing.tips_of(name="peak", peak="GiB|.4~g"),
        )
    )
    interval = (
        alt.Chart(drawing.named([whole]))
        .mark_rule(strokeWidth=3)
        .encode(
            x="low:Q",
            x2="high:Q",
            y=y,
            tooltip=drawing.tips_of(low="from, GiB|.4~g", high="to|.4~g"),
        )
    )
    label = "Peak memory of the fullest device: " + ", ".join(
        f"{name} {peak:.1f} GiB" for name, peak in peaks.items()
    )
    label += f"; a device has {capacity / GIB:.1f} GiB"
    chart = alt.layer(bars, interval, drawing.capacity_line(capacity))
    return drawing.specified(chart, label, height=drawing.BAR * (len(rows) + 1))


def alternatives(data: Row) -> drawing.Spec | None:
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
    axis = drawing.seconds_axis(points[-1]["step"], "of a step")
    x = alt.X("step:Q", scale=alt.Scale(zero=False), axis=axis)
    y = alt.Y("memory:Q", title="GiB of the fullest device", scale=alt.Scale(zero=False))
    line = alt.Chart(drawing.named(front)).mark_line(
        interpolate="step-after", strokeDash=[4, 3], color=drawing.GREY
    )
    marks = alt.Chart(drawing.named(points)).mark_point(
        filled=True, size=140, cursor="pointer", opacity=1
    )
    kinds = alt.Scale(domain=["chosen", "alternative"], range=["#e45756", "#4c78a8"])
    color = alt.Color("kind:N", title=None, scale=kinds)
    shape = alt.Shape("kind:N", title=None, scale=alt.Scale(domain=["chosen", "alternative"]))
    tips = drawing.tips_of(name="plan", step="s a step|.4~g", memory="GiB|.4~g")
    chart = alt.layer(
        line.encode(x=x, y=y), marks.encode(x=x, y=y, color=color, shape=shape, tooltip=tips)
    )
    label = f"Step time against memory of {len(points)} plans; the dashed line is the Pareto front"
    return drawing.specified(chart, label, height=260)


def memory(data: Row) -> drawing.Spec:
    """Bytes of each device group by what holds them, against the capacity."""
    held = {
        stage_words(row["stages"]): {part: nbytes / GIB for part, nbytes in row["parts"].items()}
        for row in data["memory"]
    }
    bars = drawing.stacked(held, "GiB of a device", unit="GiB")
    rehearsed = data["summary"].get("rehearsed_memory_bytes", [])
    peaks = [
        {"name": stage_words(row["stages"]), "peak": REHEARSED, "value": nbytes / GIB}
        for row, nbytes in zip(data["memory"], rehearsed, strict=False)
    ]
    layers = [bars, drawing.capacity_line(data["summary"]["memory_bytes"])]
    if peaks:
        layers.append(_peak_marks(peaks))
    label = "Memory of a device of each group by what holds it; the dashed line is what it has"
    chart = alt.layer(*layers).resolve_scale(color="independent", shape="independent")
    return drawing.specified(chart, label, height=drawing.BAR * (len(data["memory"]) + 1))


def _peak_marks(rows: Sequence[Row]) -> Any:
    """A mark at `value`, GiB, in the row of its `name`."""
    scale = alt.Scale(domain=[REHEARSED], range=["circle"])
    return (
        alt.Chart(drawing.named(rows))
        .mark_point(filled=True, size=60, opacity=1, stroke=drawing.GREY, strokeWidth=1)
        .encode(
            x="value:Q",
            y=alt.Y("name:N", sort=list(dict.fromkeys(row["name"] for row in rows))),
            shape=alt.Shape("peak:N", title=None, scale=scale),
            color=alt.value(drawing.INK),
            tooltip=drawing.tips_of(name="of", peak="peak", value="GiB|.4~g"),
        )
    )


def components(data: Row) -> drawing.Spec:
    """Seconds of each device group by what it does."""
    bars = {stage_words(row["stages"]): row["components_s"] for row in data["device_groups"]}
    chart = drawing.stacked(bars, "of a step", unit="s")
    label = "Seconds of a step of each device group by what it does"
    return drawing.specified(chart, label, height=drawing.BAR * (len(bars) + 1))


def timelines(data: Row) -> dict[str, drawing.Spec]:
    """A chart for each window of the simulated step."""
    timeline = data["timeline"]
    names = [stage_words(group["stages"]) for group in data["device_groups"]]
    return {
        f"timeline-{number}": _window(window, names)
        for number, window in enumerate(timeline["windows"])
    }


def _window(window: Row, names: Sequence[str]) -> drawing.Spec:
    events = list(csv.DictReader(window["events_csv"].splitlines()))
    shown = {event["kind"] for event in events}
    kinds = [kind for kind in KINDS if kind in shown]
    start_s = float(window["start_s"])
    unit_s = (float(window["end_s"]) - start_s) / TICKS or 1.0
    rows = list(_ticks(events, kinds, start_s, unit_s))
    lanes = ["communication" if kind in SAID else "compute" for kind in kinds]
    scale = alt.Scale(domain=kinds, range=[KINDS[kind] for kind in kinds])
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    chart = (
        drawing.unnamed(rows, EVENT)
        .transform_calculate(
            name=f"{json.dumps(list(names))}[datum.group]",
            what=f"{json.dumps(kinds)}[datum.kind]",
            lane=f"{json.dumps(lanes)}[datum.kind]",
            start_s=f"{start_s!r} + {unit_s!r} * datum.start",
            seconds=f"{unit_s!r} * datum.ticks",
        )
        .transform_calculate(end_s="datum.start_s + datum.seconds")
        .mark_bar(clip=True)
        .encode(
            x=alt.X(
                "start_s:Q",
                axis=drawing.seconds_axis(window["end_s"], "from the start of the step"),
                scale=alt.Scale(domain=[window["start_s"], window["end_s"]], nice=False),
            ),
            x2="end_s:Q",
            y=alt.Y("name:N", title=None, sort=list(names)),
            yOffset=alt.YOffset("lane:N", sort=["compute", "communication"]),
            color=alt.Color("what:N", title=None, sort=kinds, scale=scale),
            tooltip=drawing.tips_of(
                name="on", what="what", stage="stage", microbatch="micro-batch",
                start_s="from, s|.5~g", seconds="takes, s|.4~g",
            ),
        )
        .add_params(zoom)
    )  # fmt: skip
    label = f"Simulated step, {window['window']}: what each device group does when; scroll zooms"
    height = max(4 * drawing.BAR, 2 * drawing.BAR * len(names))
    return drawing.specified(chart, label, height=height, marks=len(rows))


def _ticks(
    events: Sequence[Mapping[str, str]], kinds: Sequence[str], start_s: float, unit_s: float
) -> Iterator[tuple[int | str, ...]]:
    """`EVENT` of each, from `start_s` in units of `unit_s`: a third of the room of seconds."""
    number = {kind: place for place, kind in enumerate(kinds)}
    for event in events:
        start, end = ((float(event[key]) - start_s) / unit_s for key in ("start_s", "end_s"))
        microbatch = event["microbatch"] and int(event["microbatch"])
        where = int(event["group"]), int(event["stage"]), number[event["kind"]], microbatch
        yield *where, round(start), round(end) - round(start)


def communication(data: Row) -> drawing.Spec | None:
    """Seconds of the busiest stage's collectives, exposed and hidden."""
    rows = data["communication"]
    if not rows:
        return None
    stage = busiest_stage(rows)
    own: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["stage"] == stage:
            name = f"{row['axis']} {row['collective']}|{row['link']}"
            parts = own.setdefault(name, {"exposed": 0.0, "hidden": 0.0})
            parts["exposed"] += row["exposed_s"]
            parts["hidden"] += row["seconds"] - row["exposed_s"]
    bars = dict(sorted(own.items(), key=lambda item: -sum(item[1].values())))
    colours = ("#e45756", "#9ecae9")
    chart = drawing.stacked(bars, f"of a step, stage {stage}", unit="s", colours=colours)
    label = f"Seconds of communication of stage {stage} by axis, collective and link"
    return drawing.specified(chart, label, height=2 * drawing.BAR * len(own))


def block_charts(data: Row) -> dict[str, drawing.Spec]:
    """A chart for each block in which something takes time."""
    found = {f"block-{k}": _block(block) for k, block in enumerate(data["blocks"])}
    return {name: spec for name, spec in found.items() if spec is not None}


def _block(block: Row) -> drawing.Spec | None:
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
        axis=drawing.seconds_axis(most, ""),
        scale=alt.Scale(domain=[0, ROOM * most], nice=False),
    )
    kinds = [kind for kind in BLOCK_COLOURS if any(bar["part"] == kind for bar in bars)]
    scale = alt.Scale(domain=kinds, range=[BLOCK_COLOURS[kind] for kind in kinds])
    drawn = (
        alt.Chart(drawing.named(bars))
        .mark_bar()
        .encode(
            x=x,
            y=y,
            color=alt.Color("part:N", title=None, sort=kinds, scale=scale),
            order=alt.Order("part:N", sort="descending"),
            tooltip=drawing.tips_of(name="what", part="in", value="s|.4~g"),
        )
    )
    beside = alt.Chart(drawing.named(ends)).mark_text(
        align="left", dx=4, fontSize=9, color=drawing.GREY
    )
    written = beside.encode(x="value:Q", y=y, text="states:N")
    label = (
        "What runs in a block, its seconds in one micro-batch and its shardings, from top to bottom"
    )
    return drawing.specified(alt.layer(drawn, written), label, height=drawing.BAR * len(lines))


def _lines(steps: list[Row]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Name, shardings and seconds of what takes time; a collective has the states of the value that
    it moves."""
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
    return (
        f"{module if len(module) <= room else module[: max(room - 1, 1)] + '…'} {operator}".strip()
    )


def _states(step: Row) -> str:
    """Operands → results; what is there several times is counted."""
    sides = [
        ", ".join(f"{state} ×{n}" if (n := len(list(own))) > 1 else state for state, own in alike)
        for alike in (groupby(step["operands"]), groupby(step["results"]))
    ]
    return " → ".join(filter(None, sides))


def sensitivity(data: Row) -> drawing.Spec | None:
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
        alt.Chart(drawing.named(bars))
        .mark_bar()
        .encode(
            x=alt.X("one:Q", title="times what it is", scale=alt.Scale(type="log", base=2)),
            x2="factor:Q",
            y=alt.Y("name:N", title=None, sort=[bar["name"] for bar in bars]),
            tooltip=drawing.tips_of(name="property", factor="times|.3~g", plan="then"),
        )
    )
    label = "The factor on each property of the cluster from which on another plan is chosen"
    return drawing.specified(chart, label, height=drawing.BAR * (len(bars) + 1))


def sources(data: Row) -> drawing.Spec:
    """What the operators' seconds rest on."""
    rests, colours = data["summary"]["rests_on"], ("#54a24b", "#eeca3b", "#9d755d")
    title = "share of the operators' seconds"
    chart = drawing.stacked({"seconds": rests}, title, unit="share", colours=colours)
    return drawing.specified(
        chart, "Share of the operators' seconds by what they rest on", height=2 * drawing.BAR
    )


# --- map of ranks ---------------------------------------------------------------------------------

# The map of ranks: nodes beside each other, a node's ranks below each other, coloured by axis.


AXES = ("group", "dp", "cp", "ep", "tp")
COLUMNS = ("rank", "node", "slot", *AXES)
NODES_OF_LINE = 64  # nodes beside each other
FEW = 16  # places on an axis that have a colour each in a legend
MAX_NUMBERED = 64  # ranks whose numbers are written
SIDE = 0.92  # of a cell that is filled
BRIGHT = 0.6  # part of the scale of colours from which on black is read better than white


def rank_map(data: Row) -> drawing.Spec:
    """Nodes × ranks, coloured by the place on an axis."""
    groups, cluster = data["device_groups"], data["cluster"]
    node = cluster["devices_per_node"]
    rows = rank_rows(groups, node)
    axes = axes_in_use(groups)
    lines = -(-cluster["num_nodes"] // NODES_OF_LINE)
    of_line = f"floor(datum.node / {NODES_OF_LINE}) * {node + 1} + datum.slot"
    in_line = f"datum.node % {NODES_OF_LINE}"
    base = drawing.unnamed(rows, COLUMNS).transform_calculate(
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
        tooltip=drawing.tips_of(**{name: name for name in ("rank", "node", *axes)}),
    )  # fmt: skip
    buttons: Any = alt.binding_radio(options=axes, name="colour by ")
    by = alt.param(name="by", value=axes[0], bind=buttons if len(axes) > 1 else alt.Undefined)
    layers = [cells, *([_numbers(base, rows, axes)] if len(rows) <= MAX_NUMBERED else [])]
    where = many(cluster["num_nodes"], "node")
    label = f"{many(len(rows), 'rank')} on {where}, coloured by {_of(axes)}"
    height = max(3 if lines > 4 else drawing.BAR // 2, min(drawing.BAR, 220 // (lines * node)))
    chart = alt.layer(*layers).add_params(by)
    return drawing.specified(
        chart, label, height=height * (lines * (node + 1) - 1), marks=len(rows)
    )


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
        legend=alt.Legend(symbolLimit=FEW) if few else alt.Legend(format="d"),
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
