"""Steps that ran correct the next prediction: kept, used without being told, and forgotten."""

import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from meshwright import Cluster, Overrides, ParallelModel
from meshwright.cli import main
from meshwright.executor.errors import StateError
from meshwright.executor.ranks import all_gather_object, gloo_group
from meshwright.monitor import WARM_UP
from meshwright.profiles.profile import cores_busy, load_profile, no_profile
from meshwright.profiles.steps import STEP, RunKind, StepTiming
from meshwright.profiles.store import DeviceId, Measurements, Store
from meshwright.running.recalibrated import LEAST_STEPS, step_timings
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import ROWS, batch, host, net, planned

RUN = RunKind(precision="fp32", target="eager")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def measured(times: float, **changes: object) -> ParallelModel:
    """A model on one device whose steps took `times` of what was predicted."""
    result = planned(net(), **changes)
    own = result.monitor.predicted
    seconds = {"train_step_s": own.train_step_s, **own.terms}
    result.monitor._rows += [{name: times * s for name, s in seconds.items()}] * 15
    return result


def test_the_next_prediction_is_nearer_without_being_told() -> None:
    first = measured(3.0, overrides=Overrides(num_microbatches=1))
    other = first.replan(Overrides(num_microbatches=4))  # not recalibrated on
    before_s = other.monitor.predicted.train_step_s  # without the optimizer's
    found = first.recalibrate()
    assert found.measured_s == pytest.approx(3 * found.before_s)
    assert abs(found.after_s / found.measured_s - 1) < 0.2
    again = planned(net(), overrides=Overrides(num_microbatches=4))
    assert 2.2 < again.monitor.predicted.train_step_s / before_s < 3.2
    assert any("forward compute × " in line for line in again.report.assumptions)
    without = planned(net(), overrides=Overrides(num_microbatches=4), profile=False)
    assert without.monitor.predicted.train_step_s == pytest.approx(before_s)
    replanned = first.replan(Overrides(num_microbatches=4))
    assert replanned.prediction.step_time_s == pytest.approx(again.prediction.step_time_s)
    assert first.monitor.predicted.train_step_s < found.after_s  # as it was then


def test_to_recalibrate_twice_does_not_square_a_factor() -> None:
    first = measured(3.0)
    once = first.recalibrate()
    twice = first.recalibrate()
    assert twice.corrections == once.corrections and twice.before_s == once.before_s
    corrected = planned(net(), plan=first.plan)
    assert corrected.monitor.predicted.train_step_s == pytest.approx(once.after_s)
    corrected.monitor._rows += first.monitor._rows  # it takes as long as it did
    thrice = corrected.recalibrate()
    assert thrice.before_s == pytest.approx(once.before_s)
    assert thrice.corrections == once.corrections


def test_steps_that_ran_are_kept_once_a_plan() -> None:
    result = planned(net())
    few = rf"0 steps.*{LEAST_STEPS} observed steps, after {WARM_UP}"
    with pytest.raises(StateError, match=few):
        result.recalibrate()
    for _ in range(WARM_UP + LEAST_STEPS):
        result.train_step(batch(ROWS))
    found = result.recalibrate()
    assert found.samples == LEAST_STEPS and 0 < found.measured_s < 60
    result.train_step(batch(ROWS))
    assert result.recalibrate().samples == LEAST_STEPS + 1
    (device,) = Store().devices()
    kept = Store().read(device).steps
    assert {s.samples for s in kept} == {LEAST_STEPS + 1} and len(kept) == 4


def test_what_is_forgotten_no_longer_counts(capsys: pytest.CaptureFixture[str]) -> None:
    first = measured(3.0)
    first.recalibrate()
    assert main(["profile", "--cluster", "local:1", "--forget-steps"]) == 0
    assert "steps of 1 plan on" in capsys.readouterr().out
    again = planned(net(), plan=first.plan)
    assert again.prediction.step_time_s == first.prediction.step_time_s
    assert not any("corrected" in line for line in again.report.assumptions)


