"""Metrics of a run, and how far measured is from predicted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Overrides, ParallelModel
from meshwright.executor.devices import Clock
from meshwright.monitor import BatchSize, Monitor, Predicted
from meshwright.monitor.deviation import AIMS, BETWEEN, BLOCKS, NAMES, TERMS, deviation
from meshwright.monitor.metrics import OBSERVE_EVERY, TELL_AFTER, WARM_UP
from tests.helpers.tiny import ROWS, SEQUENCE, batch, net, planned

CPU = torch.device("cpu")


def predicted(**changes: Any) -> Predicted:
    given: dict[str, Any] = {
        "train_step_s": 0.9,
        "terms": dict(zip(TERMS, (0.3, 0.5, 0.1, 0.0), strict=True)),
        "step_time_s": 1.0,
        "interval_s": (0.8, 1.2),
        "rows": 8,
        "tokens_per_row": 6,
        "mfu": 0.4,
        "peak_memory_bytes": 100.0,
    }
    return Predicted(**given | changes)


class Time(Clock):
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.device, self.moment = CPU, 0.0

    def now(self) -> float:
        return self.moment


class Run:
    """Steps of so many seconds, and what follows each; `done` were trained before."""

    def __init__(self, *, rank: int = 0, done: int = 0, **changes: Any) -> None:
        self.time, self.done = Time(), done
        self.monitor = Monitor(predicted(**changes), self.time, rank, lambda: self.done)

    def step(self, *, inside: float = 1.0, after: float = 1.0, rows: int = 8) -> None:
        def run(watch: object) -> torch.Tensor:
            self.time.moment += inside
            self.done += 1
            return torch.tensor(3.0)

        tokens = self.monitor.predicted.tokens_per_row
        self.monitor.train_step(run, lambda: BatchSize(rows, tokens and rows * tokens))
        self.time.moment += after


# --- the numbers ---------------------------------------------------------------------------------


def test_a_step_is_measured_with_what_is_between_it_and_the_step_before() -> None:
    run = Run()
    assert run.monitor.metrics() == {}
    run.step(inside=1.5, after=0.5)
    first = run.monitor.metrics()
    assert (first["step"], first["loss"]) == (1, 3.0)
    assert first["train_step_s"] == first["step_time_s"] == 1.5 and first["between_s"] == 0
    run.step(inside=1.5, after=7.0)
    found = run.monitor.metrics()
    assert found["train_step_s"] == 1.5 and found["between_s"] == 0.5
    assert found["step_time_s"] == 2.0
    assert found["rows_per_s"] == 4.0 and found["tokens_per_s"] == 24.0
    assert found["mfu"] == pytest.approx(0.4 / 2)
    assert found["predicted_rows_per_s"] == 8.0 and found["predicted_tokens_per_s"] == 48.0
    assert found["predicted_between_s"] == pytest.approx(0.1)
    assert all(type(value) is float for value in found.values())
    assert found.keys() == first.keys()
    run.monitor.close()
    later = run.monitor.metrics()
    del later["peak_memory_bytes"]  # of the process so far
    assert later.items() <= found.items()


def test_other_batches_count_as_what_they_are() -> None:
    run = Run(tokens_per_row=None)
    run.step(inside=1.0, rows=4)
    found = run.monitor.metrics()
    assert found["rows_per_s"] == 4.0 and found["mfu"] == pytest.approx(0.2)
    assert "tokens_per_s" not in found
    longer = Run()
    longer.monitor.train_step(lambda watch: torch.tensor(0.0), lambda: BatchSize(8, 96))
    longer.time.moment += 1
    longer.monitor.train_step(lambda watch: torch.tensor(0.0), lambda: BatchSize(8, 96))
    found = longer.monitor.metrics()
    assert (found["rows_per_s"], found["tokens_per_s"]) == (8.0, 96.0)
    assert found["mfu"] == pytest.approx(0.8)


def test_the_wait_for_the_input_is_that_of_the_step_it_was_for() -> None:
    run = Run()
    for waits in ((0.25, 0.5), (), (0.125,)):
        for seconds in waits:
            run.monitor.waited_for_input(seconds)
        run.step()
        assert run.monitor.metrics()["input_s"] == sum(waits)


def test_loggers_get_each_step_once_and_the_last_at_the_end() -> None:
    run = Run(done=100)
    every: list[dict[str, float]] = []
    third: list[dict[str, float]] = []
    run.monitor.log_to(lambda m: every.append(dict(m)))
    run.monitor.log_to(lambda m: third.append(dict(m)), every=3)
    for _ in range(4):
        run.step(inside=1.0, after=1.0)
    run.monitor.note(grad_norm=torch.tensor(2.0))
    run.monitor.close()
    run.monitor.close()
    assert [m["step"] for m in every] == [101, 102, 103, 104]
    assert [m["step"] for m in third] == [102]
    assert [m["step_time_s"] for m in every] == [1.0, 2.0, 2.0, 2.0]
    assert every[-1]["grad_norm"] == 2.0
    with pytest.raises(ValueError, match="every=0; legal: an integer from 1"):
        run.monitor.log_to(print, every=0)


def test_the_time_that_loggers_take_is_not_the_steps() -> None:
    run = Run()

    def slow(_: object) -> None:
        run.time.moment += 5.0

    run.monitor.log_to(slow)
    run.step()
    run.step()
    assert run.monitor.metrics()["train_step_s"] == 1.0
    assert run.monitor.metrics()["between_s"] == 6.0


def test_other_ranks_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(rank=1)
    run.monitor.log_to(lambda m: pytest.fail("logged"))
    with caplog.at_level(logging.INFO, "meshwright.monitor"):
        for _ in range(TELL_AFTER + 1):
            run.step()
    assert run.monitor.told is not None and not caplog.records


# --- deviation -----------------------------------------------------------------------------------


def alike(**changes: float) -> dict[str, float]:
    """The terms of a step of 6 s."""
    return {"step_time_s": 6.0, **dict.fromkeys((*TERMS, *BETWEEN), 1.0), **changes}


@pytest.mark.parametrize("slow", (*TERMS, *BETWEEN))
@pytest.mark.parametrize("sign", [1, -1])
def test_the_term_that_is_off_most_is_named(slow: str, sign: int) -> None:
    row = alike(**{slow: 1.0 + 0.6 * sign}, step_time_s=6.0 + 0.6 * sign)
    row[next(term for term in TERMS if term != slow)] += 0.1 * sign
    found = deviation([row], alike(), steps=20, interval_s=(5.9, 6.1))
    assert found.likely == (slow,) and not found.inside
    text = str(found)
    assert f"most is off in {NAMES[slow,]}: " in text and AIMS[slow,] in text
    assert f"({0.1 * sign:+.1%}), outside of the 80 % interval" in text


def test_forward_and_backward_off_alike_have_one_reason() -> None:
    row = alike(forward_s=3.0, backward_s=3.5, waiting_s=4.0, step_time_s=13.5)
    found = deviation([row], alike(), steps=20, interval_s=(5.0, 7.0))
    assert found.likely == BLOCKS
    assert "most is off in forward and backward alike: 6.5 s, predicted 2 s (the device" in str(
        found
    )


@pytest.mark.parametrize(
    ("factors", "likely"),
    [((2.0, 3.9), BLOCKS), ((3.9, 2.0), BLOCKS), ((2.0, 4.1), ("backward_s",)),
     ((0.5, 2.0), ("backward_s",))],
)  # fmt: skip
def test_factors_are_alike_up_to_the_square_of_one(
    factors: tuple[float, float], likely: tuple[str, ...]
) -> None:
    row = alike(forward_s=factors[0], backward_s=factors[1], step_time_s=4.0 + sum(factors))
    assert deviation([row], alike(), steps=20, interval_s=(5.0, 7.0)).likely == likely


def test_the_median_counts_and_equal_steps_have_no_reason() -> None:
    own = alike()
    rows = [own, own, {name: 100 * value for name, value in own.items()}]
    found = deviation(rows, own, steps=20, interval_s=(5.0, 7.0))
    assert found.inside and found.likely == () and "most is off" not in str(found)


def test_it_is_told_once_after_twenty_steps(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.INFO, "meshwright.monitor"):
        for _ in range(TELL_AFTER - 1):
            run.step(inside=2.0)
        assert not caplog.records
        for _ in range(5):
            run.step(inside=2.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "after 20 steps: a step takes 3 s, predicted 1 s (3 times)" in record.getMessage()
    assert run.monitor.told is not None and run.monitor.told.likely == ("waiting_s",)


def test_the_wait_for_the_input_is_told_apart() -> None:
    run = Run()
    for _ in range(TELL_AFTER):
        run.monitor.waited_for_input(2.5)
        run.step(inside=0.9, after=2.6)
    assert run.monitor.told is not None and run.monitor.told.likely == ("input_s",)
    assert run.monitor.told.terms["between_s"] == pytest.approx((0.1, 0.1))
    assert "waiting for the data_loader: 2.5 s, predicted 0" in str(run.monitor.told)


def test_steps_are_observed_after_the_first_and_then_now_and_again() -> None:
    run, observed = Run(), []
    for step in range(1, 2 * OBSERVE_EVERY + 1):
        run.step()
        if "waiting_s" in run.monitor.metrics():
            observed.append(step)
    assert observed == [*range(WARM_UP + 1, TELL_AFTER + 1), OBSERVE_EVERY, 2 * OBSERVE_EVERY]


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
    result.log_to(tmp_path / "run.jsonl", every=5)
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


def test_predictions_are_those_of_the_ranks_stage() -> None:
    """Passes of all micro-batches, the reduction once; what is left of the step is waiting."""
    result = planned(net(), devices=4, overrides=Overrides(pp=2, dp=2, num_microbatches=4))
    summary = result.report.summary
    for rank, stage in ((1, 0), (2, 1)):
        own, row = Predicted.of(result.report, rank), result.report.stages[stage]
        forward_s, backward_s = 4 * row["forward_s"], 4 * row["backward_s"]
        reduction_s = row["gradient_reduction_s"]
        train_step_s = summary["step_time_s"] - row["optimizer_s"]
        rest_s = max(0.0, train_step_s - forward_s - backward_s - reduction_s)
        assert own == Predicted(
            train_step_s=pytest.approx(train_step_s),
            terms={
                "forward_s": pytest.approx(forward_s),
                "backward_s": pytest.approx(backward_s),
                "reduction_s": pytest.approx(reduction_s),
                "waiting_s": pytest.approx(rest_s),
            },
            step_time_s=summary["step_time_s"],
            interval_s=tuple(summary["step_interval_s"]),
            rows=ROWS,
            tokens_per_row=SEQUENCE,
            mfu=summary["mfu"],
            peak_memory_bytes=summary["peak_memory_bytes"][stage],
        )


def test_longer_batches_and_another_plan(tmp_path: Path) -> None:
    result = planned(net())
    result.log_to(str(tmp_path / "run.jsonl"))
    result.train_step(tuple(torch.cat([x, x], dim=1) for x in batch(ROWS)))
    found = result.metrics()
    assert found["tokens_per_s"] == pytest.approx(found["rows_per_s"] * 2 * SEQUENCE)
    again = result.replan(Overrides(num_microbatches=2))
    (row,) = (tmp_path / "run.jsonl").read_text().splitlines()  # before the next plan's first
    assert json.loads(row)["tokens_per_s"] == pytest.approx(found["tokens_per_s"])
    again.train_step(batch(ROWS))
    found = again.metrics()
    assert found["step"] == 2
    assert found["tokens_per_s"] == pytest.approx(found["rows_per_s"] * SEQUENCE)
