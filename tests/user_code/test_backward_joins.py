"""Operators whose backward gives a row a gradient by other rows: gradients are one device's under
every plan of one micro-batch, and others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import Cluster, MeshwrightError, Overrides, auto_parallelize, leaf
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered

ROWS, WORDS, WIDTH, CLASSES = 8, 6, 8, 4


class Words(nn.Module):
    """Means of words, whose gradients are divided by how often each word is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.hidden(self.words(ids).mean(1))))


class Bags(Words):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", scale_grad_by_freq=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.hidden(self.words(ids))))


class Kept(Words):
    """As one node, of which a trial tells."""

    def __init__(self) -> None:
        super().__init__()
        self.words = leaf(nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True))


MODELS = {"embedding": Words, "bag": Bags, "leaf": Kept}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b"},
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (ROWS, 5), generator=draw)
    return ids, torch.randint(0, CLASSES, (ROWS,), generator=draw)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def planned(name: str, ranks: int, **plan: Any) -> Any:
    return auto_parallelize(
        made(name),
        Cluster.local(ranks, "cpu", measure=False),
        example_inputs=batch(),
        global_batch_size=ROWS,
        loss_fn=F.cross_entropy,
        precision="fp32",
        overrides=Overrides(**plan),
    )


def gradients(name: str, ranks: int, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Those of the parameters that rank 0 holds, whole."""
    result = planned(name, ranks, **plan)
    result.train_step(batch())
    return {
        fqn: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for fqn, p in result.named_parameters()
        if p.grad is not None and not p.is_meta
    }


def check(name: str, found: dict[str, torch.Tensor]) -> None:
    model, (ids, labels) = made(name), batch()
    F.cross_entropy(model(ids), labels).backward()
    expected = {fqn: p.grad for fqn, p in model.named_parameters()}
    assert "words.weight" in found
    for fqn, x in found.items():
        torch.testing.assert_close(x, expected[fqn], rtol=1e-5, atol=1e-6, msg=fqn)


FIRST = {("embedding", "zero3"), ("embedding", "pp2"), ("bag", "tp2"), ("bag", "zero2")}
FIRST |= {("leaf", "dp2"), ("leaf", "tp2")}
FEW = second_tier("each model under two plans, and each plan, stay")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, id=f"{name}-{plan}", marks=() if (name, plan) in FIRST else FEW)
        for name in MODELS
        for plan in PLANS
    ],
)
def test_gradients_are_one_device_s(name: str, plan: str) -> None:
    check(name, on_ranks(2, gradients, name, 2, PLANS[plan]))


@pytest.mark.parametrize(
    "name", tiered(MODELS, lambda name: name != "bag", "a table and a leaf stay")
)
def test_several_micro_batches_are_refused_and_not_chosen(name: str) -> None:
    check(name, gradients(name, 1, {}))
    with pytest.raises(MeshwrightError, match=r"rows of the batch meet in words:(embedding|leaf)"):
        planned(name, 1, num_microbatches=2)
