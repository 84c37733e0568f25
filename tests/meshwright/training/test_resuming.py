"""A run that goes on: what it is given otherwise is said, or taken; its folder is its own; signals
before the first step are heard."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from meshwright import fit
from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError
from meshwright.training import Fitted, RunEvent, kept
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.meshwright.data import feeding
from tests.meshwright.data.feeding import Tokens

Lr = torch.optim.lr_scheduler


def adamw(result: Any, **given: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(result.parameters(), **{"lr": 0.1, **given})


def linear(optimizer: torch.optim.Optimizer, total: int = 8) -> Any:
    return Lr.LinearLR(optimizer, 1.0, 0.5, total_iters=total)


def run(folder: Path, steps: int, **given: Any) -> tuple[Fitted, list[float]]:
    """And the learning rate of each of its steps."""
    rates: list[float] = []
    options: dict[str, Any] = {"optimizer": adamw, "schedule": linear, "seed": 3, **given}
    done = fit(
        feeding.planned(ranks=1),
        Tokens(),
        folder=folder,
        steps=steps,
        log_every=1,
        log_to=lambda metrics: rates.append(metrics["lr"]),
        **options,
    )
    return done, rates


OTHER = [
    ({"optimizer": partial(adamw, lr=0.5)}, "optimizer, group 0: lr was 0.1, is given as 0.5"),
    (
        {"optimizer": partial(adamw, betas=(0.5, 0.9))},
        "optimizer, group 0: betas was [0.9, 0.999], is given as [0.5, 0.9]",
    ),
    ({"schedule": partial(linear, total=4)}, "schedule: total_iters was 8, is given as 4"),
    ({"schedule": None}, "schedule was 'LinearLR', is given as None"),
    ({"seed": 7}, "data: seed was 3, is given as 7"),
]
TAKEN = second_tier("all three stay where what is given is taken")


@pytest.mark.parametrize(
    ("given", "told"),
    [pytest.param(given, told, id=told.split(" was")[0], marks=TAKEN) for given, told in OTHER],
)
def test_what_a_resumed_run_is_given_otherwise_is_said(
    given: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And what was saved goes on, twice."""
    run(tmp_path, 2)
    for steps in (4, 5):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run(tmp_path, steps, **given)
        assert told in caplog.text and "with what the checkpoint has" in caplog.text
        assert 'resume="given" takes the other' in caplog.text


@second_tier("a run that took what is given goes on with the same, and says nothing")
def test_a_run_that_is_given_the_same_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, 4)
    assert "fit: resumed" not in caplog.text


def test_what_is_given_is_taken_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule goes on at its step, and the rates are those of a whole run that has it."""
    changed: dict[str, Any] = {
        "optimizer": partial(adamw, lr=0.4),
        "schedule": partial(linear, total=4),
        "seed": 7,
    }
    _, expected = run(tmp_path / "whole", 5, **changed)
    run(tmp_path / "parts", 2)
    with caplog.at_level(logging.WARNING):
        _, rates = run(tmp_path / "parts", 5, resume="given", **changed)
    assert "resumed with what is given now: data: seed was 3, is given as 7" in caplog.text
    assert rates == pytest.approx(expected[2:])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "parts", 6, **changed)
    assert "fit: resumed" not in caplog.text


def asked_by_one_rank(folder: Path) -> tuple[str, int, list[str]]:
    """One of two ranks asks for a save after step 1, and for a stop after step 2."""

    def watch(event: RunEvent) -> list[str]:
        if event.name != "stepped" or launch.rank() != 1:
            return []
        return {1: ["save"], 2: ["stop"]}.get(event.step, [])

    done = fit(
        feeding.planned(ranks=2), Tokens(), optimizer=adamw, folder=folder, steps=9,
        watch=watch,
    )  # fmt: skip
    return done.ended, done.steps, sorted(path.name for path in folder.glob("step-*"))


@second_tier("transformers' callbacks ask by the same watch, of one device")
def test_what_one_rank_asks_for_is_done_on_all(tmp_path: Path) -> None:
    ended, steps, saved = on_ranks(2, asked_by_one_rank, tmp_path)
    assert (ended, steps) == ("watch", 2)
    assert saved == ["step-00000001", "step-00000002"]


def asked(value: Any) -> str:
    return "asks1" if isinstance(value, list) else str(value)


@pytest.mark.parametrize(
    "asks", tiered(("stop", ["halt"], 3), lambda asks: asks == "stop", "a word stays", asked)
)
def test_what_a_watch_can_not_ask_for_is_refused(asks: Any, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"fit: watch asked for .*legal: None, or some of"):
        run(tmp_path, 2, watch=lambda _: asks)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    """The second one, which learns whose it is; not once the first has ended."""
    lock = FileLock(tmp_path / kept.LOCK)
    with lock:
        (tmp_path / kept.OWNER).write_text('{"host": "one", "pid": 7, "begun": "then"}')
        told = r"is written to by process 7 on one, begun at then.*legal: a folder of its own"
        with pytest.raises(MeshwrightError, match=told):
            run(tmp_path, 2)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert run(tmp_path, 2)[0].steps == 2
    assert not (tmp_path / kept.OWNER).exists()


def test_a_job_that_is_started_anew_elsewhere_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the file server still holds the lock of the host that was lost."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    with FileLock(tmp_path / kept.LOCK):
        (tmp_path / kept.OWNER).write_text('{"host": "lost", "pid": 7, "job": "mine"}')
        with caplog.at_level(logging.WARNING):
            assert run(tmp_path, 2)[0].steps == 2
    assert "job mine, process 7 on lost" in caplog.text and "without its lock" in caplog.text


@pytest.mark.parametrize(
    "planted",
    tiered(("empty", "file", "foreign"), "empty".__eq__, "an empty folder is passed over, too"),
)
def test_what_is_no_checkpoint_is_passed_over(
    planted: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 2)
    path = tmp_path / "step-99999999"
    if planted == "file":
        path.write_text("")
    else:
        path.mkdir()
    if planted == "foreign":
        (path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING):
        done, rates = run(tmp_path, 4)
    assert (done.steps, len(rates)) == (4, 2)
    assert "step-99999999" in caplog.text and "passed over" in caplog.text
    assert path.exists()


@pytest.mark.parametrize(
    ("number", "steps"),
    [
        pytest.param(signal.SIGUSR1, 4, id="USR1"),
        pytest.param(signal.SIGTERM, 2, id="TERM", marks=second_tier("SIGTERM ends runs of ranks")),
    ],
)
def test_a_signal_before_the_first_step_is_heard(
    number: signal.Signals, steps: int, tmp_path: Path
) -> None:
    """It comes while the run is planned; all ranks know of it a step later."""

    def make(result: Any) -> torch.optim.Optimizer:
        os.kill(os.getpid(), number)
        return adamw(result)

    done, _ = run(tmp_path, 4, optimizer=make)
    assert (done.steps, done.ended) == (steps, "steps" if steps == 4 else "signal")
    saved = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert saved[0] == "step-00000002"
