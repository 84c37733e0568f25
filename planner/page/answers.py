"""The sentence that answers the question of each view, from the report's data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.planner.page.cells import gib, sent, share, stage_words, time
from meshwright.planner.page.plans import compared
from meshwright.planner.page.tables import busiest_stage
from meshwright.planner.plan import slower

Row = Mapping[str, Any]


def answers(data: Row) -> dict[str, str]:
    """Sentences by the name of the view."""
    return {
        "alternatives": _alternatives(data),
        "memory": _memory(data),
        "components": _components(data),
        "timeline": _timeline(data),
        "communication": _communication(data),
        "blocks": f"{len(data['blocks'])} distinct blocks; blocks that do the same are one.",
        "ranks": _ranks(data),
        "sources": _sources(data),
    }


def _alternatives(data: Row) -> str:
    others = [row for row in compared(data) if not row["chosen"]]
    if not others:
        searched = "complete" in data["summary"]
        return f"{'No other plan was found' if searched else 'The plan was given, not searched'}."
    first, step_s = others[0], data["summary"]["step_time_s"]
    difference = time(abs(first["step_time_s"] - step_s)).text
    return (
        f"The fastest of the {len(others)} others, {first['plan']}, takes {difference} "
        f"{'more' if first['slower'] >= 0 else 'less'} a step ({slower(first['slower'])})."
    )


def _memory(data: Row) -> str:
    fullest = max(data["memory"], key=lambda row: row["priced_bytes"])
    part, nbytes = max(fullest["parts"].items(), key=lambda item: item[1])
    of = gib(data["summary"]["memory_bytes"]).text
    text = (
        f"A device of {stage_words(fullest['stages'])} takes most, "
        f"{gib(fullest['priced_bytes']).text} of {of}; {part} {gib(nbytes).text} of it."
    )
    if "course_bytes" in fullest:
        where = f" of {fullest['block']}" if fullest["block"] else ""
        when = f"in the {fullest['moment'].replace('_', ' ')}{where}"
        if math.ceil(fullest["course_bytes"]) >= fullest["priced_bytes"]:
            return f"{text} The peak comes {when}."
        text += (
            " That is the most of each kind, which need not come together: followed through a "
            f"step, at most {gib(fullest['course_bytes']).text} at once, {when}."
        )
    return text


def _components(data: Row) -> str:
    parts = data["components_s"]
    whole = sum(parts.values()) or 1.0
    listed = ", ".join(
        f"{name} {time(value).text} ({share(value / whole).text})" for name, value in parts.items()
    )
    return f"The busiest devices: {listed}."


def _timeline(data: Row) -> str:
    timeline = data["timeline"]
    if timeline["complete"]:
        return f"All {timeline['events']:,} events of the simulated step."
    return (
        f"{timeline['events']:,} events are too many for a page: the first, the steady and the "
        "last window."
    )


def _communication(data: Row) -> str:
    rows = data["communication"]
    if not rows:
        return "No rank communicates."
    stage = busiest_stage(rows)
    own = [row for row in rows if row["stage"] == stage]
    exposed, whole = (sum(row[key] for row in own) for key in ("exposed_s", "seconds"))
    return (
        f"Stage {stage} waits longest: {time(exposed).text} of {time(whole).text} are exposed; "
        f"a rank sends {sent(sum(row['sent_bytes'] for row in own)).text} a step."
    )


def _ranks(data: Row) -> str:
    cluster, groups = data["cluster"], data["device_groups"]
    count = cluster["num_nodes"] * cluster["devices_per_node"]
    return (
        f"{_many(count, 'rank')} on {_many(cluster['num_nodes'], 'node')} of "
        f"{cluster['devices_per_node']} {cluster['device']}, in "
        f"{_many(len(groups), 'device group')}."
    )


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + "s" * (count != 1)


def _sources(data: Row) -> str:
    error = data["uncertainty"]
    step, memory = error["step"], error["memory"]
    return (
        f"A measured step was {step['low']:.2f} to {step['high']:.2f} times the predicted with "
        f"{error['level']:.0%} ({step['rows']} measurements: {step['of']}); memory "
        f"{memory['low']:.2f} to {memory['high']:.2f} times ({memory['rows']}: {memory['of']})."
    )
