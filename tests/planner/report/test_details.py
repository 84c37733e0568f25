"""What a report has for a closer look, on a plan of every axis."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.planner.report import Report

LENGTH, ROWS = 1024, 32


@pytest.fixture(scope="module")
def report() -> Report:
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = (
            transformers.LlamaForCausalLM(config),
            torch.empty(4, LENGTH, dtype=torch.int64),
        )
    return auto_parallelize(
        model,
        Cluster.from_catalog("dgx-a100", num_nodes=1),
        example_inputs={"input_ids": ids, "labels": ids},
        global_batch_size=ROWS,
        overrides=Overrides(pp=2, tp=2, recompute="full"),
        profile=False,
    ).report


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
    assert found["device_hours_per_step"] == pytest.approx(8 * step / 3600)


def test_cost_of_a_run(report: Report) -> None:
    step = report.summary["step_time_s"]
    steps = 1e9 / (ROWS * LENGTH)
    found = report.cost(tokens=1e9, price_per_hour=2.0)
    assert found is not None
    assert found["price"] == pytest.approx(2.0 * 8 * steps * step / 3600)
    assert found["days"] == pytest.approx(steps * step / 86400)
    assert "price" not in (report.cost(tokens=1e9) or {})
    with pytest.raises(ValueError, match="price_per_hour=0: legal: a number above 0"):
        report.cost(price_per_hour=0)
