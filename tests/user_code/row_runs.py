"""Losses that users write, on ranks and in micro-batches, against one device on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, auto_parallelize
from tests.helpers.row_losses import EXACT, LENGTH, MEET, WIDTH, Loss, Tensor
from tests.parity.parity_reference import difference

ROWS, RANKS = 8, 2
ALONE: Mapping[str, Overrides] = {
    f"{m} micro-batches": Overrides(num_microbatches=m) for m in (2, 8)
}
LAYOUTS: Mapping[str, Overrides] = {
    "dp2": Overrides(dp=2, tp=1, pp=1, num_microbatches=1),
    "dp2 × 2": Overrides(dp=2, tp=1, pp=1, num_microbatches=2),
    "tp2 × 4": Overrides(dp=1, tp=2, pp=1, num_microbatches=4),
    "pp2 × 4": Overrides(dp=1, tp=1, pp=2, num_microbatches=4),
}
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


EXACT_NAMES = [n for n in (*EXACT, "sum and count", "number of items") if n not in FIXED]


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


def run(
    name: str, overrides: Overrides, ranks: int = 1, rows: int = ROWS, **options: Any
) -> dict[str, float]:
    """How far a step and an evaluation on so many rows are off."""
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
    evaluated = float(result.eval_step(batch))
    found = float(result.train_step(batch).detach())
    whole = result.runtime.full_gradients()
    return {
        "loss": abs(found - loss) / max(1.0, abs(loss)),
        "evaluated": abs(evaluated - loss) / max(1.0, abs(loss)),
        "gradient": difference(whole, gradients)[0],
    }
