"""Outputs, data sets and generated tokens under the training layout, against one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, ParallelModel, auto_parallelize
from meshwright.executor.errors import StateError
from tests.helpers.launching import Results, results_of
from tests.meshwright.evaluation_worker import CELLS
from tests.user_code.user_runs import RANKS, ROWS

LANGUAGE = [f"{name} {layout}" for name, (_, layouts) in CELLS.items() for layout in layouts]
IMAGES = ("images dp2×tp2", "images pp2×tp2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = Path(__file__).with_name("evaluation_worker.py")
    return results_of(worker, tmp_path_factory.mktemp("evaluation"), ranks=RANKS, timeout_s=580)


@pytest.mark.parametrize("cell", LANGUAGE)
@pytest.mark.parametrize("what", ["logits", "loss", "fewer rows, no labels", "own rows"])
def test_outputs_are_those_of_one_device(found: Results, cell: str, what: str) -> None:
    assert found[cell][what] < 2e-5


@pytest.mark.parametrize("cell", LANGUAGE)
def test_a_data_set_is_a_mean_over_its_targets(found: Results, cell: str) -> None:
    of = found[cell]
    assert of["data set"] < 1e-5
    assert of["perplexity"] < 1e-5
    assert of["counted"] == [True, ROWS + 3, 2]
    assert "ended on ranks [2]" in of["ended"]


@pytest.mark.parametrize("cell", LANGUAGE)
def test_tokens_are_those_of_transformers(found: Results, cell: str) -> None:
    assert found[cell]["tokens"]
    assert found[cell]["no loss"]
    assert "generate: ranks [2, 3] give other prompts" in found[cell]["other prompts"]


@pytest.mark.parametrize("cell", IMAGES)
def test_batch_norm_reads_its_running_statistics(found: Results, cell: str) -> None:
    of = found[cell]
    assert max(of[what] for what in ("scores", "pooled", "eval_step", "data set")) < 1e-5
    assert of["unread"]
    assert "generate: the model makes" in of["language"]


# --- one device -----------------------------------------------------------------------------------


class Doubled(nn.Module):
    """Twice as much where it trains, if it is told so."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.layer, self.twice = nn.Linear(4, 4), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2 if self.training and self.twice else 1)


def on_one(loss_fn: Callable[..., Any], *, twice: bool = False) -> ParallelModel:
    torch.manual_seed(0)
    return auto_parallelize(
        Doubled(twice=twice),
        Cluster.local(1, measure=False),
        example_inputs=BATCH,
        global_batch_size=ROWS,
        loss_fn=loss_fn,
        precision="fp32",
    )


BATCH = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
CALLS: dict[str, Callable[[ParallelModel], Any]] = {
    "eval_step": lambda r: r.eval_step(BATCH),
    "forward": lambda r: r.forward(BATCH),
    "evaluate": lambda r: r.evaluate([BATCH]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_forward_of_another_course_in_evaluation_is_refused(call: str) -> None:
    with pytest.raises(StateError, match=r"the first difference is .*mul.* in .* mode"):
        CALLS[call](on_one(F.mse_loss, twice=True))


def test_statistics_of_a_batch_are_not_those_of_its_parts() -> None:
    """A norm without running statistics takes those of the whole batch, or is not evaluated."""

    def planned(num_microbatches: int) -> ParallelModel:
        torch.manual_seed(0)
        return auto_parallelize(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
            Cluster.local(1, measure=False),
            example_inputs=BATCH,
            global_batch_size=ROWS,
            loss_fn=F.mse_loss,
            precision="fp32",
            overrides=Overrides(num_microbatches=num_microbatches),
        )

    result = planned(1)
    with torch.no_grad():
        wanted = F.mse_loss(result.runtime.model.eval()(BATCH[0]), BATCH[1])
    assert float(result.eval_step(BATCH)) == pytest.approx(float(wanted), rel=1e-6)
    for call in CALLS.values():
        with pytest.raises(StateError, match=r"no running statistics.*num_microbatches=1"):
            call(planned(2))


def test_rows_weigh_batches_of_a_mean() -> None:
    result = on_one(F.mse_loss)
    data = [BATCH, (BATCH[0][:3], BATCH[1][:3])]
    with torch.no_grad():
        losses = [float(F.mse_loss(result.runtime.model(x), y)) for x, y in data]
    mean = (losses[0] * ROWS + losses[1] * 3) / (ROWS + 3)
    found = result.evaluate(data)
    assert found.loss == pytest.approx(mean, rel=1e-6)
    assert (found.counted, found.perplexity) == (ROWS + 3, None)


def test_a_sum_over_a_count_weighs_by_the_count() -> None:
    def masked(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep = y > 0
        return ((x - y).square() * keep).sum(), keep.sum()

    result = on_one(masked)
    data = [BATCH, (BATCH[0].flip(1), BATCH[1].abs())]
    with torch.no_grad():
        parts = [masked(result.runtime.model(x), y) for x, y in data]
    mean = float(sum(s for s, _ in parts) / sum(n for _, n in parts))
    assert result.evaluate(data).loss == pytest.approx(mean, rel=1e-6)


def test_a_loss_that_does_not_say_what_it_counts_is_weighed_by_hand() -> None:
    result = on_one(lambda x, y: (x - y).square().sum())
    with pytest.raises(StateError, match=r"evaluate: the loss ends in .*weigh="):
        result.evaluate([BATCH])
    assert result.evaluate([BATCH], weigh=lambda batch: 2.0).counted == 2.0


def test_no_batches_have_no_mean() -> None:
    with pytest.raises(StateError, match="0 batches count 0"):
        on_one(F.mse_loss).evaluate([])
