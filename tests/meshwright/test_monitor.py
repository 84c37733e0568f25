"""Metrics of a run, their loggers, and how far measured is from predicted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Overrides, ParallelModel
from meshwright.monitor import JsonLinesLogger, Monitor, Predicted, TensorBoardLogger, WandbLogger
from meshwright.monitor.deviation import AIMS, NAMES, TERMS, deviation
from meshwright.monitor.metrics import TELL_AFTER, WARM_UP
from tests.helpers.tiny import ROWS, SEQUENCE, batch, net, planned

CPU = torch.device("cpu")


def predicted(**changes: Any) -> Predicted:
    given: dict[str, Any] = {
        "train_step_s": 0.9,
        "terms": dict(zip(TERMS, (0.3, 0.5, 0.1, 0.0), strict=True)),
        "step_time_s": 1.0,
        "interval": (0.8, 1.2),
        "rows": 8,
        "tokens_per_row": 6.0,
        "mfu": 0.4,
        "peak_memory_bytes": 100.0,
    }
    return Predicted(**given | changes)


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stepped(
    monitor: Monitor, time: Time, *, inside: float = 1.0, after: float = 1.0, rows: int = 8
) -> None:
    """A step of so many seconds, and what follows until the next."""

    def run(watch: object) -> torch.Tensor:
        time.now += inside
        return torch.tensor(3.0)

    monitor.train_step(run, lambda: rows)
    time.now += after


def monitored(**changes: Any) -> tuple[Monitor, Time]:
    time = Time()
    return Monitor(predicted(**changes), CPU, 0, clock=time), time


# --- the numbers ---------------------------------------------------------------------------------


def test_a_step_is_measured_with_what_follows_it() -> None:
    monitor, time = monitored()
    assert monitor.metrics() == {}
    stepped(monitor, time, inside=1.5, after=0.5)
    first = monitor.metrics()
    assert first["train_step_s"] == 1.5 and "step_time_s" not in first
    assert first["step"] == 1 and first["loss"] == 3.0
    monitor._over(time.now)
    found = monitor.metrics()
    assert found["step_time_s"] == 2.0
    assert found["rows_per_s"] == 4.0 and found["tokens_per_s"] == 24.0
    assert found["mfu"] == pytest.approx(0.4 / 2)
    assert found["predicted_rows_per_s"] == 8.0 and found["predicted_tokens_per_s"] == 48.0
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_fewer_rows_count_as_fewer() -> None:
    monitor, time = monitored(tokens_per_row=None)
    stepped(monitor, time, inside=1.0, rows=4)
    found = monitor.metrics()
    assert found["rows_per_s"] == 4.0 and found["mfu"] == pytest.approx(0.2)
    assert "tokens_per_s" not in found


def test_loggers_get_each_step_once_and_the_last_at_the_end() -> None:
    monitor, time = monitored()
    every: list[dict[str, float]] = []
    third: list[dict[str, float]] = []
    monitor.log_to(lambda m: every.append(dict(m)))
    monitor.log_to(lambda m: third.append(dict(m)), every=3)
    for _ in range(4):
        stepped(monitor, time, inside=1.0, after=1.0)
    monitor.note(grad_norm=torch.tensor(2.0))
    monitor.close()
    monitor.close()
    assert [m["step"] for m in every] == [1, 2, 3, 4] and [m["step"] for m in third] == [3]
    assert [m.get("step_time_s") for m in every] == [2.0, 2.0, 2.0, None]
    assert every[-1]["grad_norm"] == 2.0
    with pytest.raises(ValueError, match="every=0; legal: an integer from 1"):
        monitor.log_to(print, every=0)


def test_other_ranks_log_nothing() -> None:
    time = Time()
    monitor = Monitor(predicted(), CPU, 1, clock=time)
    monitor.log_to(lambda m: pytest.fail("logged"))
    for _ in range(TELL_AFTER + 1):
        stepped(monitor, time)
    assert monitor.told is None


# --- deviation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", TERMS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_term_that_is_off_most_is_named(slow: str, sign: int) -> None:
    own = dict.fromkeys(TERMS, 1.0)
    row = own | {slow: 1.0 + 0.5 * sign, "train_step_s": 4.0 + 0.5 * sign}
    row[next(term for term in TERMS if term != slow)] += 0.1 * sign
    found = deviation([row], {"train_step_s": 4.0, **own}, steps=20, interval_s=(3.9, 4.1))
    assert found.likely == slow and not found.inside
    text = str(found)
    assert f"most is off in {NAMES[slow]}: " in text and AIMS[slow] in text
    assert f"({0.125 * sign:+.0%}), outside of the 80 % interval" in text


def test_the_median_counts_and_equal_steps_have_no_reason() -> None:
    own = {"train_step_s": 4.0, **dict.fromkeys(TERMS, 1.0)}
    rows = [own, own, {name: 100 * value for name, value in own.items()}]
    found = deviation(rows, own, steps=20, interval_s=(3.0, 5.0))
    assert found.inside and found.likely is None and "most is off" not in str(found)


def test_it_is_told_once_after_twenty_steps(caplog: pytest.LogCaptureFixture) -> None:
    monitor, time = monitored(train_step_s=1.0)
    with caplog.at_level(logging.INFO, "meshwright.monitor"):
        for _ in range(TELL_AFTER - 1):
            stepped(monitor, time, inside=2.0)
        assert not caplog.records
        for _ in range(5):
            stepped(monitor, time, inside=2.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "after 20 steps: train_step takes 2 s, predicted 1 s (+100%)" in record.getMessage()
    assert monitor.told is not None and monitor.told.likely == "waiting_s"
    assert len(monitor._observed) == TELL_AFTER - WARM_UP


# --- loggers -------------------------------------------------------------------------------------


def test_json_lines(tmp_path: Path) -> None:
    log = JsonLinesLogger(tmp_path / "run.jsonl")
    log({"step": 1, "loss": 2.5})
    log({"step": 2, "loss": 2.0})
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.5, 2.0]


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
    board, run = Writer(), Writer()
    for log in (TensorBoardLogger(board), WandbLogger(run)):
        log({"step": 7, "loss": 2.5})
    assert board.calls == [("meshwright/loss", 2.5, 7), ("flush",)]
    assert run.calls == [({"meshwright/loss": 2.5}, 7)]


def test_tensorboard_writes_a_file_or_says_what_is_missing(tmp_path: Path) -> None:
    make: Callable[[], TensorBoardLogger] = lambda: TensorBoardLogger(tmp_path)  # noqa: E731
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install meshwright\[tensorboard\]"):
            make()
        return
    make()({"step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir())


# --- a run ---------------------------------------------------------------------------------------


def trained(result: ParallelModel, steps: int) -> None:
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        result.train_step(batch(ROWS))
        result.clip_grad_norm_(1.0)
        optimizer.step()


def test_a_run_has_metrics_beside_predictions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = planned(net(), overrides=Overrides(num_microbatches=2))
    result.log_to(JsonLinesLogger(tmp_path / "run.jsonl"), every=5)
    with caplog.at_level(logging.INFO, "meshwright.monitor"):
        trained(result, TELL_AFTER + 1)
    found = result.metrics()
    assert found["step"] == TELL_AFTER + 1 and found["skipped_steps"] == 0
    assert found["grad_norm"] > 0 and found["peak_memory_bytes"] > 0
    assert found["predicted_step_time_s"] == result.prediction.step_time_s
    own = result.report.summary
    assert found["predicted_tokens_per_s"] == pytest.approx(own["rows_per_s"] * SEQUENCE)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    observed = rows[-1]
    terms = sum(observed[name] for name in TERMS)
    assert terms == pytest.approx(observed["train_step_s"])
    assert observed["forward_s"] > 0 and observed["backward_s"] > 0
    assert observed["step_time_s"] > observed["train_step_s"]
    parts = sum(found[f"predicted_{name}"] for name in TERMS)
    assert parts == pytest.approx(found["predicted_train_step_s"])
    assert any("after 20 steps: " in r.getMessage() for r in caplog.records)


def test_the_norm_can_be_taken_without_clipping() -> None:
    result = planned(net())
    result.train_step(batch(ROWS))
    before = [p.grad.clone() for p in result.parameters() if p.grad is not None]
    norm = result.metrics(grad_norm=True)["grad_norm"]
    after = [p.grad for p in result.parameters() if p.grad is not None]
    assert norm == pytest.approx(float(sum(g.square().sum() for g in after)) ** 0.5, rel=1e-5)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def test_predictions_of_a_pipeline_are_those_of_the_rank() -> None:
    result = planned(net(), devices=2, overrides=Overrides(pp=2, num_microbatches=4))
    for rank, row in enumerate(result.report.stages):
        own = Predicted.of(result.report, rank)
        assert own.terms["forward_s"] == pytest.approx(4 * row["forward_s"])
        assert own.train_step_s == pytest.approx(own.step_time_s - row["optimizer_s"])
        assert sum(own.terms.values()) >= own.train_step_s * (1 - 1e-9)
