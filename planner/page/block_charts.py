"""The diagram of a distinct block as a chart: from top to bottom operators with their seconds and
shardings, and the collectives in between."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import altair as alt

from meshwright.planner.page.blocks import operator_words
from meshwright.planner.page.drawing import BAR, GREY, Spec, named, seconds_axis, specified, tips_of

Row = Mapping[str, Any]

COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "communication": "#e45756"}
MOST_LETTERS = 24  # of an operator and its module
ROOM = 2.2  # times the longest bar: what is written beside bars has room


def block_charts(data: Row) -> dict[str, Spec]:
    """A chart for each block in which something takes time."""
    found = {f"block-{k}": _chart(block) for k, block in enumerate(data["blocks"])}
    return {name: spec for name, spec in found.items() if spec is not None}


def _chart(block: Row) -> Spec | None:
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
    kinds = [kind for kind in COLOURS if any(bar["part"] == kind for bar in bars)]
    scale = alt.Scale(domain=kinds, range=[COLOURS[kind] for kind in kinds])
    drawn = (
        alt.Chart(named(bars))
        .mark_bar()
        .encode(
            x=x,
            y=y,
            color=alt.Color("part:N", title=None, sort=kinds, scale=scale),
            order=alt.Order("part:N", sort="descending"),
            tooltip=tips_of(name="what", part="in", value="s|.4~g"),
        )
    )
    beside = alt.Chart(named(ends)).mark_text(align="left", dx=4, fontSize=9, color=GREY)
    written = beside.encode(x="value:Q", y=y, text="states:N")
    label = (
        "What runs in a block, its seconds in one micro-batch and its shardings, from top to bottom"
    )
    return specified(alt.layer(drawn, written), label, height=BAR * len(lines))


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
