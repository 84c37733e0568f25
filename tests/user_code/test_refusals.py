"""Models that are refused in one sentence, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.planner.plan.plan import Plan
from meshwright.planner.tracing.trace import TraceError, trace
from tests.user_code.user_models import USERS
from tests.user_code.user_parts import (
    LENGTH,
    VOCAB,
    WIDTH,
    Stack,
    UserModel,
    sequences,
    tokens,
    vectors,
)
from tests.user_code.user_runs import RANKS, batch_of, built


class SparseTable(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH, **options), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


class SeveralLosses(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(x)
        return {"main": F.cross_entropy(logits, labels), "z": logits.square().mean()}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 20)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], True)
        return F.cross_entropy(self.head(out[:, 0]), labels)


class HiddenWrite(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            x.clamp_(-1, 1)
        return F.cross_entropy(self.head(x), labels)


class ClippedWeights(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-1, 1)
        return F.cross_entropy(super().forward(x), labels)


def _dict_loss(output: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"main": F.cross_entropy(output, labels)}


def _packed_batch(rows: int) -> tuple[torch.Tensor, ...]:
    x, labels = sequences(rows)
    return x, torch.full((rows,), LENGTH), labels


REFUSALS: dict[str, tuple[UserModel, str]] = {
    "sparse table": (
        UserModel(build=lambda: SparseTable(sparse=True), batch=tokens),
        "sparse=True: .* drop it, and take a dense optimizer",
    ),
    "table with max_norm": (
        UserModel(build=lambda: SparseTable(max_norm=1.0), batch=tokens),
        "changed in place .* write other tensors out of place",
    ),
    "several losses": (
        UserModel(build=SeveralLosses, batch=vectors),
        r"a dict of \['main', 'z'\] where a scalar loss is needed; .* sum of several losses",
    ),
    "loss_fn of a dict": (
        UserModel(build=Stack, batch=vectors, loss_fn=_dict_loss),
        r"loss_fn gives a dict of \['main'\] where a scalar loss is needed",
    ),
    "packed sequence": (
        UserModel(build=Packed, batch=_packed_batch), "can't be traced: at .*test_refusals.py",
    ),
    "write under no_grad": (
        UserModel(build=HiddenWrite, batch=vectors), r"clamp_.* under no_grad .* write x = x \+",
    ),
    "weights clipped in forward": (
        UserModel(build=ClippedWeights, batch=vectors),
        "changes parameter head.weight in place; make it a buffer, or change it between steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_the_way_out(name: str) -> None:
    user, message = REFUSALS[name]
    with pytest.raises(TraceError, match=message):
        trace(built(user), batch_of(user, 0), loss_fn=user.loss_fn)


def test_rows_that_no_plan_divides_are_refused() -> None:
    user = USERS["dataclass output"]

    def plan(rows: int) -> Plan:
        return auto_parallelize(
            built(user),
            Cluster.local(RANKS, measure=False),
            example_inputs=batch_of(user, 0),
            global_batch_size=rows,
            precision="fp32",
            overrides=Overrides(dp=4, tp=1, pp=1),
        ).plan

    assert plan(RANKS).microbatch_rows == RANKS  # one row for each rank
    with pytest.raises(ValueError, match="4 does not divide global_batch_size=6; legal: 1, 2, 3"):
        plan(6)
