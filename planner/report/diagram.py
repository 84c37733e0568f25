"""What is drawn of a plan, as data: its distinct blocks, what a rank runs in each, operator by
operator, in which shardings, and the collectives in between (blocks that do the same are one
diagram); the simulated step, all its events, or three windows of them where there are too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.costmodel.operators import PASS_COLUMNS, Entry, Pricer
from meshwright.costmodel.schedules import Event, Timeline
from meshwright.costmodel.sharding import Enter, Leave, Move, Run, Step
from meshwright.planner.plan import compress_names
from meshwright.planner.pricing import Entered, PricedStage

Row = Mapping[str, Any]

MAX_EVENTS = 10_000  # that are shown in full
MAX_OF_WINDOW = 2_000
WINDOWS = ("first", "steady", "last")
COLUMNS = ("group", "stage", "lane", "kind", "microbatch", "start_s", "end_s")
KINDS = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


@dataclass(slots=True, kw_only=True)
class _Found:
    """A distinct block as it is first met, and all that do the same."""

    priced: PricedStage
    block: Entered
    names: list[str]
    stages: list[int]


def block_diagrams(stages: Sequence[PricedStage]) -> list[Row]:
    """A row for each distinct block: the `blocks` and `stages` that it stands for, its degrees and
    its `steps`, in seconds of one micro-batch on a rank."""
    found: dict[Any, _Found] = {}
    for k, own in enumerate(stages):
        stage = own.stage
        for each in own.blocks:
            inputs, choices = tuple(each.inputs.values()), each.assignment.choices
            mesh = (stage.dp, stage.cp, stage.ep, stage.tp)
            key = (each.block.class_id, mesh, choices, inputs)
            first = found.setdefault(key, _Found(priced=own, block=each, names=[], stages=[]))
            first.names.append(each.block.name)
            first.stages += [k] * (k not in first.stages)
    return [_diagram(each) for each in found.values()]


def _diagram(found: _Found) -> Row:
    stage, pricer = found.priced.stage, found.priced.pricer
    return {
        "blocks": compress_names(found.names),
        "stages": found.stages,
        **{axis: getattr(stage, axis) for axis in ("dp", "cp", "ep", "tp")},
        "steps": [row for step in found.block.steps for row in _rows(pricer, step)],
    }


def _rows(pricer: Pricer, step: Step) -> Iterator[dict[str, Any]]:
    """A step as data, then what it says to other ranks, a row for each collective."""
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
    if isinstance(step, (Run, Move)):
        entries = pricer.step_entries(step)
        for column in PASS_COLUMNS:
            yield from _collectives(column, [each for each in entries if each.column == column])


def _value(pricer: Pricer, value: str) -> dict[str, Any]:
    meta = pricer.graph.values[value]
    names = {**pricer.graph.parameters, **pricer.graph.buffers}
    return {"value": names.get(value, value), "shape": list(meta.shape)}


def _collectives(column: str, entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        if entry.axis and entry.seconds + entry.hidden_s:
            yield {
                "kind": "collective",
                "pass": column.removesuffix("_s"),
                "axis": entry.axis,
                "collective": entry.collective,
                "seconds": entry.seconds + entry.hidden_s,
                "exposed_s": entry.seconds,
            }


# --- the simulated step --------------------------------------------------------------------------


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """How many events there are, and windows of them: from and to which second, and a line of
    comma-separated `COLUMNS` for each event. `complete` says whether all are there."""
    events = timeline.events
    complete = len(events) <= MAX_EVENTS
    group_of: dict[int | None, int] = {
        stage: g for g, stages in enumerate(timeline.stages_of) for stage in stages
    }
    windows = [("whole", events)] if complete else zip(WINDOWS, _windows(events), strict=True)
    return {
        "events": len(events),
        "complete": complete,
        "windows": [
            {
                "window": name,
                "start_s": min((e.start_s for e in own), default=0.0),
                "end_s": max((e.end_s for e in own), default=0.0),
                "events_csv": "\n".join([",".join(COLUMNS), *_lines(own, group_of)]),
            }
            for name, own in windows
        ],
    }


def _windows(events: Sequence[Event]) -> list[Sequence[Event]]:
    """As many events as fit a window at the beginning, around the middle and at the end."""
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
