"""Which layers of a model are built alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from meshwright.planner.tracing.user_module.similar_layers import MIN_SIMILAR, find_similar_layers
from tests.helpers.traced import ROWS, SEQUENCE, WIDTH, rows
from tests.models.stacks import DEPTH, Layer, Stack, refusals


def alter(change: Callable[[Any], object]) -> nn.Module:
    stack = Stack()
    change(stack.layers[3])
    return stack


UNLIKE: dict[str, Callable[[Any], object]] = {
    "training": lambda layer: layer.eval(),
    "frozen": lambda layer: layer.l.requires_grad_(False),
    "hook": lambda layer: layer.l.register_forward_hook(lambda *_: None),
    "attribute": lambda layer: setattr(layer, "gain", 2.0),
    "shape": lambda layer: setattr(layer, "l", nn.Linear(WIDTH, WIDTH, bias=False)),
    "dtype": lambda layer: layer.double(),
    "class": lambda layer: setattr(layer, "l", nn.Sequential(nn.Linear(WIDTH, WIDTH))),
    "forward": lambda layer: setattr(layer, "forward", layer.l.forward),
    "wrapped method": lambda layer: setattr(layer, "act", lambda x: x),
    "tie": lambda layer: (
        setattr(layer.l, "bias", nn.Parameter(layer.scale)) or setattr(layer, "again", layer.l.bias)
    ),
    "integer": lambda layer: setattr(layer, "index", 9),
}


def test_a_changed_layer_in_the_middle() -> None:
    model = alter(UNLIKE["shape"])
    assert not refusals(model, (rows(WIDTH),))


@pytest.mark.parametrize("name", UNLIKE)
def test_one_changed_layer_is_left_out(name: str) -> None:
    model = alter(UNLIKE[name])
    groups = find_similar_layers(model)
    if name == "integer":  # no longer every member's own position: they all differ by it
        assert not groups
    else:
        (group,) = groups
        assert group.members == tuple(f"layers.{k}" for k in range(DEPTH) if k != 3)


def test_a_short_stack_is_traced_in_full() -> None:
    assert not find_similar_layers(Stack(depth=MIN_SIMILAR - 1))
    (group,) = find_similar_layers(Stack(depth=MIN_SIMILAR))
    assert (group.traced, group.spared) == (
        ("layers.0", "layers.1", "layers.4"),
        ("layers.2", "layers.3"),
    )
    assert group.numbers == (("", "index"),)


def test_groups_are_outermost() -> None:
    inner = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))) for _ in range(6)]
    assert [g.members[0] for g in find_similar_layers(nn.Sequential(*inner))] == ["0"]
    assert [g.members[0] for g in find_similar_layers(nn.Sequential(*inner[:2]))] == ["0.0", "1.0"]


def test_one_layer_registered_many_times_is_no_group() -> None:
    layer = Layer()
    model = Stack(lambda k: layer)
    assert not find_similar_layers(model)
    refusals(model, (torch.rand(ROWS, SEQUENCE, WIDTH),))
