"""A rehearsal in the flow: the report after it, progress meanwhile, what is refused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Overrides, ParallelModel, leaf
from meshwright.executor.rehearsal import Rehearsal, rehearse
from meshwright.planner.pricing import RehearsedMemory
from meshwright.planner.report import memory_summary
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import host, net, planned

MIB = 2**20


@cache
def rehearsed() -> tuple[ParallelModel, Rehearsal]:
    """Rehearsed, which changes neither the plan nor its prices."""
    result = planned(net(), 4, overrides=Overrides(pp=2, num_microbatches=2))
    plan, prediction, stages = result.plan.to_json(), result.prediction, result.report.stages
    found = result.rehearse()
    assert result.plan.to_json() == plan and result.report.stages == stages
    assert replace(result.prediction, rehearsed=None) == prediction
    return result, found


@cache
def four_ranks() -> ParallelModel:
    return rehearsed()[0].replan(Overrides(dp=4))


def test_the_report_has_the_rehearsal_and_rests_on_it() -> None:
    result, found = rehearsed()
    summary, text = result.report.summary, str(result.report)
    assert found.plan == result.plan
    assert found.line.replace("rehearsed", "Rehearsed") in text
    assert summary["memory_verdict_by"] == "rehearsal"
    assert summary["memory_verdict"] == result.prediction.memory_verdict(host(4)) == "fits"
    assert summary["rehearsed_tensor_bytes"] == max(found.peak_bytes)
    assert "of context and communicators of 8 GiB; fits: 100%" in text
    data = result.report.to_dict()["rehearsal"]
    peaks = [rank["peak_bytes"] for rank in data["ranks"].values()]
    assert data["mismatches"] == [] and max(peaks) == max(found.peak_bytes)


def test_the_table_has_the_fullest_rank_of_each_group_and_an_estimate() -> None:
    result, found = rehearsed()
    rows = [line.split() for line in found.short[2:-1]]
    assert [int(row[2]) for row in rows] == [0, 1]
    assert [row[3] for row in rows] == [f"{peak / MIB:.1f}" for peak in found.peak_bytes]
    assert len(str(found).splitlines()) == 2 + len(found.logs) + 1
    assert found.estimate is not None and found.priced.step is not None
    assert found.priced.step.step_s == result.prediction.step_time_s
    assert f"step {1e3 * found.estimate.step_s:.4g} ms by what ran" in str(result.report)
    steps = result.report.to_dict()["rehearsal"]["step"]
    assert steps["estimated"]["step_s"] == found.estimate.step_s
    assert steps["priced"]["step_s"] == result.prediction.step_time_s


@second_tier("prices of plans that nobody rehearsed are in every report")
def test_a_plan_that_was_not_rehearsed_rests_on_its_price() -> None:
    result, _ = rehearsed()
    other = result.replan(Overrides(pp=2, num_microbatches=4))
    for report in (other.report, planned(net(), 4, plan=result.plan).report):
        assert report.rehearsed is None and "rehearsal" not in report.to_dict()
        assert report.summary["memory_verdict_by"] == "price"
        assert "ehearsed" not in str(report)
    assert other.prediction.rehearsed is None


def test_the_verdict_is_of_tensors_and_context() -> None:
    on = host(4)
    tensors, beside = int(0.87 * on.device.memory_bytes), on.device.memory_bytes // 10
    found = RehearsedMemory(tensor_bytes=[tensors, 0], beside_bytes=[beside, 0])
    prediction = replace(four_ranks().prediction, rehearsed=found)
    assert prediction.memory_verdict(on) == "tight"
    said = memory_summary(prediction, on)
    assert (said["rehearsed_tensor_bytes"], said["bytes_beside_tensors"]) == (tensors, beside)


@second_tier("what is left out is said of leaves, too")
def test_compiled_blocks_are_said_to_be_left_out() -> None:
    found = planned(net(), 4, compile=True, overrides=Overrides(dp=4)).rehearse()
    assert found.ok and "they ran uncompiled" in found.left_out[-1]
    assert rehearsed()[1].left_out == ()


class Branching(nn.Module):
    """Chooses by the sum of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) if x.sum() > 0 else self.down(x)


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@leaf(rule="b d -> b d", result=torch.empty_like, saved_bytes=1 << 20)
def kernel(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = InNumpy.apply(x)  # type: ignore[no-untyped-call]
    return made


class Model(nn.Module):
    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 16), inner, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.inner(self.up(x)))
        return made


def around(inner: Callable[[torch.Tensor], torch.Tensor], **overrides: Any) -> ParallelModel:
    return planned(
        Model(inner), 4, example_inputs=(torch.randn(4, 8), torch.randint(0, 4, (4,))),
        loss_fn=F.cross_entropy, global_batch_size=16, overrides=Overrides(**overrides),
        profile=False,
    )  # fmt: skip


@second_tier("a leaf that calls a kernel is left out and named in the same list")
def test_a_leaf_that_reads_values_is_named_and_runs_as_traced() -> None:
    result = around(Branching(), pp=2, tp=2)
    found = result.rehearse()
    assert found.ok
    (left_out,) = found.left_out
    assert "the leaf Branching, which can't run on tensors without values" in left_out
    assert f"not rehearsed: {left_out}" in str(found) and left_out in str(result.report)


def test_a_leaf_that_calls_a_kernel_is_split_as_declared() -> None:
    found = around(kernel, dp=4).rehearse()
    assert found.ok and "the leaf kernel" in found.left_out[0] and "numpy" in found.left_out[0]
    # it was declared to keep 1 MiB of the sample's 4 rows, which each data rank has of the 16
    without = around(torch.tanh, dp=4).rehearse()
    more = max(found.peak_bytes) - max(without.peak_bytes)
    assert more == pytest.approx(1 << 20, rel=0.01)


class ReadsNorms(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["params"][0].grad.norm().item() > 1:  # a line that is named
                return None
        return super().step(closure)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return closure()


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda params: ReadsNorms(params, lr=0.1), r"optimizer reads the value .*a line that is"),
        (lambda params: None, r"returns None; legal: a function of a list of parameters"),
        (lambda params: NeedsClosure(params, lr=0.1), r"NeedsClosure\.step\(\) raises TypeError"),
        *(
            pytest.param(made, says, marks=second_tier("one of each kind of mistake stays"))
            for made, says in (
                (lambda p: p[len(p)], r"IndexError.*test_rehearsing\.py:\d+.*legal: a fu"),
                ("adamw", r"optimizer=str\(...\) is no function; legal: one that makes"),
            )
        ),
    ],
)
def test_an_optimizer_that_cannot_be_rehearsed_is_said(optimizer: Any, says: str) -> None:
    result = four_ranks()
    with pytest.raises(ValueError, match=f"(?s)^rehearse: .*{says}"):
        result.rehearse(optimizer=optimizer)
    assert result.report.rehearsed is None and not torch.distributed.is_initialized()


@second_tier("the command says it of the same optimizer (test_cli)")
def test_torch_may_not_have_the_planned_optimizer() -> None:
    result = planned(net(), 4, optimizer="lion")
    with pytest.raises(ValueError, match=r"'lion': torch has none; legal: .*adamw.*lambda"):
        result.rehearse()
    assert result.rehearse(optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).ok


def test_where_ranks_are_running_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = four_ranks()
    running = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(sys.modules[rehearse.__module__], "dist", running)
    with pytest.raises(ValueError, match=r"1 ranks are running; start it without"):
        result.rehearse()
