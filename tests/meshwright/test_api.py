"""`auto_parallelize` in one process: planning for many ranks, running on one."""

import dataclasses
import inspect
import pickle
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Cluster, InfeasibleError, OverrideError, Overrides, ParallelModel, PlanError
from meshwright.api import Arguments, auto_parallelize
from meshwright.decisions import Decision, check_world
from meshwright.plan_search import SearchedPlan
from meshwright.planner.plan.check import check_runs
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import ROWS, batch, host, net, planned, slow_host, small_host


@cache
def four_ranks() -> ParallelModel:
    return planned(net(), 4)


def test_a_question_has_the_defaults_of_the_call() -> None:
    parameters = inspect.signature(auto_parallelize).parameters
    for own in dataclasses.fields(Arguments):
        if own.default is not dataclasses.MISSING:
            assert parameters[own.name].default == own.default
    asked = {own.name for own in dataclasses.fields(Arguments)}
    assert set(parameters) - asked == {"model", "cluster", "plan"}
    with pytest.raises(ValueError, match="target"):
        planned(net(), target="")


def test_planning_needs_no_ranks() -> None:
    result = four_ranks()
    assert result.plan.num_ranks == 4
    assert "Chosen" in str(result.report)
    prediction, stages = result.prediction, len(result.plan.stages)
    assert prediction.step_time_s > 0 and 0 < prediction.mfu <= 1
    assert 0 <= prediction.bubble_fraction < 1
    assert len(prediction.peak_memory_bytes) == stages
    assert all(isinstance(x, int) and x > 0 for x in prediction.peak_memory_bytes)


def test_running_without_ranks_says_how_to_launch() -> None:
    result = four_ranks()
    for attempt in (
        lambda: result.train_step(batch(ROWS)),
        lambda: list(result.parameters()),
        result.state_dict,
    ):
        launched = "needs 4 ranks.*torchrun --standalone --nproc-per-node 4 "
        with pytest.raises(RuntimeError, match=launched):
            attempt()


def test_overrides_are_kept_and_priced() -> None:
    result = four_ranks().replan(Overrides(dp=4))
    assert [stage.dp for stage in result.plan.stages] == [4]
    (row,) = result.report.overrides
    assert row["override"] == "dp=4" and row["effect"].startswith("cost ")


def test_replanning_is_planning_with_other_overrides() -> None:
    first, given = planned(net(), cluster=slow_host(4)), Overrides(pp=2, schedule="gpipe")
    again, fresh = first.replan(given), planned(net(), cluster=slow_host(4), overrides=given)
    assert again.plan == fresh.plan and again.prediction == fresh.prediction
    assert again is not first
    back = again.replan()
    assert back.plan == first.plan and back.prediction == first.prediction
    with pytest.raises(OverrideError, match="tp=3"):
        first.replan(Overrides(tp=3))


def test_answers_and_prices_stay_on_the_rank_that_searched() -> None:
    """The other ranks are told the plan, why, and what it is expected to do."""
    decided = four_ranks()._decision
    told = pickle.loads(pickle.dumps(decided))
    assert (told.plan, told.prediction) == (decided.plan, decided.prediction)
    assert told.report == decided.report
    assert decided.report.deferred is not None and isinstance(decided, SearchedPlan)
    assert told.report.deferred is None and type(told) is Decision


def test_evaluating_changes_nothing() -> None:
    result = planned(net(), 1)
    loss = result.eval_step(batch(8))
    assert all(p.grad is None for p in result.parameters())
    with torch.no_grad(), pytest.raises(ValueError, match="use eval_step"):
        result.train_step(batch(8))
    assert float(result.train_step(batch(8))) == pytest.approx(float(loss), rel=1e-6)


@second_tier("plans that run are told from others in test_check")
def test_plans_for_this_machine_are_plans_that_run() -> None:
    check_runs(four_ranks().plan)
    far = planned(net(), cluster=dataclasses.replace(host(4), backend="nccl"))
    for planner in (four_ranks(), far):
        result = planner.replan(Overrides(cp=2))
        assert {stage.cp for stage in result.plan.stages} == {2}
        check_runs(result.plan)
    assert four_ranks().replan(Overrides(zero=3)).plan.stages[0].zero == 3


@second_tier("parity trains models with ties")
def test_a_tied_weight_may_live_on_two_stages() -> None:
    result = planned(net(tied=True), 2, overrides=Overrides(pp=2))
    first, last = result.plan.stages
    assert first.blocks[0] == "embed" and last.blocks[-1] == "head"


def test_a_plan_and_its_file_are_taken(tmp_path: Path) -> None:
    searched = planned(net(), overrides=Overrides(num_microbatches=2))
    searched.plan.save(tmp_path / "plan.json")
    for given in (searched.plan, tmp_path / "plan.json"):
        result = planned(net(), plan=given)
        assert result.plan == searched.plan
        assert result.prediction == searched.prediction
        assert any("nothing was searched" in note for note in result.report.notes)
        assert torch.equal(result.train_step(batch(ROWS)), searched.train_step(batch(ROWS)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_batch_size": 16},
         "global_batch_size=8, called with 16; legal: global_batch_size=8; pass"),
        ({"precision": "bf16"}, "precision='fp32', called with 'bf16'"),
        ({"cluster": host(2)}, "made for 4 ranks, but the cluster has 2 devices.*of 4 devices"),
        ({"model": net(tied=True)}, r"made for model=.*, but this model is .*; plan again"),
    ],
)  # fmt: skip
def test_a_plan_for_something_else_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        planned(**{"model": net(), "cluster": host(4), "plan": four_ranks().plan, **changes})


