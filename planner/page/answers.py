"""The sentence that answers the question of each view, from the report's data."""

from __future__ import annotations

from meshwright.planner.page.cells import Row, between, gib, many, sent, share, stage_words, time
from meshwright.planner.page.tables import busiest_stage, compared
from meshwright.planner.plan import peak_words, slower

LEAST = 1e-3  # of a step: what takes less is in the table alone


def answers(data: Row) -> dict[str, str]:
    """Sentences by the name of the view."""
    rehearsal = {"rehearsal": _rehearsed(data["rehearsal"])} if "rehearsal" in data else {}
    return {
        "chosen": _chosen(data["summary"]),
        **rehearsal,
        "alternatives": _alternatives(data),
        "memory": _memory(data),
        "components": _components(data),
        "timeline": _timeline(data),
        "communication": _communication(data),
        "blocks": f"{len(data['blocks'])} distinct blocks; blocks that do the same are one.",
        "ranks": _ranks(data),
        "sources": _sources(data),
    }


def _chosen(summary: Row) -> str:
    likely = share(summary["memory_probability"]).text
    text = f"Memory: {summary['memory_verdict']} ({likely}), by the {summary['memory_verdict_by']}."
    if summary["memory_verdict_by"] == "price":
        interval = between(gib, summary["memory_interval_bytes"])
        text += f" The peak is {interval} with 80 % (the thin line)."
    else:
        text += (
            f" Rehearsed are {gib(summary['rehearsed_tensor_bytes']).text} of tensors, "
            f"{gib(summary['bytes_beside_tensors']).text} are reserved beside them."
        )
    return text


def _alternatives(data: Row) -> str:
    others = [row for row in compared(data) if not row["chosen"]]
    if not others:
        searched = "complete" in data["summary"]
        return f"{'No other plan was found' if searched else 'The plan was given, not searched'}."
    first, step_s = others[0], data["summary"]["step_time_s"]
    difference = time(abs(first["step_time_s"] - step_s)).text
    return (
        f"The fastest of the {len(others)} others, {first['plan']}, takes {difference} "
        f"{'more' if first['slower'] >= 0 else 'less'} a step ({slower(first['slower'])})"
        f"{', less than prices resolve: a tie' * first['tie']}."
    )


def _memory(data: Row) -> str:
    fullest = max(data["memory"], key=lambda row: row["priced_bytes"])
    part, nbytes = max(fullest["parts"].items(), key=lambda item: item[1])
    of = gib(data["summary"]["memory_bytes"]).text
    text = (
        f"A device of {stage_words(fullest['stages'])} takes most, "
        f"{gib(fullest['priced_bytes']).text} of {of}; {part} {gib(nbytes).text} of it."
    )
    text += f" The peak comes in the {peak_words(fullest['moment'], fullest['block'])}."
    if rehearsed_bytes := data["summary"].get("rehearsed_memory_bytes"):
        text += f" Rehearsed were {gib(max(rehearsed_bytes)).text}."
    return text


def _components(data: Row) -> str:
    parts = data["components_s"]
    whole = sum(parts.values()) or 1.0
    listed = ", ".join(
        f"{name} {time(value).text} ({share(value / whole).text})"
        for name, value in sorted(parts.items(), key=lambda item: -item[1])
        if value >= LEAST * whole
    )
    step = between(time, data["summary"]["step_interval_s"])
    return f"Of the busiest devices' step: {listed}. With 80 % the whole takes {step}."


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
        f"{many(count, 'rank')} on {many(cluster['num_nodes'], 'node')} of "
        f"{cluster['devices_per_node']} {cluster['device']}, in "
        f"{many(len(groups), 'device group')}."
    )


def _sources(data: Row) -> str:
    error = data["uncertainty"]
    step, memory = error["step"], error["memory"]
    spent = sum(data["planning_s"].values())
    return (
        f"Planned in {time(spent).text}. "
        f"A measured step was {step['low']:.2f} to {step['high']:.2f} times the predicted with "
        f"{error['level']:.0%} ({step['rows']} measurements: {step['of']}); memory "
        f"{memory['low']:.2f} to {memory['high']:.2f} times ({memory['rows']}: {memory['of']})."
    )


def _rehearsed(found: Row) -> str:
    """What was rehearsed, and whether ranks agree."""
    ranks, wrong = found["ranks"], len(found["mismatches"])
    count = sum(row["stands_for"] for row in ranks.values())
    agree = f"{wrong:,} do not match" if wrong else "all match"
    return (
        f"{len(ranks):,} of {count:,} ranks, one of each kind, ran the plan's own step here on "
        f"tensors without values, in {time(found['seconds']).text}. Of their collectives, messages "
        f"and parts of a checkpoint {agree}."
    )
