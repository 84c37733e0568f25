"""Layers that are built alike and do not compute alike are traced in full."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from meshwright.planner.tracing.trace import TraceError, trace
from meshwright.planner.tracing.user_module.similar_layers import find_similar_layers
from tests.helpers.traced import WIDTH, rows
from tests.models.stacks import DEPTH, Stack, each, nested, refusals, with_layer

Kind = Callable[[], nn.Module]
TURN = {"k": 0}
LEAKED: list[torch.Tensor] = []


# --- layers --------------------------------------------------------------------------------------


def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = x
    return x + self.l(x)


def appends(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.history.append(x.sum())
    return x + self.l(x)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.shared.depth += 1
    return x + self.l(x) * (2.0 if self.shared.depth % 4 == 3 else 1.0)


def assigns_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.scale = (0.9 * self.scale + x.mean(0)).detach()
    return x + self.l(x) * self.scale


def writes_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.scale.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x + self.l(x) * self.scale


def leaks(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    LEAKED.append(y)
    return x + y


# --- parents -------------------------------------------------------------------------------------


def run_leaks(self: Stack, x: torch.Tensor) -> torch.Tensor:
    LEAKED.clear()
    for layer in self.layers:
        x = layer(x)
    return x + sum(LEAKED)


def penalty(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
    return x + sum(p.square().sum() for p in self.layers.parameters())


def in_turn(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for TURN["k"], layer in enumerate(self.layers):
        x = layer(x)
    return x


def twice(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in (*self.layers, *self.layers):
        x = layer(x)
    return x


def backwards(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in reversed(self.layers):
        x = layer(x)
    return x


def own_masks(self: Stack, x: torch.Tensor) -> torch.Tensor:
    shared = x.sigmoid()
    for k, layer in enumerate(self.layers):
        x = layer((x, shared * 2 if k == 3 else shared))
    return x


@each
def sets_attribute(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.extra = k
    return layer(x)


@each
def sets_one_attribute(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    self.layers[3].gain = 2.0
    return layer(x)


@each
def sets_shared(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """For one layer only, an object that all of them hold."""
    self.layers[0].shared.gain = 2.0 if k == 3 else 1.0
    return layer(x)


@each
def swallowing(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = layer(x)
    try:
        weight = layer.l.weight
    except Exception:  # noqa: BLE001
        return x
    return x + weight.sum()


def sharing(forward: Callable[..., Any], **shared: Any) -> Callable[[int], Any]:
    """Layers that hold one object."""
    one = types.SimpleNamespace(**shared)
    return with_layer(forward, shared=lambda k: one)


FULL: dict[str, Kind] = {
    "depends on its position": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * (3.0 if self.index == 4 else 1.0))
    ),
    "position as an index": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * [1.0, 1.0, 1.0, 2.0, 1.0, 1.0][self.index])
    ),
    "keeps a tensor": lambda: Stack(with_layer(keeps)),
    "assigns a buffer": lambda: Stack(with_layer(assigns_buffer)),
    "the last by a global": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * (2.0 if TURN["k"] == DEPTH - 1 else 1.0)),
        in_turn,
    ),
    "one attribute set": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * self.gain, gain=lambda k: 1.0),
        sets_one_attribute,
    ),
    "a shared object set": lambda: Stack(
        sharing(lambda self, x: x + self.l(x) * self.shared.gain, gain=1.0), sets_shared
    ),
    "another argument in the middle": lambda: Stack(
        with_layer(nested),
        each(lambda self, k, layer, x: layer((x, {"gain": x, "times": 3.0 if k == 3 else 2.0}))[0]),
    ),
    "writes its input": lambda: Stack(with_layer(lambda self, x: x.add_(self.l(x)))),
    "writes a buffer": lambda: Stack(with_layer(writes_buffer)),
    "gives a view": lambda: Stack(with_layer(lambda self, x: x.view(x.shape))),
    "leaks a tensor": lambda: Stack(with_layer(leaks), run_leaks),
    "weights in the loss": lambda: Stack(run=penalty),
    "parts called by the parent": lambda: Stack(run=each(lambda self, k, layer, x: layer.l(x))),
    "parent uses positions": lambda: Stack(
        run=each(lambda self, k, layer, x: layer(x) * (layer.index + 1))
    ),
    "parent sets attributes": lambda: Stack(run=sets_attribute),
    "called twice": lambda: Stack(run=twice),
    "backwards": lambda: Stack(run=backwards),
    "another shape in the middle": lambda: Stack(
        run=each(lambda self, k, layer, x: layer(x[None])[0] if k == 3 else layer(x))
    ),
    "written to between": lambda: Stack(run=each(lambda self, k, layer, x: layer(x).add_(1))),
    "looks inside, and hides it": lambda: Stack(run=swallowing),
    "a mask of its own": lambda: Stack(
        with_layer(lambda self, pair: pair[0] + self.l(pair[0]) * pair[1]), own_masks
    ),
}
KEEPING: dict[str, Kind] = {
    "appends to a list": lambda: Stack(with_layer(appends, history=lambda k: [])),
    "counts elsewhere": lambda: Stack(sharing(counts, depth=0), depth=8),
}


@pytest.mark.parametrize("name", KEEPING)
def test_layers_that_count_from_step_to_step_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match="would be another after the next one"):
        trace(KEEPING[name](), (rows(WIDTH),))


@pytest.mark.parametrize("name", FULL)
def test_layers_that_differ_are_traced_in_full(name: str) -> None:
    model = FULL[name]()
    assert find_similar_layers(model)
    assert len(refusals(model, (rows(WIDTH),))) == 1


def test_layers_in_checkpoints_give_the_full_graph() -> None:
    checkpoint = torch.utils.checkpoint.checkpoint
    run = each(lambda self, k, layer, x: checkpoint(layer, x, use_reentrant=False))
    refusals(Stack(run=run), (rows(WIDTH),))
