"""A run that is stopped goes on, under any plan and number of ranks, as if it had not been; what
`fit` is given and can't be is refused before a step."""

import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import ParallelModel, fit
from meshwright.data.loader import Order
from meshwright.executor.errors import StateError
from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError
from meshwright.training import Fitted
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import loss, net
from tests.meshwright.data import feeding
from tests.meshwright.data.feeding import RANKS, ROWS, SAMPLES, Tokens, batch_of, begun_anew

SEED, STEPS, STOPPED_AT = 3, 6, 2
MORE = 3  # steps on one rank


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Epoch after epoch on one device."""
    order = Order(size=SAMPLES, rows=ROWS, shuffle=True, seed=SEED, drop_last=False)
    batches = [batch.samples for epoch in range(3) for batch in order.batches(epoch)]
    return feeding.plain_losses(batches[: STEPS + MORE])


def sgd(result: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(result.parameters(), lr=0.5)


def run(result: ParallelModel, folder: Path, **given: Any) -> tuple[Fitted, dict[int, float]]:
    """How it ended, and the losses by step that rank 0 has logged."""
    losses: dict[int, float] = {}

    def log(metrics: Any) -> None:
        if "loss" in metrics:
            losses[int(metrics["step"])] = metrics["loss"]

    options = {
        "optimizer": sgd, "max_grad_norm": None, "folder": folder, "log_to": log, "log_every": 1,
        "schedule": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        "seed": SEED, **given,
    }  # fmt: skip
    return fit(result, Tokens(), **options), losses


def signalled(number: int, rank: int) -> Any:
    """An optimizer after whose step `STOPPED_AT` one rank gets a signal."""

    def make(result: ParallelModel) -> torch.optim.Optimizer:
        optimizer, steps = sgd(result), count(1)

        def signal_at(*_: Any) -> None:
            if next(steps) == STOPPED_AT and launch.rank() == rank:
                os.kill(os.getpid(), number)

        optimizer.register_step_post_hook(signal_at)
        return optimizer

    return make


def stop_and_go_on(folder: Path, expected: list[float]) -> None:
    """SIGTERM on one rank stops all after the next step; under another plan the rest follows."""
    stop = signalled(signal.SIGTERM, rank=2)
    first, before = run(feeding.planned("dp2×tp2"), folder, steps=STEPS, optimizer=stop)
    second, after = run(feeding.planned("pp2×dp2"), folder, steps=STEPS)
    assert (first.ended, first.steps) == ("signal", STOPPED_AT + 1)
    assert (second.ended, second.steps) == ("steps", STEPS)
    if not launch.rank():
        assert ([*before], [*after]) == ([1, 2, 3], [4, 5, 6])
        assert [*before.values(), *after.values()] == pytest.approx(expected, rel=1e-5)


def test_a_stopped_run_goes_on_at_the_same_sample(tmp_path: Path, expected: list[float]) -> None:
    """On as many ranks, and then on one."""
    on_ranks(RANKS, stop_and_go_on, tmp_path, expected[:STEPS])
    done, losses = run(feeding.planned(ranks=1), tmp_path, steps=STEPS + MORE)
    assert done.steps == STEPS + MORE and [*losses] == [7, 8, 9]
    assert [*losses.values()] == pytest.approx(expected[STEPS:], rel=1e-5)


def end_runs(folder: Path) -> None:
    """SIGUSR1 saves and the run goes on; patience and unequal batches end one."""
    save = signalled(signal.SIGUSR1, rank=1)
    done, _ = run(feeding.planned("dp4"), folder, optimizer=save, keep=2, save_every=5)
    assert (done.ended, done.steps) == ("data", 3)
    assert [path.name for path in folder.glob("step-*")] == ["step-00000003"]

    # without learning no evaluation is better than the first
    given = {"steps": 50, "evaluation": Tokens(8), "evaluate_every": 2, "patience": 3}
    done, _ = run(feeding.planned("dp4"), folder / "none", optimizer=still, **given)
    assert (done.ended, done.steps) == ("patience", 8) and done.eval_loss

    batches = [batch_of(range(ROWS))] * (1 if launch.rank() == 2 else 2)
    with pytest.raises(StateError, match=r"fit: data: the batches ended on ranks \[2\] before"):
        fit(feeding.planned("dp4"), batches, optimizer=still)


def still(result: ParallelModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(result.parameters(), lr=0.0)


def test_signals_patience_and_unequal_batches(tmp_path: Path) -> None:
    on_ranks(RANKS, end_runs, tmp_path / "run")


def test_a_plain_module_is_planned_first(expected: list[float], tmp_path: Path) -> None:
    planning = {"global_batch_size": ROWS, "loss_fn": loss, "precision": "fp32"}
    log = tmp_path / "metrics.jsonl"
    done = fit(
        net(), Tokens(), planning=planning, optimizer=sgd, max_grad_norm=None, seed=SEED,
        log_to=log, log_every=2,
    )  # fmt: skip
    assert (done.ended, done.steps) == ("data", 3)
    assert done.loss == pytest.approx(expected[2], rel=1e-5)
    assert len(log.read_text().splitlines()) == 1


@second_tier(
    "runs that are resumed stay: at their samples on ranks, at their schedule in test_resuming"
)
def test_a_run_in_parts_is_the_whole_run(tmp_path: Path) -> None:
    """Moments and the schedule go on; every second step and the last one are saved."""
    found: dict[str, list[tuple[float, ...]]] = {"whole": [], "parts": []}
    for name, steps in (("whole", 5), ("parts", 3), ("parts", 5)):
        fit(
            feeding.planned(ranks=1),
            Tokens(),
            optimizer=lambda result: torch.optim.AdamW(result.parameters(), lr=0.1),
            schedule=lambda of: torch.optim.lr_scheduler.LinearLR(of, 1.0, 0.5, total_iters=5),
            log_to=lambda m: found[name].append((m["step"], m["lr"], m["loss"])),  # noqa: B023
            log_every=1,
            steps=steps,
            folder=tmp_path / name,
            save_every=2,
            keep=2,
        )
        kept = sorted(path.name for path in (tmp_path / name).glob("step-*"))
        assert kept == [f"step-{k:08d}" for k in ((2, 3) if steps == 3 else (4, 5))]
    assert found["parts"] == found["whole"]
    assert [step for step, *_ in found["whole"]] == [1, 2, 3, 4, 5]
    assert [lr for _, lr, _ in found["whole"]] == pytest.approx([0.1, 0.09, 0.08, 0.07, 0.06])


@pytest.mark.parametrize(
    "every", tiered(("best", 1), lambda every: every == "best", "the best alone are saved")
)
def test_the_weights_of_the_best_evaluation_are_loaded(every: Any, tmp_path: Path) -> None:
    """They are saved where asked for, and stay beside the newest; a resumed run knows them."""
    result, weights, numbers = begun_anew(), list[Any](), iter([1.0, 3.0, 2.0, 0.5, 4.0])

    def evaluation() -> dict[str, float]:
        weights.append({k: x.clone() for k, x in result.full_state_dict().items()})
        return {"eval_loss": 1.0, "score": next(numbers)}

    options = {
        "optimizer": sgd, "evaluation": evaluation, "evaluate_every": 1, "metric": "score",
        "greater_is_better": True, "save_every": every, "keep": 2, "load_best": True,
    }  # fmt: skip
    done = fit(result, Tokens(), folder=tmp_path, steps=4, **options)
    assert (done.steps, done.best_step) == (4, 2)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [
        "step-00000002", "step-00000004"
    ]  # fmt: skip
    for name, x in result.full_state_dict().items():
        assert torch.equal(x, weights[1][name])
    done = fit(result, Tokens(), resume=tmp_path / "step-00000004", steps=5, **options)
    assert (done.steps, done.best_step) == (5, 5)


def test_an_evaluation_without_the_metric_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"fit: metric='f1' is not among.*legal: eval_loss"):
        fit(
            begun_anew(), Tokens(), optimizer=sgd, steps=1, evaluation=Tokens(8),
            evaluate_every=1, metric="f1",
        )  # fmt: skip


@second_tier(
    "lines of steps, on terminals and elsewhere, are written without a run in test_terminal"
)
def test_lines_are_shown_on_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    shown = {"log_every": 2, "evaluation": Tokens(8), "evaluate_every": 3}
    result = feeding.planned(ranks=1)  # that has made no step
    fit(result, Tokens(), optimizer=sgd, steps=4, progress=True, **shown)
    fit(result, Tokens(), optimizer=sgd, steps=4, **shown)  # no terminal
    lines = capfd.readouterr().err.splitlines()
    said = [line.split(",")[0].rsplit(" ", 1)[0] for line in lines if line.startswith("step ")]
    assert said == ["step 2/4: loss", "step 3/4: eval_loss", "step 4/4: loss"]


def test_batches_of_ones_own_are_global(expected: list[float]) -> None:
    order = Order(size=SAMPLES, rows=ROWS, shuffle=True, seed=SEED, drop_last=False)
    batches = [batch_of(b.samples) for b in order.batches(0)]
    done = fit(begun_anew(), batches, optimizer=sgd, max_grad_norm=None)
    assert done.loss == pytest.approx(expected[2], rel=1e-5)


def test_a_run_over_an_epoch_is_done_when_the_epoch_is(tmp_path: Path) -> None:
    for _ in range(2):
        done = fit(begun_anew(), Tokens(), optimizer=sgd, folder=tmp_path)
        assert (done.ended, done.steps) == ("data", 3)
    assert done.loss is None  # of the second: nothing was left to train


def test_data_without_a_state_begin_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [batch_of(range(ROWS))] * 2
    for steps in (1, 2):
        done = fit(begun_anew(), batches, optimizer=sgd, folder=tmp_path, steps=steps)
        assert done.steps == steps
    assert "the data begin anew: list has no state_dict()" in caplog.text


class Interrupted(list[Any]):
    """Batches behind which somebody presses Ctrl-C."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        raise KeyboardInterrupt


