"""The map of ranks: nodes beside each other, a node's ranks below each other, coloured by axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import altair as alt

from meshwright.planner.page.cells import Row, many
from meshwright.planner.page.drawing import BAR, Spec, specified, tips_of, unnamed
from meshwright.planner.plan import expand_ranks

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
