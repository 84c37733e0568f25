"""Losses by what they make of a batch's rows: exact in micro-batches and on ranks, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, InfeasibleError, OverrideError, Overrides, auto_parallelize
from meshwright.planner.plan.plan import PlanError
from meshwright.planner.tracing.trace import TraceError
from tests.helpers.launching import Results, results_of
from tests.helpers.row_losses import MEET, ROWS, WIDTH
from tests.user_code.row_runs import (
    ALONE,
    BY_ROWS,
    EXACT_NAMES,
    FEWER,
    LAYOUTS,
    MEANS,
    RANKS,
    TOGETHER,
    Logits,
    batch_of,
    built,
    run,
)

TOLERANCE = 2e-5
CONSENT = 'rows_meet="per_microbatch"'


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ALONE)
@pytest.mark.parametrize("name", EXACT_NAMES)
def test_micro_batches_on_one_device(name: str, layout: str) -> None:
    found = run(name, ALONE[layout])
    assert max(found.values()) < TOLERANCE, found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = Path(__file__).with_name("row_worker.py")
    return results_of(worker, tmp_path_factory.mktemp("rows"), ranks=RANKS, timeout_s=580)


RUNS = [f"{name}, {layout}" for name in EXACT_NAMES for layout in LAYOUTS]
RUNS += [f"{name}, {layout}" for name in MEET for layout in TOGETHER]
RUNS += [f"{name}, 3 rows, {layout}" for name in FEWER for layout in LAYOUTS]
RUNS += [f"{name}, 6 rows, {layout}" for name in MEANS for layout in TOGETHER]


@pytest.mark.parametrize("key", RUNS)
def test_on_ranks(launched: Results, key: str) -> None:
    found = launched[key]
    assert "failed" not in found, found["failed"]
    assert max(found.values()) < TOLERANCE, found


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEET)
def test_rows_that_meet_keep_to_one_micro_batch(name: str) -> None:
    """Chosen by the search, or refused where several are asked for; with consent they are not."""
    found = run(name, Overrides())
    assert max(found.values()) < TOLERANCE, found
    with pytest.raises(OverrideError) as refused:
        run(name, Overrides(num_microbatches=2))
    assert CONSENT in str(refused.value) and ".py:" in str(refused.value)


def test_consent_is_to_rows_that_meet_within_micro_batches() -> None:
    model, loss = built("infonce"), 0.0
    x, mask, labels = batch_of("infonce")
    for k in range(0, len(x), 4):
        loss += float(model(x[k : k + 4], mask[k : k + 4], labels[k : k + 4])) / 2
    result = auto_parallelize(
        built("infonce"),
        Cluster.local(1, measure=False),
        example_inputs=(x, mask, labels),
        global_batch_size=len(x),
        precision="fp32",
        overrides=Overrides(num_microbatches=2),
        rows_meet="per_microbatch",
    )
    assert float(result.train_step((x, mask, labels))) == pytest.approx(loss)
    assert any("each of 2 micro-batches by itself" in note for note in result.report.notes)
    with pytest.raises(PlanError, match="rows of the batch meet in") as refused:
        auto_parallelize(
            built("infonce"),
            Cluster.local(1, measure=False),
            example_inputs=(x, mask, labels),
            global_batch_size=len(x),
            precision="fp32",
            plan=result.plan,
        )
    assert CONSENT in str(refused.value)


def test_what_does_not_fit_in_one_micro_batch_names_the_consent() -> None:
    with torch.device("meta"):
        batch = torch.zeros(ROWS, 1 << 14, WIDTH), torch.zeros(ROWS, 1, dtype=torch.bool)
        model = built("infonce")
    with pytest.raises(InfeasibleError) as refused:
        auto_parallelize(
            model,
            Cluster.from_catalog("v100-16gb", num_nodes=1),
            example_inputs=(*batch, torch.zeros(ROWS, 1, dtype=torch.int64, device="meta")),
            global_batch_size=1 << 18,
            precision="fp32",
        )
    assert CONSENT in str(refused.value)


def test_consent_is_a_word() -> None:
    with pytest.raises(ValueError, match="rows_meet='always'; legal: exact, per_microbatch"):
        run("mean", Overrides(), rows_meet="always")


class Two(Logits):
    """A model that gives two scalars, which may be anything."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x).square().sum(), (labels != -100).sum()


def test_two_scalars_of_a_model_are_told_apart() -> None:
    x, _, labels = batch_of("mean")
    options = {"example_inputs": (x, labels), "global_batch_size": len(x), "precision": "fp32"}
    cluster = Cluster.local(1, measure=False)
    with pytest.raises(TraceError, match="loss_fn=lambda output: output for the other"):
        auto_parallelize(Two(), cluster, **options)
    several, model = Overrides(num_microbatches=4), Two()
    total, count = (float(found) for found in model(x, labels))
    for loss_fn, loss in ((lambda out: out, total / count), (lambda out: out[0], total)):
        result = auto_parallelize(model, cluster, loss_fn=loss_fn, overrides=several, **options)
        assert float(result.train_step((x, labels))) == pytest.approx(loss, rel=1e-5)


# --- smaller batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layout", ALONE)
@pytest.mark.parametrize("name", FEWER)
def test_the_last_smaller_batch(name: str, rows: int, layout: str) -> None:
    """Rows that fill it up count nothing, in the loss and in gradients."""
    found = run(name, ALONE[layout], rows=rows)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", ["mean", "sum", "mean of row sums", "infonce", *BY_ROWS])
def test_the_last_smaller_batch_by_itself(name: str) -> None:
    """Where every row counts, the model is lowered for so many."""
    several = Overrides() if name in MEET else Overrides(num_microbatches=4)
    found = run(name, several, rows=6)
    assert max(found.values()) < TOLERANCE, found


def test_a_smaller_batch_of_probabilities() -> None:
    """Targets that are no class numbers can't be ignored: every row counts."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 4)
    x, targets = torch.randn(8, WIDTH), torch.rand(8, 4).softmax(1)
    result = auto_parallelize(
        model,
        Cluster.local(1, measure=False),
        example_inputs=(x, targets),
        global_batch_size=8,
        loss_fn=F.cross_entropy,
        precision="fp32",
    )
    wanted = float(F.cross_entropy(model(x[:6]), targets[:6]).detach())
    assert float(result.train_step((x[:6], targets[:6]))) == pytest.approx(wanted, rel=1e-5)
