"""The simulated step as data: all its events, or three windows of them where there are too many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.costmodel.schedules import Event, Timeline

MAX_EVENTS = 10_000  # that are shown in full
MAX_OF_WINDOW = 2_000
WINDOWS = ("first", "steady", "last")
COLUMNS = ("group", "stage", "lane", "kind", "microbatch", "start_s", "end_s")
KINDS = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


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
