"""A number that stands twice, in text, page, data, differences or metrics, is one number."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.monitor.metrics import Predicted
from meshwright.planner.page import front
from meshwright.planner.page.tables import compared, tables
from meshwright.planner.plan import peak_words, seconds, sized
from meshwright.planner.pricing import Evaluation, Evaluator, Ledger
from meshwright.planner.report import Report, explain_plan
from meshwright.profiles.cluster import Cluster
from meshwright.shell.commands.diff import between
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_matrix import ALL

ON = (Cluster.from_catalog("dgx-h100", num_nodes=1), Cluster.local(8, measure=False))
KNOBS = """
gpt2_tied    dp2          1f1b m2 zero1 host50
llama        dp2          1f1b m2 away50 bf16
llama        pp2          dualpipe m4
llama        pp2xtp2      zb_h1 m4 full
moe          dp4          1f1b m2 zero2
llama        dp2xtp2      1f1b m2 zero3 full seg2
"""
CELLS = [*map(Cell.parse, KNOBS.strip().splitlines()), *ALL[:: len(ALL) // 14][:14]]

Reported = tuple[Report, Evaluation, Mapping[str, Any]]


@pytest.fixture(scope="module", params=range(len(CELLS)), ids=[cell.name for cell in CELLS])
def reported(request: pytest.FixtureRequest) -> Reported:
    plan, of = plan_of(CELLS[request.param])
    on = ON[request.param % 2]
    problem = Problem(graph=of.graph, factors=of.table, cluster=on, precision=plan.precision)
    evaluation = Evaluator(problem).price(plan)
    report = explain_plan(evaluation, problem, {})
    return report, evaluation, report.to_dict()


def fact(data: Mapping[str, Any], name: str) -> float:
    facts = (*front.tiles(data), *front.more_numbers(data))
    return next(cell.value for what, cell, _ in facts if what == name)


def test_there_are_twenty() -> None:
    assert len({cell.name for cell in CELLS}) == 20


def test_of_the_step(reported: Reported) -> None:
    report, evaluation, data = reported
    step_s, text = evaluation.prediction.step_time_s, str(report)
    assert data["summary"]["step_time_s"] == fact(data, "step") == step_s
    assert compared(data)[0]["step_time_s"] == step_s
    assert f"step {seconds(step_s)}," in text
    assert Predicted.of(report, 0).step_time_s == step_s
    through, rates = data["throughput"], data["summary"]
    for name, shown in (("rows_per_s", "rows a second"), ("tokens_per_s", "tokens a second")):
        assert through[name] == rates[name]
        assert not rates[name] or fact(data, shown) == rates[name]
    assert data["training"]["sequence_length"] == rates["sequence_length"]
    mfu, bubble = evaluation.prediction.mfu, evaluation.prediction.bubble_fraction
    assert rates["mfu"] == through["mfu"] == fact(data, "MFU") == Predicted.of(report, 0).mfu == mfu
    assert rates["bubble_fraction"] == fact(data, "bubble") == bubble
    assert f"MFU {mfu:.1%}, bubble {bubble:.1%}," in text


def test_of_parts_of_the_step(reported: Reported) -> None:
    report, evaluation, data = reported
    groups, plan = data["device_groups"], evaluation.plan
    assert data["components_s"] in [group["components_s"] for group in groups]
    assert [own.as_dict() for own in report.device_groups] == [g["components_s"] for g in groups]
    shown = tables(data)["components"].rows
    assert [[c.value for c in row[1:]] for row in shown] == [
        [*g["components_s"].values()] for g in groups
    ]
    for name, own_s in data["components_s"].items():
        if own_s > 1e-3 * data["summary"]["step_time_s"]:
            assert f"{name} {seconds(own_s)} (" in report.text(full=True)
    for group, ranks in zip(groups, plan.devices, strict=True):
        own, parts = [data["stages"][k] for k in group["stages"]], group["components_s"]
        predicted = Predicted.of(report, ranks[0])
        assert parts["optimizer"] == sum(row["optimizer_s"] for row in own)
        assert parts["gradient reduction"] == sum(row["gradient_reduction_s"] for row in own)
        assert predicted.terms["reduction_s"] == parts["gradient reduction"]
        assert predicted.terms["waiting_s"] == parts["waiting"]
        both = predicted.terms["forward_s"] + predicted.terms["backward_s"]
        assert both == pytest.approx(parts["compute"] + parts["exposed communication"])
        said = plan.passes * sum(row["communication_s"] for row in own)
        assert parts["exposed communication"] == pytest.approx(said)


def test_of_memory(reported: Reported) -> None:
    report, evaluation, data = reported
    prediction, summary, text = evaluation.prediction, data["summary"], str(report)
    peaks, on = prediction.peak_memory_bytes, report.details.problem.cluster  # type: ignore[union-attr]
    assert summary["peak_memory_bytes"] == [row["priced_bytes"] for row in data["memory"]] == peaks
    assert fact(data, "peak memory") == prediction.fullest_bytes
    assert f"peak memory {sized(prediction.fullest_bytes)} of" in text
    fullest = max(data["memory"], key=lambda row: row["priced_bytes"])
    assert tuple(fullest["interval_bytes"]) == summary["memory_interval_bytes"]
    moment = f"in the {peak_words(fullest['moment'], fullest['block'])}"
    assert f"the peak comes {moment}" in text and moment in front.decides(data)
    for row, ranks, peak in zip(data["memory"], evaluation.plan.devices, peaks, strict=True):
        assert {data["stages"][k]["memory_bytes"] for k in row["stages"]} == {peak}
        assert sum(row["parts"].values()) == pytest.approx(peak, abs=1)
        assert Predicted.of(report, ranks[0]).peak_memory_bytes == peak
    probability = prediction.memory_probability(on)
    assert summary["memory_probability"] == probability
    assert summary["memory_verdict"] == prediction.memory_verdict(on)
    assert f"{summary['memory_verdict']}: {probability:.0%}" in text
    assert fact(data, "fits with") == probability


def test_of_work_and_communication(reported: Reported) -> None:
    _, evaluation, data = reported
    ledger = Ledger.of(evaluation)
    groups, through = data["device_groups"], data["throughput"]
    for group, work in zip(groups, ledger.work(), strict=True):
        assert group["flops"] == work.flops and group["sent_bytes"] == work.sent_bytes
        rows = [row for row in data["communication"] if row["stage"] in group["stages"]]
        sent = sum(row["sent_bytes"] for row in rows if row["axis"] != "host")
        assert sum(group["sent_bytes"].values()) == pytest.approx(sent, rel=1e-9)
    shown = tables(data)["communication"].rows
    assert [row[5].value for row in shown] == [row["sent_bytes"] for row in data["communication"]]
    device = evaluation.prediction.model_flops / evaluation.prediction.step_time_s
    assert through["model_flops_per_s_per_device"] == pytest.approx(
        device / evaluation.plan.num_ranks
    )


def test_of_the_plan_and_of_differences(reported: Reported, tmp_path: Path) -> None:
    _, evaluation, data = reported
    assert data["plan"] == json.loads(evaluation.plan.to_json())
    other = json.loads(json.dumps(data))
    other["summary"]["step_time_s"] *= 2
    other["summary"]["peak_memory_bytes"] = [
        2 * each for each in data["summary"]["peak_memory_bytes"]
    ]
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, own in zip(files, (data, other), strict=True):
        file.write_text(json.dumps(own))
    assert not between(files[0], files[0])
    found = {price.what: price.a for price in between(*files).prices or ()}
    assert found == {
        "step": evaluation.prediction.step_time_s,
        "peak memory": evaluation.prediction.fullest_bytes,
    }
