"""Losses by what they make of a batch's rows: exact in micro-batches and on ranks, or refused."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright
from meshwright import Cluster, Overrides
from meshwright.planner.plan.plan import PlanError
from meshwright.planner.tracing.trace import TraceError
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.row_losses import EXACT, LENGTH, MEET, WIDTH, Loss, Tensor
from tests.helpers.row_losses import ROWS as SAMPLE_ROWS
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import CASES
from tests.parity.parity_reference import TOLERANCE as HALVES
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
BY_ROWS = [f"cross-entropy by {what}" for what in ("rows", "a tensor of rows", "a root of rows")]
BY_ROWS += ["rows by how many they are", "cross-entropy of rows by how many they are"]
WHOLE = ("mean", "sum", "mean of row sums", *BY_ROWS)  # in which every row counts
FIXED = ("row by row", "row by number")  # a loop over rows is another program for each number
NAMES = [n for n in (*EXACT, "sum and count", "number of items") if n not in FIXED]


class Tokens(nn.Module):
    """Two layers and a loss. Half of the rows have an empty mask, or no label at all."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.loss = loss

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.hidden(x), mask, labels)

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def summed(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Σ losses and the number of labels: (sum, count)."""
    found = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return found, (labels != -100).sum()


class Logits(Tokens):
    """The output alone: `loss_fn` knows the labels."""

    def __init__(self) -> None:
        super().__init__(EXACT["mean"])

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)


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
    name: str, overrides: Overrides, ranks: int = 1, rows: Sequence[int] = (ROWS,), **options: Any
) -> None:
    """Steps and evaluations on so many rows are those of one device on all of them."""
    loss_fn = summed if name == "sum and count" else None
    options |= {"example_inputs": batch_of(name), "loss_fn": loss_fn, "overrides": overrides}
    result = tiny.planned(built(name), ranks, **options)
    for count in rows:
        batch = last(batch_of(name), count)
        loss, gradients = plain(name, batch)
        near = partial(pytest.approx, rel=TOLERANCE, abs=TOLERANCE)
        for p in result.parameters():
            p.grad = None
        assert float(result.eval_step(batch)) == near(loss)
        assert float(result.train_step(batch).detach()) == near(loss)
        off, where = difference(result.runtime.full_gradients(), gradients)
        assert off < TOLERANCE, where


# --- exact ----------------------------------------------------------------------------------------

OTHERS = "one loss of each kind is run; costmodel/sharding tells of each by what it is divided"
# how a sum is divided: by a count, a weight; elements, rows, an input and none are run on ranks
WAYS = {
    ("masked mean, at least 1", 8), ("by weights of the batch", 2),
    ("clamped where some overflows", 2),
}  # fmt: skip


CELLS = [(name, m) for name in NAMES for m in (2, 8)]


@pytest.mark.parametrize(
    "cell", tiered(CELLS, WAYS.__contains__, OTHERS, lambda c: f"{c[0]}-{c[1]}")
)
def test_micro_batches_on_one_device(cell: tuple[str, int]) -> None:
    """Of the last, smaller batch, too: rows that fill it up count nothing, in the loss and in
    gradients; where every row counts, the model is lowered for so many."""
    name, m = cell
    smaller = (3, 1) if name in FEWER else (6,) if name in WHOLE and m == 2 else ()
    exact(name, Overrides(num_microbatches=m), rows=(ROWS, *smaller))


RUNS = [(name, layout) for name in NAMES for layout in LAYOUTS]
RUNS += [(name, layout) for name in MEET for layout in TOGETHER]
# each layout with sums, means and counts of rows; rows that meet
FIRST = {
    ("mean", "dp2"), ("cross-entropy", "dp2 × 2"), ("masked mean", "pp2 × 4"),
    ("number of items", "tp2 × 4"), ("per position", "dp2"),
    ("rows by how many they are", "dp2 × 2"), ("sum and count", "pp2 × 4"), ("infonce", "dp2"),
}  # fmt: skip


@pytest.mark.parametrize("run", tiered(RUNS, FIRST.__contains__, OTHERS, ", ".join))
def test_on_ranks(run: tuple[str, str]) -> None:
    name, layout = run
    whole = name == "infonce" or run == ("mean", "dp2")
    smaller = (3,) if name in FEWER else (6,) if whole else ()
    overrides = (TOGETHER if name in MEET else LAYOUTS)[layout]
    on_ranks(RANKS, exact, name, overrides, RANKS, (ROWS, *smaller))


def t5_in_halves(overrides: Overrides, ranks: int = 1) -> tuple[float, dict[str, Tensor], bool]:
    """Loss and gradients of a step of T5 in fp16, and whether the report tells of its clamps."""
    case = CASES["t5"]
    options = {"example_inputs": case.batch(ROWS, 0), "precision": "fp16", "overrides": overrides}
    result = tiny.planned(case.model(), ranks, loss_fn=None, **options)
    loss = float(result.train_step(case.batch(ROWS, 0)))
    told = any("numbers that are not finite" in note for note in result.report.notes)
    return loss, result.runtime.full_gradients(), told


@second_tier("clamps behind any(isinf) are among the losses of micro-batches on one device")
def test_clamps_of_t5_in_fp16_keep_no_batch_together() -> None:
    one, wanted, told = t5_in_halves(Overrides(num_microbatches=1))
    assert not told
    loss, found, told = on_ranks(RANKS, t5_in_halves, LAYOUTS["pp2 × 4"], RANKS)
    assert told
    assert loss == pytest.approx(one, rel=HALVES["fp16"])
    off, where = difference(found, wanted, norm=2)
    assert off < HALVES["fp16"], where


# --- refused --------------------------------------------------------------------------------------


MEETING = "costmodel/sharding tells of each loss where rows meet; one stays"


@pytest.mark.parametrize("name", tiered(MEET, ("infonce").__eq__, MEETING))
def test_rows_that_meet_keep_to_one_micro_batch(name: str) -> None:
    """Chosen by the search, or refused where several are asked for; with consent they are not."""
    exact(name, Overrides(), rows=(ROWS, 6) if name == "infonce" else (ROWS,))
    with pytest.raises(meshwright.OverrideError) as refused:
        exact(name, Overrides(num_microbatches=2))
    assert CONSENT in str(refused.value) and ".py:" in str(refused.value)


def test_consent_is_to_rows_that_meet_within_micro_batches() -> None:
    batch = batch_of("infonce")
    halves = zip(*(x.chunk(2) for x in batch), strict=True)
    loss = sum(float(built("infonce")(*half)) for half in halves) / 2
    planned = partial(tiny.planned, built("infonce"), example_inputs=batch, loss_fn=None)
    result = planned(overrides=Overrides(num_microbatches=2), rows_meet="per_microbatch")
    assert float(result.train_step(batch)) == pytest.approx(loss)
    assert any("each of 2 micro-batches by itself" in note for note in result.report.notes)
    with pytest.raises(PlanError, match="rows of the batch meet in") as refused:
        planned(plan=result.plan)
    assert CONSENT in str(refused.value)


@second_tier("refusals of several micro-batches name the consent")
def test_what_does_not_fit_in_one_micro_batch_names_the_consent() -> None:
    with torch.device("meta"):
        x, mask = torch.zeros(SAMPLE_ROWS, 1 << 14, WIDTH), torch.zeros(SAMPLE_ROWS, 1) > 0
        labels, model = torch.zeros(SAMPLE_ROWS, 1, dtype=torch.int64), built("infonce")
    given = {"example_inputs": (x, mask, labels), "global_batch_size": 1 << 18, "loss_fn": None}
    with pytest.raises(meshwright.InfeasibleError) as refused:
        tiny.planned(model, cluster=Cluster.from_catalog("v100-16gb", num_nodes=1), **given)
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
    options = {"example_inputs": (x, labels)}
    with pytest.raises(TraceError, match="loss_fn=lambda output: output for the other"):
        tiny.planned(Two(), loss_fn=None, **options)
    several, model = Overrides(num_microbatches=4), Two()
    total, count = (float(found) for found in model(x, labels))
    for loss_fn, loss in ((lambda out: out, total / count), (lambda out: out[0], total)):
        result = tiny.planned(model, loss_fn=loss_fn, overrides=several, **options)
        assert float(result.train_step((x, labels))) == pytest.approx(loss, rel=1e-5)


def test_a_smaller_batch_of_probabilities() -> None:
    """Targets that are no class numbers can't be ignored: every row counts."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 4)
    x, targets = torch.randn(8, WIDTH), torch.rand(8, 4).softmax(1)
    result = tiny.planned(model, example_inputs=(x, targets), loss_fn=F.cross_entropy)
    wanted = float(F.cross_entropy(model(x[:6]), targets[:6]).detach())
    assert float(result.train_step((x[:6], targets[:6]))) == pytest.approx(wanted, rel=1e-5)


# --- batch norms ----------------------------------------------------------------------------------


def normed(norm: type[nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the state of a net with a batch norm on two data ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.Flatten(), nn.Linear(4 * 36, 3))
    x, y = torch.randn(ROWS, 3, 8, 8), torch.arange(ROWS) % 3
    result = tiny.planned(
        net, cluster=Cluster.local(RANKS, measure=False), example_inputs=(x, y),
        global_batch_size=ROWS, loss_fn=F.cross_entropy, overrides=Overrides(dp=2),
    )  # fmt: skip
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    losses = [float(result.train_step((x, y), optimizer=optimizer).detach()) for _ in range(2)]
    return losses, result.full_state_dict()


def test_a_synchronised_batch_norm_is_a_batch_norm() -> None:
    losses, state = on_ranks(RANKS, normed, nn.SyncBatchNorm)
    expected, of_plain = on_ranks(RANKS, normed, nn.BatchNorm2d)
    assert losses == expected
    for name, x in of_plain.items():
        assert torch.equal(state[name], x), name


class Scattered(nn.Module):
    """The first three tokens of each row, in order, where flags are up."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.map(x)
        return y.masked_scatter(mask[..., None], 2 * y[:, :3]).square().mean()


@pytest.mark.parametrize(
    "rows",
    [pytest.param((0, 3), marks=second_tier("where they are refused is the harder one")), (0, 1)],
    ids=["of each half", "of the first half"],
)
def test_elements_written_in_order_stay_in_their_micro_batch(rows: tuple[int, ...]) -> None:
    """Flags of six tokens in each of two rows; a micro-batch of two rows has six elements."""
    batch = (torch.randn(4, LENGTH, WIDTH), torch.zeros(4, LENGTH, dtype=torch.bool))
    batch[1][list(rows)] = True
    for microbatches in (1, 2):
        model = Scattered()
        expected = float(model(*batch).detach())
        result = meshwright.auto_parallelize(
            model,
            Cluster.local(1),
            example_inputs=batch,
            global_batch_size=4,
            overrides=Overrides(num_microbatches=microbatches),
        )
        if microbatches == 2 and rows == (0, 1):
            with pytest.raises(RuntimeError, match="flags are not as many as the elements"):
                result.train_step(batch)
        else:
            assert float(result.train_step(batch).detach()) == pytest.approx(expected, rel=1e-5)
