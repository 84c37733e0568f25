"""Metrics of a run, of one and of four ranks, how far measured is from predicted, and loggers."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from meshwright import Overrides, ParallelModel, data_loader, progress_shown
from meshwright.executor.devices import Clock
from meshwright.executor.ranks import all_gather_object, gloo_group, launch
from meshwright.monitor import BatchSize, Monitor, Predicted
from meshwright.monitor.loggers import (
    JsonLinesLogger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    logger_for,
)
from meshwright.monitor.metrics import (
    AIMS,
    BETWEEN,
    BLOCKS,
    NAMES,
    OBSERVE_EVERY,
    TELL_AFTER,
    TERMS,
    WARM_UP,
    deviation,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import ROWS, SEQUENCE, batch, net, planned
from tests.meshwright.data import feeding
from tests.meshwright.data.feeding import PLANS, RANKS, Tokens

CPU = torch.device("cpu")


def predicted(**changes: Any) -> Predicted:
    given: dict[str, Any] = {
        "train_step_s": 0.9, "terms": dict(zip(TERMS, (0.3, 0.5, 0.1, 0.0), strict=True)),
        "step_time_s": 1.0, "interval_s": (0.8, 1.2), "rows": 8, "tokens_per_row": 6, "mfu": 0.4,
        "peak_memory_bytes": 100.0,
    }  # fmt: skip
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
    for _ in range(2):
        longer.monitor.train_step(lambda watch: torch.tensor(0.0), lambda: BatchSize(8, 96))
        longer.time.moment += 1
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
    every: list[Any] = []
    third: list[Any] = []
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
    found = run.monitor.metrics()
    assert (found["train_step_s"], found["between_s"]) == (1.0, 6.0)


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
    says = "most is off in forward and backward alike: 6.5 s, predicted 2 s (the device"
    assert says in str(found)


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


def test_predictions_are_those_of_the_ranks_stage() -> None:
    """Passes of all micro-batches, the reduction once; what is left of the step is waiting."""
    result = planned(net(), devices=4, overrides=Overrides(pp=2, dp=2, num_microbatches=4))
    summary = result.report.summary
    for rank, stage in ((1, 0), (2, 1)):
        own, row = Predicted.of(result.report, rank), result.report.stages[stage]
        passes = (4 * row["forward_s"], 4 * row["backward_s"], row["gradient_reduction_s"])
        train_step_s = summary["step_time_s"] - row["optimizer_s"]
        terms = (*passes, max(0.0, train_step_s - sum(passes)))
        assert own == Predicted(
            train_step_s=pytest.approx(train_step_s),
            terms=pytest.approx(dict(zip(TERMS, terms, strict=True))),
            step_time_s=summary["step_time_s"],
            interval_s=tuple(summary["step_interval_s"]),
            rows=ROWS,
            tokens_per_row=SEQUENCE,
            mfu=summary["mfu"],
            peak_memory_bytes=summary["peak_memory_bytes"][stage],
        )


@second_tier("metrics of a step, and of one after it, are computed by hand above")
def test_longer_batches_another_plan_and_the_norm_without_clipping(tmp_path: Path) -> None:
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
    before = [p.grad.clone() for p in again.parameters() if p.grad is not None]
    norm = again.metrics(grad_norm=True)["grad_norm"]
    after = [p.grad for p in again.parameters() if p.grad is not None]
    assert norm == pytest.approx(float(sum(g.square().sum() for g in after)) ** 0.5, rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_json_lines(tmp_path: Path) -> None:
    log = logger_for(tmp_path / "runs" / "run.jsonl")
    assert isinstance(log, JsonLinesLogger)
    log({"step": 1, "loss": 2.5})
    log({"step": 2, "loss": math.nan})
    lines = (tmp_path / "runs" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.5, None]


@pytest.mark.parametrize("to", [Path("run.json"), 3])
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


def test_writers_of_the_user_are_made_where_they_are_logged_to() -> None:
    board, run, made = Writer(), Writer(), [Writer()]
    init = WandbLogger(lambda: made.pop())
    for log in (TensorBoardLogger(board), WandbLogger(run)):
        log({"step": 7, "loss": 2.5})
    assert board.calls == [("meshwright/loss", 2.5, 7), ("flush",)]
    assert run.calls == [({"meshwright/loss": 2.5}, 7)]
    (once,) = made
    for step in (1, 2):
        init({"step": step, "loss": 0.5})
    assert not made and once.calls == [({"meshwright/loss": 0.5}, step) for step in (1, 2)]


def test_without_tensorboard_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install tensorboard"):
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


@second_tier("the real package, which takes seconds to import; loggers are functions of numbers")
def test_mlflow_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a run that is started at the first step, in its experiment, under its name."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which it refuses by default
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    log = MlflowLogger(experiment="tests", run_name="first")
    assert mlflow.active_run() is None
    for step in (1, 2):
        log({"step": float(step), "loss": 3.0 - step, "mfu": 0.5})
    run = mlflow.active_run()
    mlflow.end_run()
    log({"step": 3.0, "eval_loss": 0.25})  # to the same one
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).info.run_name == "first"
    assert client.get_experiment_by_name("tests").experiment_id == run.info.experiment_id
    history = client.get_metric_history(run.info.run_id, "meshwright.loss")
    assert [(row.step, row.value) for row in history] == [(1, 2.0), (2, 1.0)]
    assert client.get_run(run.info.run_id).data.metrics["meshwright.eval_loss"] == 0.25


def test_without_mlflow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"mlflow is not installed.*pip install mlflow-skinny"):
        MlflowLogger()


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


# --- ranks: the same loss, rates of the global batch, one log ------------------------------------

STEPS = TELL_AFTER + 1


class Said(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def watch(plan: str, folder: Path) -> list[dict[str, Any]]:
    """Of every rank its metrics, what it wrote and said; of rank 0 the log."""
    result, board, said = feeding.planned(plan), Mock(), Said()
    logger = logging.getLogger("meshwright.monitor")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    own = folder / f"{launch.rank()}.jsonl"
    result.log_to(own)
    result.log_to(TensorBoardLogger(board), every=10)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    rows = feeding.batch_of(range(ROWS))
    for step in range(STEPS):
        optimizer.zero_grad()
        result.train_step(rows)
        if step == 2 and launch.rank() == 0:
            result.metrics()  # alone
        if step == 3:
            result.metrics(grad_norm=True)
        optimizer.step()
    found = result.metrics()
    result.monitor.close()
    logger.removeHandler(said)
    logger.setLevel(logging.NOTSET)
    logged = [json.loads(line) for line in own.read_text().splitlines()] if own.exists() else []
    told, calls = str(result.monitor.told), board.add_scalar.call_args_list
    steps = [call.args[2] for call in calls if call.args[0] == "meshwright/loss"]
    seen = {"metrics": found, "logged": logged, "board": steps, "said": said.lines}
    return all_gather_object(gloo_group(), {**seen, "told": told})


@second_tier("a run of one device is measured and logged; ranks measure what a loader takes")
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_see_one_global_step_and_rank_0_alone_says_it(plan: str, tmp_path: Path) -> None:
    ranks = on_ranks(RANKS, watch, plan, tmp_path)
    of_ranks = [seen["metrics"] for seen in ranks]
    assert len({m["loss"] for m in of_ranks}) == 1 and {m["step"] for m in of_ranks} == {STEPS}
    for m in of_ranks:
        assert all(math.isfinite(x) for x in m.values())
        assert m["step_time_s"] == pytest.approx(m["train_step_s"] + m["between_s"])
        assert m["rows_per_s"] == pytest.approx(ROWS / m["step_time_s"])
        assert m["tokens_per_s"] == pytest.approx(ROWS * SEQUENCE / m["step_time_s"])
        assert m["peak_memory_bytes"] > 1e6
        assert {f"predicted_{n}" for n in ("between_s", "step_time_s", *TERMS)} <= m.keys()
    first, *others = ranks
    logged = first["logged"]
    assert [row["loss"] for row in logged][:1] == pytest.approx(feeding.plain_losses([range(ROWS)]))
    assert len({frozenset(row.keys() - {*TERMS, "grad_norm"}) for row in logged}) == 1
    for row in logged[5:20]:
        assert sum(row[name] for name in TERMS) == pytest.approx(row["train_step_s"])
    assert [row["step"] for row in logged] == [*range(1, STEPS + 1)]
    assert first["board"] == [10, 20]
    assert "grad_norm" in logged[3] and "grad_norm" not in logged[2]
    assert [line for line in first["said"] if line == first["told"]] == [first["told"]]
    for seen in others:
        assert seen["logged"] == seen["board"] == seen["said"] == []
        assert "after 20 steps: " in seen["told"]


def wait_for_input() -> None:
    """Steps whose rows a loader of each rank gives: its time is between them."""
    result = feeding.planned("dp2×tp2")
    found = []
    for rows in data_loader(Tokens(size=2 * ROWS), result, shuffle=False):
        result.train_step(rows, local=True)
        found.append(result.metrics())
    assert [m["step"] for m in found] == [1, 2]
    assert 0 < found[1]["input_s"] < found[1]["between_s"]
    assert found[1]["rows_per_s"] == pytest.approx(ROWS / found[1]["step_time_s"])


def test_what_a_loader_takes_is_between_the_steps() -> None:
    on_ranks(RANKS, wait_for_input)


def move_bytes(folder: Path) -> None:
    """Rank 0 says what a checkpoint's saving and loading has done; steps go on counting."""
    result, said = feeding.planned("dp4"), Said()
    progress = logging.getLogger("meshwright.progress")
    progress.addHandler(said)
    progress.setLevel(logging.DEBUG)
    rows = feeding.batch_of(range(ROWS))
    for _ in range(3):
        result.train_step(rows)
    result.save_checkpoint(folder / "checkpoint")
    other = feeding.planned("pp4")
    other.load_checkpoint(folder / "checkpoint")
    progress.removeHandler(said)
    progress.setLevel(logging.NOTSET)
    with progress_shown():
        other.load_weights(folder / "checkpoint")
    other.train_step(rows)
    assert other.metrics()["step"] == 4
    for what in ("writing", "reading"):
        lines = [line for line in said.lines if line.startswith(f"{what} a checkpoint: ")]
        if launch.rank():
            assert not lines
            continue
        moved, whose = lines[-1].removeprefix(f"{what} a checkpoint: ").split(" (")
        done, total = moved.split(" of ")
        assert done == total and whose == "rank 0 of 4)"


@second_tier("bytes moved are shown to their end on one device (test_terminal)")
def test_bytes_moved_are_said_by_rank_0_and_steps_go_on_counting(tmp_path: Path) -> None:
    on_ranks(RANKS, move_bytes, tmp_path)