@pytest.mark.parametrize(("every", "says"), [(1, "goes on from step-00000002"), (9, "begins anew")])
def test_an_interrupted_run_says_where_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int, says: str
) -> None:
    batches = Interrupted([batch_of(range(ROWS))] * 2)
    with pytest.raises(KeyboardInterrupt):
        fit(begun_anew(), batches, optimizer=sgd, folder=tmp_path, save_every=every, steps=4)
    assert f"interrupted after step 2: a run in {tmp_path} {says}" in caplog.text


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_is_ended_by_a_signal_says_where_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    batches = [batch_of(range(ROWS))] * 9
    folder = tmp_path if kept else None
    done = fit(
        begun_anew(), batches, optimizer=signalled(signal.SIGTERM, rank=0), folder=folder, steps=9
    )
    says = f"a run in {tmp_path} goes on from step-" if kept else "without a folder nothing is kept"
    assert done.ended == "signal"
    assert f"ended by SIGTERM after step {done.steps}: {says}" in caplog.text


def test_a_run_is_not_begun_over_another(tmp_path: Path) -> None:
    result = begun_anew()
    fit(result, Tokens(), optimizer=sgd, folder=tmp_path, steps=2)
    with pytest.raises(MeshwrightError, match="holds checkpoints of 1 steps, the last 2"):
        fit(result, Tokens(), optimizer=sgd, folder=tmp_path, resume=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": torch.optim.SGD}, "optimizer"),
        ({"optimizer": lambda result: 3}, "optimizer returned a int"),
        ({"steps": 0}, "fit: steps"),
        ({"keep": 0}, "fit: keep"),
        ({"planning": {"global_batch_size": 8}}, "with a model that has a plan"),
        ({"evaluation": iter([]), "evaluate_every": 1}, "0 batches count"),
        ({"schedule": 3}, "schedule"),
        ({"schedule": lambda optimizer: None}, "schedule returned a NoneType"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"resume": 1}, "resume"),
        ({"load_best": 1}, "load_best"),
        ({"metric": 3}, "metric"),
        ({"progress": "yes"}, "progress"),
        ({"save_every": "always"}, "save_every"),
        ({"folder": 3}, "folder"),
        ({"log_to": "x" * 300}, "log_to"),
        ({"data": "text"}, "data"),
        ({"data": {"input_ids": 1}}, "data"),
        ({"data": [batch_of(range(8))], "seed": 3}, "seed"),
        ({"evaluation": 3}, "evaluation"),
        ({"model": "model"}, "model"),
        ({"model": net(), "planning": {"batch": 8}}, r"planning=\['batch'\]"),
        ({"model": net(), "planning": 8}, "planning=8"),
        ({"model": net()}, "has no global_batch_size"),
        ({"model": net(), "data": iter([()]), "planning": {"global_batch_size": 8}},
         "which gives each of them once"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(given: dict[str, Any], says: str) -> None:
    asked = {"model": None, "data": Tokens(), "optimizer": sgd, "steps": 1, **given}
    asked["model"] = feeding.planned_alone() if asked["model"] is None else asked["model"]
    with pytest.raises(MeshwrightError, match=says) as caught:
        fit(asked.pop("model"), asked.pop("data"), **asked)
    assert caught.value.legal and caught.value.way_out
