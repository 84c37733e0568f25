"""Batches of other sequence lengths and of fewer rows than planned."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Overrides, ParallelModel
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.parity.parity_reference import difference
from tests.user_code.small_transformers import MEGATRON, VOCAB, built

TOLERANCE = 2e-5
WIDTH, ROWS, LENGTH, RANKS = 8, 8, 16, 2
# (rows, tokens): as planned, shorter and odd, longer, seen before, fewer rows, and both
SHAPES = ((8, 16), (8, 13), (8, 24), (8, 16), (8, 13), (6, 16), (4, 20))
ALONE: Mapping[str, Overrides] = {
    "one": Overrides(num_microbatches=1),
    "2 micro-batches": Overrides(num_microbatches=2, recompute="full"),
}
LAYOUTS: Mapping[str, Overrides] = {
    "dp2": Overrides(dp=2, tp=1, pp=1, num_microbatches=2),
    "zero3": Overrides(dp=2, tp=1, pp=1, zero=3, num_microbatches=1),
    "tp2": Overrides(dp=1, tp=2, pp=1, num_microbatches=1),
    "pp2": Overrides(dp=1, tp=1, pp=2, num_microbatches=4, schedule="1f1b"),
    "pp2 zero-bubble": Overrides(dp=1, tp=1, pp=2, num_microbatches=4, schedule="zb_h1"),
}
# every layout once; shardings are of the model, so tp with both
ON_RANKS = (
    ("gpt2", "dp2"), ("gpt2", "tp2"), ("gpt2", "pp2 zero-bubble"),
    ("llama", "zero3"), ("llama", "tp2"), ("llama", "pp2"),
)  # fmt: skip


def batch(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Every row begins with some padding, of its own length; labels there are ignored."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length), generator=drawn)
    mask = torch.arange(length) >= torch.arange(rows)[:, None] % 4
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def train_at_every_shape(kind: str, overrides: Overrides, ranks: int = 1) -> None:
    """Losses, evaluations and gradients of all shapes are those of one device."""
    model = built(kind)
    alone = copy.deepcopy(model)
    if overrides.tp == 2:
        overrides = dataclasses.replace(overrides, shardings=MEGATRON[kind])
    example = batch(4, LENGTH, 0)
    result = tiny.planned(model, ranks, example_inputs=example, loss_fn=None, overrides=overrides)
    mine = torch.optim.SGD(result.parameters(), lr=0.5)
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step, (rows, length) in enumerate(SHAPES):
        given = batch(rows, length, step)
        model.eval()
        evaluated = float(result.eval_step(given))
        model.train()
        mine.zero_grad()
        plain.zero_grad()
        wanted = alone(**given).loss
        wanted.backward()
        for loss in (evaluated, float(result.train_step(given))):
            assert abs(loss - float(wanted)) < TOLERANCE
        gradients = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        off, where = difference(result.runtime.full_gradients(), gradients)
        assert off < TOLERANCE, where
        mine.step()
        plain.step()


CELLS = [*((kind, layout) for kind in MEGATRON for layout in ALONE), *ON_RANKS]


@second_tier("other lengths and rows of a small model are trained, evaluated and refused below")
@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_trains_at_every_shape(cell: tuple[str, str]) -> None:
    kind, layout = cell
    if layout in ALONE:
        train_at_every_shape(kind, ALONE[layout])
    else:
        on_ranks(RANKS, train_at_every_shape, kind, LAYOUTS[layout], RANKS)


class Tokens(nn.Module):
    """A token-wise model; sequences beyond 12 tokens take another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.second = 1.0, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * self.scale
        if x.shape[1] > 12:
            y = self.second(y).relu()
        return self.second(y).square().mean()


def planned(model: nn.Module, **options: Any) -> ParallelModel:
    given = {"loss_fn": None, "overrides": Overrides(num_microbatches=2), **options}
    return tiny.planned(model, **{"example_inputs": (torch.randn(4, 6, WIDTH),), **given})


def test_another_shape_is_of_the_planned_model_attributes_and_mode_or_refused() -> None:
    model = Tokens()
    result, x = planned(model), torch.randn(8, 5, WIDTH)
    model.scale = 2.0
    with pytest.raises(ValueError, match=r"model.scale was 1.0 .* is 2.0 now"):
        result.train_step((x,))
    model.scale = 1.0
    model.eval()
    evaluated = result.eval_step((x,))
    assert not model.training
    model.train()
    assert float(result.train_step((x,))) == pytest.approx(float(evaluated))
    for shape, why in (
        ((9, 6, WIDTH), r"\(9, 6, 8\); the plan expects \(8, 6, 8\) .*more rows than planned"),
        ((8, 6, WIDTH + 1), r"\(8, 6, 9\); .*can't be traced.*self.first"),
        ((8, 6), r"\(8, 6\); the plan expects \(8, 6, 8\)"),
        ((8, 0, WIDTH), "pad or drop rows"),
        ((8, 16, WIDTH), "the forward runs other operators"),
    ):
        with pytest.raises(ValueError, match=why):
            result.train_step((torch.randn(shape),))
    assert result.train_step((torch.randn(8, 12, WIDTH),)).isfinite()


class Weighted(nn.Linear):
    def forward(self, weight: float, x: torch.Tensor) -> torch.Tensor:
        return weight * super().forward(x).square().mean()


def test_numbers_stay_numbers_at_other_shapes() -> None:
    """Also where they are given as tensors."""
    model, x = Weighted(WIDTH, WIDTH), torch.randn(8, 9, WIDTH)
    result = planned(model, example_inputs=(0.5, torch.randn(4, 6, WIDTH)))
    for weight in (torch.tensor(0.25), 0.25):
        wanted = float(model(0.25, x).detach())
        assert result.train_step((weight, x)).item() == pytest.approx(wanted)


def test_longer_sequences_than_fit_the_memory_are_refused() -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    room = {"cluster": tiny.small_host(1, 4 << 20), "memory_margin": 0.0}
    result = planned(layers, loss_fn=lambda output: output.square().mean(), **room)
    assert result.train_step((torch.randn(8, 100, WIDTH),)).isfinite()
    with pytest.raises(ValueError, match=r"\(8, 8000, 8\); the plan expects .*does not fit"):
        result.train_step((torch.randn(8, 8000, WIDTH),))
