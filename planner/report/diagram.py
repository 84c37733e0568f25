"""Data of a plan's drawings: its distinct blocks, operator by operator with their shardings and the
collectives in between; the simulated step, all its events, or three windows of too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.costmodel.operators import PASS_COLUMNS, Pricer
from meshwright.costmodel.schedules import Event, Timeline
from meshwright.costmodel.sharding import Enter, Leave, Move, Run, Step
from meshwright.planner.plan import compress_names
from meshwright.planner.pricing import PricedStage

Row = Mapping[str, Any]

MAX_EVENTS = 10_000  # that are shown in full
MAX_OF_WINDOW = 2_000
WINDOWS = ("first", "steady", "last")
COLUMNS = ("group", "stage", "lane", "kind", "microbatch", "start_s", "end_s")
KINDS = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


def block_diagrams(stages: Sequence[PricedStage]) -> list[Row]:
    """A row for each distinct block: the `blocks` and `stages` that it stands for, its degrees and
    its `steps`, in seconds of one micro-batch on a rank."""
    diagrams: dict[Any, dict[str, Any]] = {}
    for k, priced in enumerate(stages):
        mesh = {axis: getattr(priced.stage, axis) for axis in ("dp", "cp", "ep", "tp")}
        for entered in priced.blocks:
            inputs, choices = entered.inputs.values(), entered.assignment.choices
            key = (entered.block.class_id, *mesh.values(), choices, *inputs)
            if key not in diagrams:
                steps = [row for step in entered.steps for row in _rows(priced.pricer, step)]
                diagrams[key] = {"blocks": [], "stages": [], **mesh, "steps": steps}
            diagrams[key]["blocks"].append(entered.block.name)
            diagrams[key]["stages"] += [k] * (k not in diagrams[key]["stages"])
    return [row | {"blocks": compress_names(row["blocks"])} for row in diagrams.values()]


def _rows(pricer: Pricer, step: Step) -> Iterator[dict[str, Any]]:
    """A step as data, then its collectives, a row each."""
    match step:
        case Enter(value, state, role):
            yield {"kind": "enter", "role": role} | _value(pricer, value) | {"state": str(state)}
        case Leave(value, state, _):
            yield {"kind": "leave"} | _value(pricer, value) | {"state": str(state)}
        case Run(op, strategy):
            cost = pricer.op_cost(op, strategy)
            yield {
                "kind": "run",
                "operator": op.short,
                "key": op.key,
                "source": op.source,
                "strategy": strategy.name,
                "operands": list(map(str, strategy.operands)),
                "results": list(map(str, strategy.results)),
                "forward_s": float(cost.forward_s - cost.forward_comm_s),
                "backward_s": float(cost.backward_s - cost.backward_comm_s),
            }
        case Move(value, source, target, _, _, known) if not known:
            yield {"kind": "move"} | _value(pricer, value) | {
                "from": str(source), "to": str(target),
            }  # fmt: skip
    entries = pricer.step_entries(step) if isinstance(step, (Run, Move)) else ()
    for column in PASS_COLUMNS:
        for entry in entries:
            if entry.column == column and entry.axis and entry.seconds + entry.hidden_s:
                yield {
                    "kind": "collective",
                    "pass": column.removesuffix("_s"),
                    "axis": entry.axis,
                    "collective": entry.collective,
                    "seconds": entry.seconds + entry.hidden_s,
                    "exposed_s": entry.seconds,
                }


def _value(pricer: Pricer, value: str) -> dict[str, Any]:
    meta = pricer.graph.values[value]
    names = {**pricer.graph.parameters, **pricer.graph.buffers}
    return {"value": names.get(value, value), "shape": list(meta.shape)}


# --- the simulated step --------------------------------------------------------------------------


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """The number of events, and windows of them: from and to which second, and a line of
    comma-separated `COLUMNS` for each event. `complete` says whether all are there."""
    events = timeline.events
    complete = len(events) <= MAX_EVENTS
    stages_of = enumerate(timeline.stages_of)
    group_of: dict[int | None, int] = {stage: g for g, stages in stages_of for stage in stages}
    windows = [("whole", events)] if complete else zip(WINDOWS, _windows(events), strict=True)
    return {
        "events": len(events),
        "complete": complete,
        "windows": [
            {
                "window": name,
                "start_s": min((event.start_s for event in window), default=0.0),
                "end_s": max((event.end_s for event in window), default=0.0),
                "events_csv": "\n".join([",".join(COLUMNS), *_lines(window, group_of)]),
            }
            for name, window in windows
        ],
    }


def _windows(events: Sequence[Event]) -> list[Sequence[Event]]:
    """Events that fit a window at the beginning, around the middle and at the end."""
    half = (len(events) - MAX_OF_WINDOW) // 2
    starts = (0, half, len(events) - MAX_OF_WINDOW)
    return [events[k : k + MAX_OF_WINDOW] for k in starts]


def _lines(events: Sequence[Event], group_of: dict[int | None, int]) -> Iterator[str]:
    for event in events:
        kind = _kind(event)
        lane = "compute" if event.track == "compute" else "communication"
        microbatch = "" if event.microbatch is None else event.microbatch
        times = f"{event.start_s:.7g},{event.end_s:.7g}"
        yield f"{group_of[event.stage]},{event.stage},{lane},{kind},{microbatch},{times}"


def _kind(event: Event) -> str:
    if event.track == "reduce":
        return "gradient reduction"
    if event.track != "compute":
        return "send"
    return KINDS.get(event.name.rstrip("0123456789"), event.name)
