"""A run that is stopped goes on, under any plan and number of ranks, as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import fit
from meshwright.data.order import Order
from meshwright.profiles.inputs import MeshwrightError
from tests.helpers.launching import Results, results_of
from tests.helpers.tiny import loss, net
from tests.meshwright.data.feeding import (
    RANKS,
    ROWS,
    SAMPLES,
    Tokens,
    batch_of,
    plain_losses,
    planned,
)
from tests.meshwright.training.fit_worker import SEED, STEPS, STOPPED_AT, run

MORE = 3  # steps on one rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def launched(folder: Path) -> Results:
    worker = Path(__file__).with_name("fit_worker.py")
    return results_of(worker, folder, ranks=RANKS, timeout_s=300)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Epoch after epoch on one device."""
    order = Order(size=SAMPLES, rows=ROWS, shuffle=True, seed=SEED, drop_last=False)
    batches = [batch.samples for epoch in range(3) for batch in order.batches(epoch)]
    return plain_losses(batches[: STEPS + MORE])


def test_a_stopped_run_goes_on_at_the_same_sample(launched: Results, expected: list[float]) -> None:
    """SIGTERM on one rank stops all after the next step; under another plan the rest follows."""
    found = launched["stopped"]
    assert found["ended"] == ["signal", "steps"]
    assert found["steps"] == [STOPPED_AT + 1, STEPS]
    assert found["logged"] == [[1, 2, 3], [4, 5, 6]]
    assert found["losses"] == pytest.approx(expected[:STEPS], rel=1e-5)


def test_it_goes_on_on_one_rank(launched: Results, folder: Path, expected: list[float]) -> None:
    assert launched["stopped"]
    done, losses = run(planned(ranks=1), folder / "stopped", steps=STEPS + MORE)
    assert done.steps == STEPS + MORE and sorted(losses) == [7, 8, 9]
    assert [losses[k] for k in (7, 8, 9)] == pytest.approx(expected[STEPS:], rel=1e-5)


def test_a_signal_saves_and_the_run_goes_on(launched: Results) -> None:
    found = launched["saved"]
    assert (found["ended"], found["steps"]) == ("data", 3)
    assert found["kept"] == ["step-00000003"]


def test_batches_that_end_on_one_rank_are_told_on_all(launched: Results) -> None:
    assert "fit: data: the batches ended on ranks [2] before" in launched["unequal"]["says"]


def test_patience_ends_a_run(launched: Results) -> None:
    found = launched["patience"]
    assert (found["ended"], found["steps"]) == ("patience", 8)
    assert found["eval"] > 0


# --- on one device --------------------------------------------------------------------------------


def sgd(result: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(result.parameters(), lr=0.5)


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


def test_batches_of_ones_own_are_global(expected: list[float]) -> None:
    order = Order(size=SAMPLES, rows=ROWS, shuffle=True, seed=SEED, drop_last=False)
    data = Tokens()
    batches = [
        tuple(torch.stack(x) for x in zip(*(data[int(n)] for n in b.samples), strict=True))
        for b in order.batches(0)
    ]
    done = fit(planned(ranks=1), batches, optimizer=sgd, max_grad_norm=None)
    assert done.loss == pytest.approx(expected[2], rel=1e-5)


def test_a_run_over_an_epoch_is_done_when_the_epoch_is(tmp_path: Path) -> None:
    for _ in range(2):
        done = fit(planned(ranks=1), Tokens(), optimizer=sgd, folder=tmp_path)
        assert (done.ended, done.steps) == ("data", 3)
    assert done.loss is None  # of the second: nothing was left to train


def test_batches_that_come_once_are_not_looked_into(tmp_path: Path) -> None:
    planning = {"global_batch_size": ROWS, "loss_fn": loss}
    with pytest.raises(MeshwrightError, match="which gives each of them once"):
        fit(net(), iter([batch_of(range(ROWS))]), planning=planning, optimizer=sgd)


def test_data_without_a_state_begin_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [batch_of(range(ROWS))] * 2
    for steps in (1, 2):
        done = fit(planned(ranks=1), batches, optimizer=sgd, folder=tmp_path, steps=steps)
        assert done.steps == steps
    assert "the data begin anew: list has no state_dict()" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": 0}, "fit: steps"),
        ({"keep": 0}, "fit: keep"),
        ({"planning": {"global_batch_size": 8}}, "with a model that has a plan"),
        ({"evaluation": iter([]), "evaluate_every": 1}, "0 batches count"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(MeshwrightError, match=says):
        fit(planned(ranks=1), Tokens(), optimizer=sgd, **given)


def test_a_run_is_not_begun_over_another(tmp_path: Path) -> None:
    result = planned(ranks=1)
    fit(result, Tokens(), optimizer=sgd, folder=tmp_path, steps=2)
    with pytest.raises(MeshwrightError, match="holds checkpoints of 1 steps, the last 2"):
        fit(result, Tokens(), optimizer=sgd, folder=tmp_path, resume=False)
    with pytest.raises(MeshwrightError, match="has no global_batch_size"):
        fit(net(), Tokens(), optimizer=sgd)
