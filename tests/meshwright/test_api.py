"""`auto_parallelize` in one process: planning for many ranks, running on one."""

from __future__ import annotations

import dataclasses
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import (
    Cluster,
    InfeasibleError,
    OverrideError,
    Overrides,
    ParallelModel,
    PlanError,
    auto_parallelize,
)
from meshwright.decisions import Decision, check_world
from meshwright.plan_search import SearchedPlan
from meshwright.planner.plan.check import check_runs
from tests.helpers.tiny import ROWS, batch, host, net, planned, slow_host, small_host


@cache
def four_ranks() -> ParallelModel:
    return planned(net(), 4)


# --- planning for what is not there --------------------------------------------------------------


def test_planning_needs_no_ranks() -> None:
    result = four_ranks()
    assert result.plan.num_ranks == 4
    assert "Chosen" in str(result.report)
    prediction, stages = result.prediction, len(result.plan.stages)
    assert prediction.step_time_s > 0 and 0 < prediction.mfu <= 1
    assert 0 <= prediction.bubble_fraction < 1
    assert isinstance(prediction.peak_memory_bytes, list)
    assert len(prediction.peak_memory_bytes) == stages
    assert all(isinstance(x, int) and x > 0 for x in prediction.peak_memory_bytes)


def test_running_without_ranks_says_how_to_launch() -> None:
    result = four_ranks()
    for attempt in (
        lambda: result.train_step(batch(ROWS)),
        lambda: list(result.parameters()),
        result.state_dict,
    ):
        with pytest.raises(RuntimeError, match=r"needs 4 ranks.*torchrun --nproc-per-node 4 "):
            attempt()


def test_many_nodes_are_launched_on_each() -> None:
    cluster = dataclasses.replace(host(2), num_nodes=2)
    result = planned(net(), cluster=cluster)
    with pytest.raises(RuntimeError, match="--nproc-per-node 2 --nnodes 2 --rdzv"):
        result.train_step(batch(ROWS))


def test_overrides_are_kept_and_priced() -> None:
    result = planned(net(), 4, overrides=Overrides(dp=4))
    assert [stage.dp for stage in result.plan.stages] == [4]
    (row,) = result.report.overrides
    assert row["override"] == "dp=4" and row["effect"].startswith("cost ")


def test_replanning_is_planning_with_other_overrides() -> None:
    first = planned(net(), cluster=slow_host(4))
    for given in (Overrides(dp=4), Overrides(pp=2, schedule="gpipe"), Overrides()):
        again, fresh = first.replan(given), planned(net(), cluster=slow_host(4), overrides=given)
        assert again.plan == fresh.plan
        assert again.prediction == fresh.prediction
        assert again is not first


def test_answers_and_prices_stay_on_the_rank_that_searched() -> None:
    """The other ranks are told the plan, why, and what it is expected to do."""
    decided = four_ranks()._decision
    told = pickle.loads(pickle.dumps(decided))
    assert (told.plan, told.prediction) == (decided.plan, decided.prediction)
    assert told.report == decided.report
    assert decided.report.deferred is not None and isinstance(decided, SearchedPlan)
    assert told.report.deferred is None and type(told) is Decision


def test_replanning_replaces_the_overrides() -> None:
    first = planned(net(), 4, overrides=Overrides(dp=4))
    assert first.replan().plan == four_ranks().plan
    with pytest.raises(OverrideError, match="tp=3"):
        first.replan(Overrides(tp=3))


def test_tf32_is_priced_where_a_device_has_it() -> None:
    """Products get no faster than the peaks' ratio, and what has no TF32 takes as long."""

    def planned_for(cluster: Cluster, *, tf32: bool) -> ParallelModel:
        return auto_parallelize(
            nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3))).to("meta"),
            cluster,
            example_inputs=(torch.empty(8192, 4096, device="meta"),) * 2,
            loss_fn=nn.functional.mse_loss,
            global_batch_size=8192,
            precision="fp32",
            profile=False,
            tf32=tf32,
        )

    one = {"num_nodes": 1, "devices_per_node": 1}
    a100, v100 = (Cluster.from_catalog(name, **one) for name in ("a100-80gb", "v100-32gb"))
    slow, fast = (planned_for(a100, tf32=tf32) for tf32 in (False, True))
    times = slow.prediction.step_time_s / fast.prediction.step_time_s
    assert 2 < times <= 156 / 19.5
    assert "TF32's rate" in str(fast.report) and "TF32" not in str(slow.report)
    assert fast.prediction.mfu < slow.prediction.mfu  # of the rate that is asked for
    none, asked = (planned_for(v100, tf32=tf32).prediction.step_time_s for tf32 in (False, True))
    assert none == asked


def test_tf32_is_a_flag_of_fp32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        with pytest.raises(
            ValueError, match="with tf32=True, which is about fp32 products; legal: fp32"
        ):
            planned(net(), 1, tf32=True, precision="bf16")
        result = planned(net(), 1, tf32=True, precision="fp32")
        assert torch.get_float32_matmul_precision() == before  # a plan alone changes nothing
        assert result.runtime.loaded
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_evaluating_changes_nothing() -> None:
    result = planned(net(), 1)
    loss = result.eval_step(batch(8))
    assert all(p.grad is None for p in result.parameters())
    with torch.no_grad(), pytest.raises(ValueError, match="use eval_step"):
        result.train_step(batch(8))
    assert float(result.train_step(batch(8))) == pytest.approx(float(loss), rel=1e-6)


