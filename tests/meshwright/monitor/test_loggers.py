"""Loggers of metrics, by the packages themselves where they are installed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.monitor import JsonLinesLogger, TensorBoardLogger, WandbLogger, logger_for


def test_json_lines(tmp_path: Path) -> None:
    log = logger_for(tmp_path / "runs" / "run.jsonl")
    assert isinstance(log, JsonLinesLogger)
    log({"step": 1, "loss": 2.5})
    log({"step": 2, "loss": math.nan})
    lines = (tmp_path / "runs" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.5, None]


@pytest.mark.parametrize("to", ["runs", Path("run.json"), 3])
def test_what_is_no_logger_is_refused(to: Any) -> None:
    with pytest.raises(ValueError, match=r"log_to: logger.*legal: a path that ends in \.jsonl"):
        logger_for(to)


class Writer:
    """What loggers call, recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def flush(self) -> None:
        self.calls.append(("flush",))

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        self.calls.append((numbers, step))


def test_writers_of_the_user() -> None:
    board, run, made = Writer(), Writer(), Writer()
    for log in (TensorBoardLogger(board), WandbLogger(run), WandbLogger(lambda: made)):
        log({"step": 7, "loss": 2.5})
    assert board.calls == [("meshwright/loss", 2.5, 7), ("flush",)]
    assert run.calls == made.calls == [({"meshwright/loss": 2.5}, 7)]


def test_a_run_is_made_once_and_where_it_is_logged_to() -> None:
    made: list[Writer] = []

    def init() -> Writer:
        made.append(Writer())
        return made[-1]

    log = WandbLogger(init)
    assert not made
    for step in (1, 2):
        log({"step": step, "loss": 0.5})
    assert len(made) == 1 and len(made[0].calls) == 2


def test_without_tensorboard_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install meshwright\[tensorboard\]"):
        TensorBoardLogger(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLogger(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()  # other ranks leave no file
    for step, loss in ((10, 2.5), (20, math.nan), (30, 1.25)):
        log({"step": float(step), "loss": loss, "tokens_per_s": 100.0 * step})
    read = EventAccumulator(str(tmp_path / "runs"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["meshwright/loss", "meshwright/tokens_per_s"]
    rates = [(event.step, event.value) for event in read.Scalars("meshwright/tokens_per_s")]
    assert rates == [(10, 1000.0), (20, 2000.0), (30, 3000.0)]
    losses = [event.value for event in read.Scalars("meshwright/loss")]
    assert losses[0] == 2.5 and math.isnan(losses[1]) and losses[2] == 1.25


def test_weights_and_biases_takes_what_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = WandbLogger(lambda: wandb.init(mode="offline", dir=str(tmp_path), project="test"))
    for step, loss in ((10, 2.5), (20, 1.25), (30, 0.5)):
        log({"step": float(step), "loss": loss})
    assert log.run.summary["meshwright/loss"] == 1.25  # its last one is open until the next
    log.run.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
