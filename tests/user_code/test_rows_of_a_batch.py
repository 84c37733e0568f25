"""Losses by what they make of a batch's rows: exact in micro-batches and on ranks, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, InfeasibleError, OverrideError, Overrides, auto_parallelize
from meshwright.planner.plan.plan import PlanError
from meshwright.planner.tracing.trace import TraceError
from tests.helpers.ranks import on_ranks
from tests.helpers.row_losses import EXACT, LENGTH, MEET, WIDTH, Loss, Tensor
from tests.helpers.row_losses import ROWS as SAMPLE_ROWS
from tests.helpers.tiers import second_tier, tiered
from tests.parity.parity_reference import difference

ROWS, RANKS, TOLERANCE = 8, 2, 2e-5
CONSENT = 'rows_meet="per_microbatch"'
LAYOUTS: Mapping[str, Overrides] = {
    "dp2": Overrides(dp=2, tp=1, pp=1, num_microbatches=1),
    "dp2 × 2": Overrides(dp=2, tp=1, pp=1, num_microbatches=2),
    "tp2 × 4": Overrides(dp=1, tp=2, pp=1, num_microbatches=4),
    "pp2 × 4": Overrides(dp=1, tp=1, pp=2, num_microbatches=4),
}
# of losses in which rows meet: as many micro-batches as may be
TOGETHER: Mapping[str, Overrides] = {
    "dp2": Overrides(dp=2, tp=1, pp=1),
    "pp2": Overrides(dp=1, tp=1, pp=2),
}
# whose labels or masks can keep rows from counting
FEWER = (
    "cross-entropy", "class weights", "masked mean", "masked mean, at least 1", "sum and count",
)  # fmt: skip
# whose labels could, but whose loss is divided by the number of rows
BY_ROWS = tuple(
    f"cross-entropy by {what}" for what in ("rows", "a tensor of rows", "a root of rows")
)
MEANS = ("mean", "infonce")  # in which every row counts
FIXED = ("row by row", "row by number")  # a loop over rows is another program for each number
NAMES = [n for n in (*EXACT, "sum and count", "number of items") if n not in FIXED]


class Tokens(nn.Module):
    """Two layers and a loss. Half of the rows have an empty mask, or no label at all."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.loss = loss

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.loss(x, mask, labels)