def test_plans_for_this_machine_are_plans_that_run() -> None:
    check_runs(four_ranks().plan)
    far = dataclasses.replace(host(4), backend="nccl")
    for on, executable in ((host(4), None), (far, True)):
        result = planned(net(), cluster=on, overrides=Overrides(cp=2), executable=executable)
        assert {stage.cp for stage in result.plan.stages} == {2}
        check_runs(result.plan)
    assert planned(net(), 4, overrides=Overrides(zero=3)).plan.stages[0].zero == 3


def test_a_tied_weight_may_live_on_two_stages() -> None:
    result = planned(net(tied=True), 2, overrides=Overrides(pp=2))
    first, last = result.plan.stages
    assert first.blocks[0] == "embed" and last.blocks[-1] == "head"


# --- a given plan --------------------------------------------------------------------------------


def test_a_plan_and_its_file_are_taken(tmp_path: Path) -> None:
    searched = planned(net(), overrides=Overrides(num_microbatches=2))
    searched.plan.save(tmp_path / "plan.json")
    for given in (searched.plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        result = planned(net(), plan=given)
        assert result.plan == searched.plan
        assert result.prediction == searched.prediction
        assert any("nothing was searched" in note for note in result.report.notes)
        assert torch.equal(result.train_step(batch(ROWS)), searched.train_step(batch(ROWS)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"global_batch_size": 16},
            "global_batch_size=8, called with 16; legal: global_batch_size=8; pass",
        ),
        ({"precision": "bf16"}, "precision='fp32', called with 'bf16'"),
        ({"cluster": host(2)}, "made for 4 ranks, but the cluster has 2 devices.*of 4 devices"),
    ],
)
def test_a_plan_for_something_else_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        planned(net(), **{"cluster": host(4), "plan": four_ranks().plan, **changes})


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"made for model=.*, but this model is .*; plan again"):
        planned(net(tied=True), 4, plan=four_ranks().plan)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    plan = four_ranks().plan
    with pytest.raises(
        InfeasibleError, match=r"shortfall by stage: stage 0: \d.* [KM]iB"
    ) as caught:
        planned(net(), plan=plan, cluster=small_host(4, 1024))
    assert max(caught.value.shortfall_bytes) > 0


def test_a_cluster_too_small_says_how_much_is_missing() -> None:
    with pytest.raises(InfeasibleError, match=r"lacks .* [KM]iB.*shortfall by stage") as caught:
        planned(net(), cluster=small_host(2, 1024))
    assert max(caught.value.shortfall_bytes) > 0
    assert "nodes" in str(caught.value)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0; legal: an integer from 1"),
        ({"global_batch_size": 8.0}, "global_batch_size=8.0; legal"),
        ({"global_batch_size": True}, "global_batch_size=True; legal"),
        ({"time_limit_s": -1}, "time_limit_s=-1; legal: seconds, 0 or more"),
        ({"time_limit_s": "1"}, "time_limit_s='1'; legal: seconds"),
        ({"precision": "fp4"}, "precision='fp4'; legal: fp32, bf16, fp16, fp8"),
        ({"optimizer": "foo"}, "optimizer='foo'.*adam.*sgd"),
        ({"cluster": "h100-sxm"}, "cluster='h100-sxm' is a str; legal: a Cluster"),
        ({"overrides": {"tp": 2}}, "overrides=.*is a dict; legal: Overrides"),
        ({"plan": {"format": 1}}, "plan=.*is a dict; legal: a Plan, a path or None"),
        ({"plan": "no/such.json"}, "plan file: no/such.json: No such file"),
        ({"example_inputs": ()}, "holds no tensor with a batch dim; legal: a dict"),
        ({"example_inputs": {"id": batch(4)[0], "targets": batch(4)[1]}}, "do not fit Net.forward"),
        (
            {"example_inputs": batch(4)[:1]},
            "has one entry, and loss_fn takes \\(output, targets\\)",
        ),
        ({"loss_fn": None, "example_inputs": batch(4)[:1]}, "scalar loss is needed; pass loss_fn="),
        ({"overrides": Overrides(tp=3)}, "tp=3: 3 does not divide the cluster's 1 devices; legal"),
        ({"overrides": Overrides(pp=9)}, "pp=9: the model has 5 blocks"),
        ({"overrides": Overrides(num_microbatches=3)}, "num_microbatches=3: 3 does not divide"),
        ({"overrides": Overrides(shardings={"haed": "colwise"})}, "'haed'.*nearest: head"),
        ({"overrides": Overrides(stages=[["embd"]])}, "no block 'embd'; legal: .*; nearest: embed"),
    ],
)
def test_bad_arguments_are_one_clear_error(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        planned(net(), **changes)


def test_a_plan_leaves_nothing_to_override() -> None:
    with pytest.raises(ValueError, match=r"plan= and overrides=.*drop one"):
        planned(net(), 4, plan=four_ranks().plan, overrides=Overrides(tp=2))
    planned(net(), 4, plan=four_ranks().plan, overrides=Overrides())


def test_the_model_must_be_a_module() -> None:
    with pytest.raises(ValueError, match=r"model=.*legal: a torch.nn.Module"):
        planned(lambda x: x)  # type: ignore[arg-type]


def test_the_ranks_that_run_must_be_the_clusters() -> None:
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=2, devices_per_node=4)
    check_world(cluster, None)
    check_world(cluster, 8)
    with pytest.raises(ValueError, match=r"8 devices, but 3 ranks.*--nproc-per-node 4 --nnodes 2"):
        check_world(cluster, 3)
