"""Precision fp8 at the front door: planned where a device and a model have use for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright import Cluster, ParallelModel, Plan, auto_parallelize
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry

ROWS, WIDTH = 64, 256


def planned_on(name: str, precision: str, model: nn.Module | None = None) -> ParallelModel:
    sizes = {"num_nodes": 1, "devices_per_node": 2}
    model = model or nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    return auto_parallelize(
        model.to("meta"),
        Cluster.from_catalog(name, **sizes),
        example_inputs=(torch.empty(ROWS, WIDTH, device="meta"),) * 2,
        loss_fn=nn.functional.mse_loss,
        global_batch_size=ROWS,
        precision=precision,
        profile=False,
    )


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_it_is_planned_reported_and_written(precision: str, tmp_path: Path) -> None:
    result = planned_on("h100-sxm", precision)
    assert result.plan.precision == result.report.to_dict()["plan"]["precision"] == precision
    by = "row" if precision == "fp8_rowwise" else "tensor"
    assert f"8-bit floats scaled by {by}" in result.report.text(full=True)
    result.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == result.plan


@pytest.mark.parametrize("name", ["a100-80gb", "v100-32gb", "rtx-3090-ti", "a10g"])
def test_devices_without_units_are_refused(name: str) -> None:
    words = f"precision='fp8': {name} has no units for 8-bit floats; legal: bf16, .*h100-sxm"
    with pytest.raises(ValueError, match=words):
        planned_on(name, "fp8")


def test_models_without_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no product of the model would be in 8 bits"):
        planned_on("h100-sxm", "fp8", nn.Sequential(nn.Linear(WIDTH, WIDTH)))


def test_cpus_emulate() -> None:
    report = planned_on("local-cpu", "fp8").report.text(full=True)
    assert "scaled by tensor, emulated on this device" in report


def test_peaks_in_8_bits_are_twice_those_in_16() -> None:
    rates = [read_entry(name).quantities for name in catalog_names()]
    both = [
        (r["peak_flops.fp8"].value, r["peak_flops.bf16"].value)
        for r in rates
        if "peak_flops.fp8" in r
    ]
    assert len(both) >= 13
    assert all(eight == pytest.approx(2 * sixteen, rel=0.03) for eight, sixteen in both)
