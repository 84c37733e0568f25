"""What a report has for a closer look, on a plan of every axis."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.planner.plan import expand_names
from meshwright.planner.report import Report
from tests.helpers.reports import LENGTH, ROWS, report_of_axes


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of_axes()


def test_data_is_plain(report: Report) -> None:
    data: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    assert data["schema"] == 2
    assert {row["axis"] for row in data["communication"]} >= {"tensor", "pipeline"}


def test_components_of_each_device_group_are_the_step(report: Report) -> None:
    step = report.summary["step_time_s"]
    groups = report.to_dict()["device_groups"]
    assert len(groups) == 2
    for group in groups:
        assert sum(group["components_s"].values()) == pytest.approx(step, rel=1e-6)


def test_peaks_have_a_moment_and_a_block(report: Report) -> None:
    stages = report.plan.stages
    for row in report.to_dict()["memory"]:
        assert sum(row["parts"].values()) == pytest.approx(row["priced_bytes"], abs=1)
        assert row["moment"] in (
            "forward",
            "backward",
            "backward_input",
            "backward_weight",
            "optimizer",
        )
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
        report.to_dict()["throughput"],
        report.summary["step_interval_s"],
    )
    assert fastest_s < report.summary["step_time_s"] < slowest_s
    assert found["rows_per_s_interval"] == pytest.approx([ROWS / slowest_s, ROWS / fastest_s])
    low, high = found["tokens_per_s_interval"]
    assert [low * slowest_s, high * fastest_s] == pytest.approx([ROWS * LENGTH] * 2)
    assert found["mfu_interval"][0] < found["mfu"] < found["mfu_interval"][1]
    hours = [8 * s / 3600 for s in (fastest_s, slowest_s)]
    assert found["device_hours_interval"] == pytest.approx(hours)
    cost = report.cost(tokens=1e9)
    assert cost and cost["days_interval"][0] < cost["days"] < cost["days_interval"][1]


def test_work_of_a_group_is_that_of_its_communication(report: Report) -> None:
    data = report.to_dict()
    for group in data["device_groups"]:
        rows = [row for row in data["communication"] if row["stage"] in group["stages"]]
        sent = sum(row["sent_bytes"] for row in rows)
        assert sum(group["sent_bytes"].values()) == pytest.approx(sent, rel=1e-6)
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


def test_other_plans_have_memory_and_differences(report: Report) -> None:
    data = report.to_dict()
    step = report.summary["step_time_s"]
    found = [row for row in (*data["alternatives"], *data["runners_up"]) if row.get("plan")]
    assert found
    for row in found:
        assert row["peak_memory_bytes"] > 0
        assert sum(row["components_s"].values()) == pytest.approx(row["step_time_s"] - step)
