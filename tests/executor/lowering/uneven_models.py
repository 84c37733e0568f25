"""Models whose vocabulary and inner width no degree divides.

131 and 67 are prime. On two ranks the parts are 66 and 65 (34 and 33), on four three of 33 and 32
(17 and 16).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.planner.plan import Plan
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.stored import stored
from tests.models import architectures, branching_models, models
from tests.models.models import CASES, Case, Traced, adamw, sgd, traced, uneven

WORDS, INNER, SEQUENCE, ROWS = 131, 67, 16, 8


class Odd(nn.Module):
    """Every width prime; a mean over a split dim, dropout, norms over whole and split dims, and
    a table that is read and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 29, padding_idx=100)
        self.conv = nn.Conv1d(29, 23, 3, padding=1)
        self.norm = nn.BatchNorm1d(23)
        self.up, self.down = nn.Linear(23, INNER), nn.Linear(INNER, 29, bias=False)
        self.scale = nn.Parameter(torch.rand(INNER))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        y = F.dropout(F.silu(self.up(y)) * self.scale, 0.0)
        x = x + self.down(y) * y.mean(-1, keepdim=True)
        return (F.linear(F.layer_norm(x, (29,)), self.table.weight)).flatten(0, 1)


def _ids(rows: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, WORDS, (rows, SEQUENCE), generator=generator)


def causal_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"input_ids": ids, "labels": uneven(ids)}


def pair_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"input_ids": ids[:, :12], "labels": uneven(ids.flip(1))}


def odd_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    ids = _ids(rows, step)
    return ids, ids.roll(-1, 1)


def odd_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target.flatten())


ODD: Mapping[str, Case] = {
    "gpt2": Case(
        build=lambda: architectures.gpt2(tied=True, layers=2, n_inner=INNER, vocab_size=WORDS),
        batch=causal_batch, optimizer=adamw, shardings=CASES["gpt2_tied"].shardings
    ),
    "bert": Case(
        # its decoder has a bias of the vocabulary's size
        build=lambda: architectures.bert(
            num_hidden_layers=2, intermediate_size=INNER, vocab_size=WORDS, pad_token_id=101
        ),
        batch=causal_batch, optimizer=sgd,
        shardings=CASES["bert"].shardings | {"bert.embeddings.word_embeddings": "vocab"},
    ),
    "t5": Case(
        build=lambda: branching_models.t5(vocab=WORDS, inner=INNER),
        batch=pair_batch, optimizer=adamw,
        shardings=CASES["t5"].shardings | {"lm_head": "colwise", "*.embed_tokens": "vocab"},
    ),
    "odd": Case(
        build=Odd, batch=odd_batch, optimizer=sgd, loss_fn=odd_loss, batch_statistics=True,
        shardings={"table": "vocab", ":linear": "colwise", "up": "colwise", "conv": "o"},
    ),
}  # fmt: skip
# build_plan's arguments; a plan runs on as many ranks as its meshes have
PLANS: Mapping[str, Mapping[str, Any]] = {
    "alone": {"meshes": ((1, 1),)},
    "tp2": {"meshes": ((1, 2),)},
    "tp4": {"meshes": ((1, 4),)},
    "zero1": {"meshes": ((2, 2),), "zero": 1},
    "zero2": {"meshes": ((2, 2),), "zero": 2},
    "zero3": {"meshes": ((2, 2),), "zero": 3},
    "pp2xtp2": {"meshes": ((1, 2), (1, 2))},
    "tp2|dp2": {"meshes": ((1, 2), (2, 1))},
}
MICROBATCHES = 2


def graph_of(case: str) -> Traced:
    rows = ROWS // MICROBATCHES
    return stored(
        "uneven", case, rows, make=lambda: traced(ODD[case], rows),
        models=(sys.modules[__name__], architectures, branching_models, models),
    )  # fmt: skip


def plan_of(case: str, plan: str) -> tuple[Plan, Traced]:
    of = graph_of(case)
    knobs = Knobs(
        rows=ROWS, num_microbatches=MICROBATCHES, shardings=ODD[case].shardings, **PLANS[plan]
    )
    return build_plan(of.graph, knobs), of