def test_ranks_of_a_stage_count_by_their_mean_and_stages_by_their_sum() -> None:
    """Of a whole step, which all stages take, by the mean of stages."""
    result = planned(net(), 4, overrides=Overrides(dp=2, pp=2, num_microbatches=2))
    names = ("forward_s", "backward_s", "reduction_s", "train_step_s")
    medians = [{name: (rank + 1) * 10**k for k, name in enumerate(names)} for rank in range(4)]
    steps = step_timings(result.plan, result._problem, no_profile(host(4)), medians, 15)
    measured = {step.term: step.measured_s for step in steps}
    assert measured == {"forward": 5, "backward": 50, "reduction": 500, STEP: 2500}
    assert {step.samples for step in steps} == {15}
    with pytest.raises(StateError, match=r"needs 4 ranks.*torchrun"):
        result.recalibrate()


def test_a_cache_that_cannot_be_written_loses_nothing(
    cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_folder.write_text("a file where the folder should be")
    first = measured(3.0)
    found = first.recalibrate()
    assert "in this process alone" in caplog.text and found.cache is None
    assert found.corrections
    again, before = first.replan().monitor.predicted, first.monitor.predicted
    assert 2.2 < again.train_step_s / before.train_step_s < 3.2


@cache
def slow_steps() -> tuple[StepTiming, ...]:
    """Of a plan on one device whose steps took three times its price."""
    first = measured(3.0)
    medians = [first.monitor.medians()[1]]
    return step_timings(first.plan, first._problem, no_profile(host(1)), medians, 15)


def keep(name: str, version: str, **changes: str) -> None:
    """Keep them as another device's or version's."""
    steps = tuple(replace(step, **changes) for step in slow_steps())
    Store().add(Measurements(device=DeviceId(name=name, driver="1", torch=version), steps=steps))


@pytest.mark.parametrize(
    ("name", "version", "target", "counts"),
    [
        ("here", ".".join(torch.__version__.split(".")[:2]) + ".77", "eager", True),
        ("here", "1.0.0", "eager", False),
        ("here", torch.__version__, "compiled", False),
        ("elsewhere", torch.__version__, "eager", False),
    ],
)
def test_steps_of_this_device_torch_and_target_count(
    name: str, version: str, target: str, counts: bool
) -> None:
    cluster = host(1)
    here = DeviceId.here("cpu", cores_busy(cluster)).name
    keep(here if name == "here" else name, version, target=target)
    found = load_profile(cluster, run=RUN)
    assert (found is not None and bool(found.corrections)) == counts


def test_steps_on_a_gpu_correct_plans_for_more_of_it_of_the_same_basis() -> None:
    keep("NVIDIA H100 80GB HBM3", torch.__version__, backend="nccl")
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=2)
    found = load_profile(cluster, run=RUN)
    assert found is not None and found.corrections
    assert load_profile(cluster) is None  # no kind of run, no measurement
    keep(DeviceId.here("cpu", 1).name, torch.__version__, basis="operators measured")
    assert load_profile(host(1), run=RUN) is None


def recalibrate_together(overrides: Overrides, cache: Path) -> set[str]:
    """The parts of a step that were kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(cache))
        result = planned(net(), cluster=host(2), overrides=overrides)
        with pytest.raises(StateError, match="0 steps"):
            result.recalibrate()
        for _ in range(WARM_UP + LEAST_STEPS + 1):
            result.train_step(batch(ROWS))
        found = result.recalibrate()
        again = planned(net(), cluster=host(2), plan=result.plan)
        steps = [s for d in Store().devices() for s in Store().read(d).steps]
    assert found.samples == LEAST_STEPS + 1
    assert len({s.plan for s in steps}) == 1
    assert found.measured_s > found.before_s  # microseconds of work, gloo's milliseconds
    assert found.before_s < found.after_s < 3 * found.measured_s
    predicted_s = all_gather_object(gloo_group(), again.monitor.predicted.train_step_s)
    assert statistics.fmean(predicted_s) == pytest.approx(found.after_s, rel=0.01)
    texts = all_gather_object(gloo_group(), str(found))
    assert texts[0] == texts[1]
    return {part for s in steps for part in s.parts}


TOGETHER = {"dp": Overrides(dp=2), "tp": Overrides(tp=2), "pp": Overrides(pp=2, num_microbatches=2)}


@second_tier("times of four ranks are put together without ranks in a test above")
@pytest.mark.parametrize("axis", TOGETHER)
def test_ranks_recalibrate_together(axis: str, tmp_path: Path) -> None:
    parts = on_ranks(2, recalibrate_together, TOGETHER[axis], tmp_path)
    assert ("messages between stages inside a node" in parts) == (axis == "pp")
