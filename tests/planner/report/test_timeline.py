"""The simulated step as data: whole, or in windows."""

from __future__ import annotations

import csv
import itertools
from typing import Any

import pytest

from meshwright.costmodel.schedules import StageTimes, Timeline, build_schedule, simulate
from meshwright.planner.report.timeline import MAX_EVENTS, MAX_OF_WINDOW, timeline_data

STAGES = 4


def timeline(microbatches: int, schedule: str = "1f1b") -> Timeline:
    times = StageTimes(forward_s=1.0, backward_s=2.0, reduce_s=0.5, optimizer_s=0.25)
    edges = frozenset(itertools.pairwise(range(STAGES)))
    streams = build_schedule(
        schedule, num_stages=STAGES, num_microbatches=microbatches, edges=edges, num_devices=STAGES
    )
    return simulate(streams, [times] * STAGES, dict.fromkeys(edges, 0.1))


def events(window: dict[str, Any]) -> list[dict[str, str]]:
    return list(csv.DictReader(window["events_csv"].splitlines()))


def test_a_short_step_is_whole() -> None:
    step = timeline(8)
    data = timeline_data(step)
    (window,) = data["windows"]
    rows = events(window)
    assert data["complete"] and data["events"] == len(rows) == len(step.events)
    computes = [row for row in rows if row["kind"] in ("forward", "backward")]
    assert len(computes) == 2 * 8 * STAGES
    for device in range(STAGES):
        own = [row for row in computes if row["group"] == str(device)]
        busy = sum(float(row["end_s"]) - float(row["start_s"]) for row in own)
        assert busy == pytest.approx(step.busy_s[device])
    assert window["end_s"] == pytest.approx(step.step_time_s)
    assert {row["lane"] for row in rows if row["kind"] == "send"} == {"communication"}


def test_a_long_step_is_three_windows() -> None:
    step = timeline(2_000)
    data = timeline_data(step)
    assert len(step.events) > MAX_EVENTS and not data["complete"]
    first, steady, last = data["windows"]
    assert [len(events(w)) for w in (first, steady, last)] == [MAX_OF_WINDOW] * 3
    assert first["start_s"] == 0
    assert first["end_s"] < steady["start_s"] and steady["end_s"] < last["start_s"]
    assert last["end_s"] == pytest.approx(step.step_time_s)
