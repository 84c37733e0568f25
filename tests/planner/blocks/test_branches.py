"""Branches of models: towers by structure, whatever their names; none of chains, of encoders and
decoders, and of towers whose operators a forward mixes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.branches import branches_of
from meshwright.planner.tracing.trace import trace
from tests.helpers.tiny import batch, loss, net
from tests.models.models import CASES, traced
from tests.models.tower_models import TOWERS, Pairs, Towers, towers_batch


class Mixed(Towers):
    """The same towers, a layer of each in turn."""

    def towers(self, pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.patches(pixels), self.tokens(ids)
        for image, text in zip(self.image, self.text, strict=True):
            x, y = image(x), text(y)
        return x.mean(1), y.mean(1)


class Reading(Towers):
    """A second tower that reads the first one."""

    def towers(self, pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.patches(pixels)
        for layer in self.image:
            x = layer(x)
        y = self.tokens(ids) + x.mean(1, keepdim=True)
        for layer in self.text:
            y = layer(y)
        return x.mean(1), y.mean(1)


class Light(Towers):
    """A second tower of next to no work."""

    def __init__(self) -> None:
        super().__init__((6, 0))


class Three(nn.Module):
    """Three towers without a name or a number that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            for _ in range(3)
        )
        self.out = nn.Linear(64, 7)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        of_each = self.a(x), self.b(y), self.c(z)
        return self.out(of_each[0] * of_each[1] + of_each[2])


def found(model: nn.Module, rows: tuple[torch.Tensor, ...]) -> list[list[str]]:
    """The blocks of each branch."""
    graph = trace(model, rows, loss_fn=F.cross_entropy, batch_size=4)
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    return [[graph.blocks[k].name for k in run] for run in branches_of(graph, table)]


@pytest.mark.parametrize("model", [Towers, Pairs])
def test_towers_are_branches_without_a_block_of_two(model: Callable[[], nn.Module]) -> None:
    image, text = found(model(), towers_batch(4, 0))
    assert image == ["embed", "image.0", "image.1", "tail"]
    assert text == ["tokens", "text.0", "text.1"]


def test_three_branches_are_found_by_structure() -> None:
    rows = (*(torch.randn(4, 12) for _ in range(3)), torch.zeros(4, dtype=torch.long))
    assert len(found(Three(), rows)) == 3


def test_the_towers_of_transformers_clip_are_branches() -> None:
    of = traced(TOWERS["clip"], 4)
    image, text = branches_of(of.graph, of.table)
    names = [block.name for block in of.graph.blocks]
    assert names[text.start] == "text_model.embeddings.token_embedding"
    assert [name for name in names[: text.start] if name.startswith("text")] == []
    assert len(text) == 3 and image.stop == text.start


@pytest.mark.parametrize("model", [Mixed, Reading, Light])
def test_towers_that_do_not_run_apart_are_none(model: Callable[[], nn.Module]) -> None:
    assert found(model(), towers_batch(4, 0)) == []


def test_chains_and_encoders_with_decoders_have_no_branches_and_the_blocks_of_before() -> None:
    t5 = traced(CASES["t5"], 4)
    assert branches_of(t5.graph, t5.table) == ()
    names = [block.name for block in t5.graph.blocks]
    assert "decoder.embed_tokens" not in names and "decoder.block.0" in names
    shallow = traced(TOWERS["shallow"], 4)
    encoder, decoder = branches_of(shallow.graph, shallow.table)
    names = [block.name for block in shallow.graph.blocks]
    assert names[encoder.start] == "embed" and decoder.stop == names.index(
        "decoder.block.0.layer.1"
    )
    graph = trace(net(), batch(4), loss_fn=loss, batch_size=4)
    table = analyse(graph)
    assert branches_of(cut_blocks(graph, table), table) == ()
