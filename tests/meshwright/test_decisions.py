"""Decisions before a search: products in TF32, precision fp8, the shapes of other batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Cluster, ParallelModel, Plan, auto_parallelize
from meshwright.planner.plan.check import check_plan
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry
from meshwright.running.planned import plan_of_rows
from tests.helpers.tiers import tiered
from tests.helpers.tiny import cut, net, plan_for, planned


def planned_on(
    name: str, precision: str, *, layers: int = 4, width: int = 256, rows: int = 64, **given: Any
) -> ParallelModel:
    return auto_parallelize(
        nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to("meta"),
        Cluster.from_catalog(name, num_nodes=1, devices_per_node=1),
        example_inputs=(torch.empty(rows, width, device="meta"),) * 2,
        loss_fn=nn.functional.mse_loss,
        global_batch_size=rows,
        precision=precision,
        profile=False,
        **given,
    )


def test_tf32_is_priced_where_a_device_has_it() -> None:
    """Products get no faster than the peaks' ratio, and what has no TF32 takes as long."""
    sizes = {"layers": 3, "width": 4096, "rows": 8192}
    slow, fast = (planned_on("a100-80gb", "fp32", tf32=tf32, **sizes) for tf32 in (False, True))
    times = slow.prediction.step_time_s / fast.prediction.step_time_s
    assert 2 < times <= 156 / 19.5
    assert "TF32's rate" in str(fast.report) and "TF32" not in str(slow.report)
    assert fast.prediction.mfu < slow.prediction.mfu  # of the rate that is asked for
    none, asked = (planned_on("v100-32gb", "fp32", tf32=tf32, **sizes) for tf32 in (False, True))
    assert none.prediction.step_time_s == asked.prediction.step_time_s


def test_tf32_is_a_flag_of_fp32() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ValueError, match="tf32=True, which is about fp32 products; legal: fp32"):
        planned(net(), tf32=True, precision="bf16")
    result = planned(net(), tf32=True, precision="fp32")
    assert torch.get_float32_matmul_precision() == before  # a plan alone changes nothing
    try:
        assert result.runtime.loaded
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "precision", tiered(("fp8", "fp8_rowwise", "mxfp8"), "fp8".__eq__, "one way to scale stays")
)
def test_fp8_is_planned_reported_and_written(precision: str, tmp_path: Path) -> None:
    result = planned_on("h100-sxm", precision)
    assert result.plan.precision == result.report.to_dict()["plan"]["precision"] == precision
    by = {"fp8": "tensor", "fp8_rowwise": "row", "mxfp8": "blocks of 32"}[precision]
    assert f"8-bit floats scaled by {by}" in result.report.text(full=True)
    result.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == result.plan


def test_nvfp4_is_for_units_of_4_bits() -> None:
    result = planned_on("gb200", "nvfp4")
    assert "4-bit floats scaled by blocks of 16" in result.report.text(full=True)
    eight = planned_on("gb200", "mxfp8")
    assert result.prediction.step_time_s < eight.prediction.step_time_s
    with pytest.raises(ValueError, match=r"'nvfp4': h100-sxm has no units for 4-bit.*gb200"):
        planned_on("h100-sxm", "nvfp4")


@pytest.mark.parametrize(
    ("name", "layers", "says"),
    [
        ("a100-80gb", 4, "a100-80gb has no units for 8-bit floats; legal: bf16, .*h100-sxm"),
        ("h100-sxm", 1, "no product of the model would be in 8 bits"),
    ],
)
def test_what_has_no_use_for_fp8_is_refused(name: str, layers: int, says: str) -> None:
    with pytest.raises(ValueError, match=f"precision='fp8': {says}"):
        planned_on(name, "fp8", layers=layers)


def test_cpus_emulate() -> None:
    report = planned_on("local-cpu", "fp8").report.text(full=True)
    assert "scaled by tensor, emulated on this device" in report


def test_peaks_in_8_bits_are_twice_those_in_16() -> None:
    rates = [
        q for name in catalog_names() if "peak_flops.fp8" in (q := read_entry(name).quantities)
    ]
    assert len(rates) >= 13
    for rate in rates:
        twice = 2 * rate["peak_flops.bf16"].value
        assert rate["peak_flops.fp8"].value == pytest.approx(twice, rel=0.03)


def test_fewer_rows_go_in_as_many_of_the_micro_batches_as_may_be() -> None:
    graph, factors = cut(net())
    plan = plan_for(graph, dp=2, num_microbatches=4)  # of 16 rows
    for rows, microbatches in ((16, 4), (12, 3), (10, 1), (8, 4), (2, 1)):
        found = plan_of_rows(plan, rows)
        assert (found.global_batch_size, found.num_microbatches) == (rows, microbatches)
        check_plan(found, graph, factors)


def test_rows_that_can_t_be_shared_out_name_the_legal_ones() -> None:
    plan = plan_for(cut(net())[0], dp=4, tp=1)
    says = r"batch: dp=4 does not divide 6 rows; legal: .*; give a multiple of 4"
    with pytest.raises(ValueError, match=says):
        plan_of_rows(plan, 6)
    with pytest.raises(ValueError, match="more rows than planned"):
        plan_of_rows(plan, 20)