def summed(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Σ losses and the number of labels: (sum, count)."""
    found = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return found, (labels != -100).sum()


class Logits(Tokens):
    """The output alone: `loss_fn` knows the labels."""

    def __init__(self) -> None:
        super().__init__(EXACT["mean"])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Items(Logits):
    """Transformers' way: a sum divided by the number of labels of the global batch, an input."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return summed(super().forward(x), labels)[0] / num_items_in_batch


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    mask = torch.rand(ROWS, LENGTH) > 0.4
    mask[: ROWS // 2] = False
    labels = torch.randint(WIDTH, (ROWS, LENGTH)).masked_fill(~mask, -100)
    return torch.randn(ROWS, LENGTH, WIDTH), mask, labels


def batch_of(name: str) -> Any:
    x, mask, labels = tensors()
    if name == "sum and count":
        return x, labels
    if name == "number of items":
        return {"x": x, "labels": labels, "num_items_in_batch": (labels != -100).sum()}
    if name in ("last token", "masked by row"):  # which no empty row has
        return x, torch.ones_like(mask), labels.clamp(min=0)
    return x, mask, labels


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "sum and count":
        return Logits()
    if name == "number of items":
        return Items()
    return Tokens(EXACT[name] if name in EXACT else MEET[name][0])


def last(batch: Any, rows: int) -> Any:
    """The last rows of a batch, which are not empty."""
    return {**batch} if isinstance(batch, Mapping) else tuple(x[-rows:] for x in batch)


def plain(name: str, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients on the whole batch."""
    model = built(name)
    if name == "sum and count":
        total, count = summed(model(batch[0]), batch[1])
        loss = total / count
    else:
        loss = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def exact(
    name: str, overrides: Overrides, ranks: int = 1, rows: int = ROWS, **options: Any
) -> None:
    """A step and an evaluation on so many rows are those of one device on all of them."""
    result = auto_parallelize(
        built(name),
        Cluster.local(ranks, measure=False),
        example_inputs=batch_of(name),
        global_batch_size=ROWS,
        loss_fn=summed if name == "sum and count" else None,
        precision="fp32",
        overrides=overrides,
        **options,
    )
    batch = last(batch_of(name), rows)
    loss, gradients = plain(name, batch)
    near = partial(pytest.approx, rel=TOLERANCE, abs=TOLERANCE)
    assert float(result.eval_step(batch)) == near(loss)
    assert float(result.train_step(batch).detach()) == near(loss)
    off, where = difference(result.runtime.full_gradients(), gradients)
    assert off < TOLERANCE, where


# --- exact ----------------------------------------------------------------------------------------

PARTS = [(name, m) for name in NAMES for m in (2, 8)]
OTHERS = "one loss of each kind is run; costmodel/sharding tells of each by what it is divided"


# one of each way to divide a sum: by elements, rows, a count, a weight, an input, not at all
WAYS = (
    "mean", "cross-entropy by a tensor of rows", "masked mean, at least 1",
    "by weights of the batch", "per position", "number of items",
)  # fmt: skip


def in_first_tier(cell: tuple[str, int]) -> bool:
    return cell[0] in WAYS and cell[1] == (8 if cell[0] in FEWER else 2)


@pytest.mark.parametrize(
    "cell", tiered(PARTS, in_first_tier, OTHERS, lambda cell: f"{cell[0]}-{cell[1]}")
)
def test_micro_batches_on_one_device(cell: tuple[str, int]) -> None:
    exact(cell[0], Overrides(num_microbatches=cell[1]))


RUNS = [(name, layout, ROWS) for name in NAMES for layout in LAYOUTS]
RUNS += [(name, layout, ROWS) for name in MEET for layout in TOGETHER]
RUNS += [(name, layout, 3) for name in FEWER for layout in LAYOUTS]
RUNS += [(name, layout, 6) for name in MEANS for layout in TOGETHER]
# each layout with sums, means and counts of rows; rows that meet; fewer rows
FIRST = (
    ("mean", "dp2", ROWS), ("cross-entropy", "dp2 × 2", ROWS), ("masked mean", "dp2", ROWS),
    ("by the batch's rows", "dp2 × 2", ROWS), ("number of items", "tp2 × 4", ROWS),
    ("per position", "dp2", ROWS), ("sum and count", "pp2 × 4", ROWS), ("infonce", "dp2", ROWS),
    ("cross-entropy", "dp2 × 2", 3), ("masked mean", "pp2 × 4", 3), ("mean", "dp2", 6),
)  # fmt: skip


@pytest.mark.parametrize(
    "run",
    tiered(
        RUNS,
        lambda run: run in FIRST,
        "every layout has losses of each kind, and every loss is exact on one device",
        lambda run: ", ".join(map(str, run)),
    ),
)
def test_on_ranks(run: tuple[str, str, int]) -> None:
    name, layout, rows = run
    of = TOGETHER if name in MEET or rows == 6 else LAYOUTS
    on_ranks(RANKS, exact, name, of[layout], RANKS, rows)


# --- refused --------------------------------------------------------------------------------------


MEETING = "costmodel/sharding tells of each loss where rows meet; here is one of each reason"


@pytest.mark.parametrize("name", tiered(MEET, lambda n: n in ("infonce", "halves"), MEETING))
def test_rows_that_meet_keep_to_one_micro_batch(name: str) -> None:
    """Chosen by the search, or refused where several are asked for; with consent they are not."""
    exact(name, Overrides())
    with pytest.raises(OverrideError) as refused:
        exact(name, Overrides(num_microbatches=2))
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


@second_tier("refusals of several micro-batches name the consent")
def test_what_does_not_fit_in_one_micro_batch_names_the_consent() -> None:
    with torch.device("meta"):
        x, mask = torch.zeros(SAMPLE_ROWS, 1 << 14, WIDTH), torch.zeros(SAMPLE_ROWS, 1) > 0
        labels, model = torch.zeros(SAMPLE_ROWS, 1, dtype=torch.int64), built("infonce")
    with pytest.raises(InfeasibleError) as refused:
        auto_parallelize(
            model,
            Cluster.from_catalog("v100-16gb", num_nodes=1),
            example_inputs=(x, mask, labels),
            global_batch_size=1 << 18,
            precision="fp32",
        )
    assert CONSENT in str(refused.value)


def test_consent_is_a_word() -> None:
    with pytest.raises(ValueError, match="rows_meet='always'; legal: exact, per_microbatch"):
        exact("mean", Overrides(), rows_meet="always")


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


LAST = [(name, m, rows) for name in FEWER for m in (2, 8) for rows in (1, 3)]


@pytest.mark.parametrize(
    "cell",
    tiered(
        LAST,
        lambda c: c[1:] == (2, 3) and c[0] in ("class weights", "masked mean", "sum and count"),
        "a last batch of three rows in two micro-batches: weights, a mask, a count",
        lambda c: f"{c[0]}, {c[2]} rows in {c[1]}",
    ),
)
def test_the_last_smaller_batch(cell: tuple[str, int, int]) -> None:
    """Rows that fill it up count nothing, in the loss and in gradients."""
    name, microbatches, rows = cell
    exact(name, Overrides(num_microbatches=microbatches), rows=rows)


WHOLE = ("mean", "sum", "mean of row sums", "infonce", *BY_ROWS)


@pytest.mark.parametrize(
    "name",
    tiered(
        WHOLE,
        lambda n: n in ("mean of row sums", "infonce", BY_ROWS[1]),
        "a mean of rows, rows that meet, and a number of rows",
    ),
)
def test_the_last_smaller_batch_by_itself(name: str) -> None:
    """Where every row counts, the model is lowered for so many."""
    exact(name, Overrides() if name in MEET else Overrides(num_microbatches=4), rows=6)


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
