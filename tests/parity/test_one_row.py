"""Micro-batches of one row: the same operators, blocks and plan as any other batch size."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.plan.check import fingerprint
from meshwright.planner.tracing.trace import trace
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import WIDTH, agree, shorts

BATCH = 4


class Arranged(nn.Module):
    """Equal layers around a way to arrange rows that may change nothing where there is one."""

    def __init__(self, arrange: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.arrange = arrange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.arrange(self, x)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def grouped(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows, length, width = x.shape
    return x.reshape(1, rows * length, width)


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "class token": lambda self, x: torch.cat([self.token.expand(len(x), -1, -1), x], 1),
    "broadcast_to": lambda self, x: torch.cat([self.token.broadcast_to(len(x), 1, WIDTH), x], 1),
    "repeat": lambda self, x: torch.cat([self.token.repeat(len(x), 1, 1), x], 1),
    "rows second": lambda self, x: x.transpose(0, 1).contiguous(),
    "one element second": lambda self, x: x[:, :1].transpose(0, 1),
    "rows joined": grouped,
}


def traced(model: nn.Module, rows: int) -> Graph:
    return trace(model, (torch.randn(BATCH, 6, WIDTH),), batch_size=rows)


FEW = ("broadcast_to", "one element second", "rows joined")


@pytest.mark.parametrize(
    "way", tiered(WAYS, FEW.__contains__, "one way to repeat, to turn and to join rows stays")
)
def test_a_model_has_the_same_operators_and_blocks_at_one_row(way: str) -> None:
    model = Arranged(WAYS[way])
    many, one = (traced(model, rows) for rows in (BATCH, 1))
    assert [op.key for op in one.ops] == [op.key for op in many.ops]
    assert [op.target for op in one.ops] == [op.target for op in many.ops]
    assert fingerprint(one) == fingerprint(many)
    cut = cut_blocks(many, analyse(many))
    like = cut_blocks(one, analyse(one), cut)
    assert [b.name for b in like.blocks] == [b.name for b in cut.blocks]
    alike = [[a.class_id == b.class_id for b in g.blocks for a in g.blocks] for g in (cut, like)]
    assert alike[0] == alike[1]


def test_what_changes_nothing_at_any_batch_is_dropped() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x.contiguous().to(x.dtype), 0.5, training=False)

    model = Arranged(forward)
    assert not {"contiguous", "to", "dropout"}.intersection(shorts(traced(model, 1)))
    agree(model, (torch.randn(1, 6, WIDTH),))


@second_tier("a token joined to each row, as its class token, is among the ways above")
def test_vit_runs_in_micro_batches_of_one_row() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    batch = {
        "pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 0]),
    }  # fmt: skip
    wanted = copy.deepcopy(model)
    result = auto_parallelize(
        model,
        Cluster.local(1, measure=False),
        example_inputs=batch,
        global_batch_size=BATCH,
        precision="fp32",
        profile=False,
        overrides=Overrides(num_microbatches=BATCH),
    )
    loss = wanted(**batch).loss
    assert float(result.train_step(batch)) == pytest.approx(loss.item(), rel=1e-5)