@second_tier("what is missing is said by the command, which calls this (test_cli)")
def test_what_does_not_fit_says_how_much_is_missing() -> None:
    """A given plan, and any plan for a cluster."""
    with pytest.raises(InfeasibleError, match=r"by stage: stage 0: \d.* [KM]iB") as caught:
        planned(net(), plan=four_ranks().plan, cluster=small_host(4, 1024))
    assert max(caught.value.shortfall_bytes) > 0
    with pytest.raises(InfeasibleError, match=r"takes .* more \(in \d+% .*; shortfall") as caught:
        planned(net(), cluster=small_host(2, 1024))
    assert max(caught.value.shortfall_bytes) > 0 and "nodes" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0; legal: an integer from 1"),
        ({"global_batch_size": True}, "global_batch_size=True; legal"),
        ({"time_limit_s": "1"}, "time_limit_s='1'; legal: seconds"),
        ({"model": len}, r"model=.*legal: a torch.nn.Module"),
        ({"precision": "fp4"}, "precision='fp4'; legal: fp32, bf16, bf16_pure, fp16, fp8"),
        ({"optimizer": "foo"}, "optimizer='foo'.*adam.*sgd"),
        ({"cluster": "h100-sxm"}, "cluster='h100-sxm' is a str; legal: a Cluster"),
        ({"overrides": {"tp": 2}}, "overrides=.*is a dict; legal: Overrides"),
        ({"plan": {"format": 1}}, "plan=.*is a dict; legal: a Plan, a path or None"),
        ({"plan": "no/such.json"}, "plan file: no/such.json: No such file"),
        ({"example_inputs": ()}, "holds no tensor with a batch dim; legal: a dict"),
        ({"example_inputs": {"id": batch(4)[0], "targets": batch(4)[1]}}, "do not fit Net.forward"),
        ({"example_inputs": batch(4)[:1]}, "one entry, and loss_fn takes \\(output, targets\\)"),
        ({"loss_fn": None, "example_inputs": batch(4)[:1]}, "scalar loss is needed; pass loss_fn="),
        ({"overrides": Overrides(stages=[["embd"]])}, "no block 'embd'; legal: .*; nearest: embed"),
        ({"objective": "cheapest"}, "objective='cheapest'; legal: robust, fastest"),
        *(
            ({"memory_margin": margin}, "memory_margin=.*; legal: .* from 0 to less than 1")
            for margin in (-0.1, 1.0, "much", True, float("nan"))
        ),
    ],
)
def test_bad_arguments_are_one_clear_error(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        planned(**{"model": net(), **changes})


def test_a_plan_leaves_nothing_to_override() -> None:
    with pytest.raises(ValueError, match=r"plan= and overrides=.*drop one"):
        planned(net(), 4, plan=four_ranks().plan, overrides=Overrides(tp=2))
    planned(net(), 4, plan=four_ranks().plan, overrides=Overrides())


def test_the_ranks_that_run_must_be_the_clusters() -> None:
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=2, devices_per_node=4)
    check_world(cluster, None)
    check_world(cluster, 8)
    with pytest.raises(ValueError, match=r"8 devices, but 3 ranks.*--nnodes 2 --rdzv.*-node 4 "):
        check_world(cluster, 3)


@second_tier("ways out of too little memory are test_ways_out's; margins out of range are refused")
def test_errors_of_a_margin_say_the_one_that_holds() -> None:
    """Of a plan that is forced, and of one that is given, which takes 10/11 of memory."""
    forced, on = Overrides(dp=4, zero=0, recompute="none", num_microbatches=1), host(4)
    device = dataclasses.replace(on.device, reserved_bytes=0)
    roomy = dataclasses.replace(on, device=device)
    prediction = planned(net(), cluster=roomy, overrides=forced).prediction
    memory = int(1.1 * max(prediction.peak_memory_bytes))
    tight = dataclasses.replace(on, device=dataclasses.replace(device, memory_bytes=memory))

    with pytest.raises(InfeasibleError, match=r"memory_margin=0\.\d+ instead of 0\.2") as refused:
        planned(net(), cluster=tight, overrides=forced, memory_margin=0.2)
    text = str(refused.value)
    assert re.search(r"a plan takes [^,]+ of a device's [^,]+, the margin leaves [^)]+\)", text)
    margin = float(re.findall(r"memory_margin=(0\.\d+) instead", text)[0])
    assert 0.08 < margin < 0.1  # 1 - 10 / 11
    plan = planned(net(), cluster=tight, overrides=forced, memory_margin=margin).plan
    assert plan.num_microbatches == 1

    with pytest.raises(InfeasibleError, match=r"plan: takes .* leaves") as refused:
        planned(net(), cluster=tight, plan=plan, memory_margin=0.2)
    margin = float(re.findall(r"Way out: memory_margin=(\S+) or", str(refused.value))[0])
    assert planned(net(), cluster=tight, plan=plan, memory_margin=margin).plan == plan
    assert planned(net(), cluster=tight, plan=plan).plan == plan


def test_a_margin_leaves_tensors_something() -> None:
    on = host(4)
    device = dataclasses.replace(on.device, reserved_bytes=on.device.memory_bytes // 4)
    with pytest.raises(ValueError, match=r"tensors are left none; legal: less than 0.75"):
        planned(net(), cluster=dataclasses.replace(on, device=device), memory_margin=0.8)
