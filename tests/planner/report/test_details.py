"""What a report has for a closer look, on a plan of every axis."""

import csv
import itertools
import json
from typing import Any

import pytest

from meshwright.costmodel.schedules import Pipeline, StageTimes, Timeline, build_schedule, simulate
from meshwright.planner.plan import expand_names
from meshwright.planner.report import Report
from meshwright.planner.report.details import MAX_EVENTS, MAX_OF_WINDOW, timeline_data
from tests.helpers.reports import LENGTH, ROWS, report_of_axes

MOMENTS = ("forward", "backward", "backward_input", "backward_weight", "optimizer")


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of_axes()


def test_data_is_plain_and_components_of_each_device_group_are_the_step(report: Report) -> None:
    data: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    assert data["schema"] == 3
    assert {row["axis"] for row in data["communication"]} >= {"tensor", "pipeline"}
    step, groups = report.summary["step_time_s"], data["device_groups"]
    assert len(groups) == 2
    for group in groups:
        assert sum(group["components_s"].values()) == pytest.approx(step, rel=1e-6)


def test_peaks_have_a_moment_and_a_block(report: Report) -> None:
    stages = report.plan.stages
    for row in report.to_dict()["memory"]:
        assert row["moment"] in MOMENTS
        assert row["block"] is None or row["block"] in stages[row["stage"]].blocks


def test_throughput_counts_tokens_and_recompute(report: Report) -> None:
    found, step = report.to_dict()["throughput"], report.summary["step_time_s"]
    assert found["tokens_per_s"] == pytest.approx(ROWS * LENGTH / step)
    assert 1.2 < found["hfu"] / found["mfu"] < 4 / 3  # a forward more of the blocks, not the head
    assert found["tokens_per_s_per_device"] == pytest.approx(ROWS * LENGTH / step / 8)
    assert found["model_flops_per_s_per_device"] == pytest.approx(found["mfu"] * 312e12)
    assert found["device_hours_per_step"] == pytest.approx(8 * step / 3600)


def test_intervals_are_the_steps(report: Report) -> None:
    found, (fastest_s, slowest_s) = (
        report.to_dict()["throughput"], report.summary["step_interval_s"]
    )  # fmt: skip
    assert fastest_s < report.summary["step_time_s"] < slowest_s
    assert found["rows_per_s_interval"] == pytest.approx([ROWS / slowest_s, ROWS / fastest_s])
    low, high = found["tokens_per_s_interval"]
    assert [low * slowest_s, high * fastest_s] == pytest.approx([ROWS * LENGTH] * 2)
    assert found["mfu_interval"][0] < found["mfu"] < found["mfu_interval"][1]
    hours = [8 * s / 3600 for s in (fastest_s, slowest_s)]
    assert found["device_hours_interval"] == pytest.approx(hours)
    cost = report.cost(tokens=1e9)
    assert cost and cost["days_interval"][0] < cost["days"] < cost["days_interval"][1]


def test_work_counts_what_runs_again(report: Report) -> None:
    data = report.to_dict()
    for group in data["device_groups"]:
        assert 0 < group["repeated_flops"] < group["flops"]  # full recompute
    assert data["training"] == {
        "global_batch_size": ROWS, "sequence_length": LENGTH, "precision": "bf16",
        "optimizer": "adamw",
    }  # fmt: skip


def test_cost_of_a_run(report: Report) -> None:
    step = report.summary["step_time_s"]
    steps = 1e9 / (ROWS * LENGTH)
    found = report.cost(tokens=1e9, price_per_hour=2.0)
    assert found is not None
    assert found["price"] == pytest.approx(2.0 * 8 * steps * step / 3600)
    assert found["price_per_step"] == pytest.approx(2.0 * 8 * step / 3600)
    assert found["price_per_million_tokens"] == pytest.approx(found["price"] / 1e3)
    assert found["days"] == pytest.approx(steps * step / 86400)
    assert (found["steps"], found["tokens"]) == (pytest.approx(steps), 1e9)
    assert "price" not in (report.cost(tokens=1e9) or {})
    energy = report.cost(tokens=1e9, power_watts=700.0)
    assert energy is not None and "price" not in energy
    joules = 700.0 * 8 * steps * step
    assert energy["energy_kwh"] == pytest.approx(joules / 3.6e6)
    assert energy["energy_kwh_per_step"] == pytest.approx(joules / 3.6e6 / steps)
    assert energy["energy_kwh_per_million_tokens"] == pytest.approx(joules / 3.6e6 / 1e3)
    with pytest.raises(ValueError, match="power_watts=-1; legal: a number above 0"):
        report.cost(power_watts=-1)
    with pytest.raises(ValueError, match="price_per_hour=0; legal: a number above 0"):
        report.cost(price_per_hour=0)


def test_diagrams_have_every_operator_and_the_collectives_of_the_plan(report: Report) -> None:
    details, data = report.details, report.to_dict()
    assert details is not None
    blocks = {block.name: block for block in details.problem.graph.blocks}
    shown = set[str]()
    stages = report.plan.stages
    per_stage: list[dict[str, list[float]]] = [{} for _ in stages]
    for row in data["blocks"]:
        names = expand_names(row["blocks"])
        shown.update(names)
        ran = [step["operator"] for step in row["steps"] if step["kind"] == "run"]
        assert ran == [op.short for op in blocks[names[0]].ops]
        for step in row["steps"]:
            if step["kind"] == "collective" and step["axis"] == "tensor":
                for k, stage in enumerate(stages):
                    if count := len(set(names) & set(stage.blocks)):
                        both = per_stage[k].setdefault(step["collective"], [0.0, 0.0])
                        both[step["pass"] == "backward"] += count * step["seconds"]
    assert shown == set(blocks)
    m = report.plan.num_microbatches
    for stage, kinds in enumerate(per_stage):
        rows = [r for r in data["communication"] if (r["stage"], r["axis"]) == (stage, "tensor")]
        assert {row["collective"] for row in rows} == set(kinds)
        for row in rows:  # recompute runs some of a forward's again
            forward, backward = kinds[row["collective"]]
            assert row["seconds"] >= m * (forward + backward) * (1 - 1e-9)
            assert row["seconds"] <= m * (2 * forward + backward) * (1 + 1e-9)


# --- the simulated step, whole or in windows ------------------------------------------------------

STAGES = 4


def timeline(microbatches: int, schedule: str = "1f1b") -> Timeline:
    times = StageTimes(forward_s=1.0, backward_s=2.0, reduce_s=0.5, optimizer_s=0.25)
    edges = frozenset(itertools.pairwise(range(STAGES)))
    streams = build_schedule(Pipeline(schedule, STAGES, microbatches, STAGES), edges)
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
