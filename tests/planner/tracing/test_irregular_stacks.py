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
from tests.models.stacks import DEPTH, Stack, nested, refusals, with_layer


def by_position(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.l(x) * (3.0 if self.index == 4 else 1.0)


def by_lookup(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.l(x) * [1.0, 1.0, 1.0, 2.0, 1.0, 1.0][self.index]


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


TURN = {"k": 0}


def by_turn(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.l(x) * (2.0 if TURN["k"] == DEPTH - 1 else 1.0)


def writes_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.add_(self.l(x))


def writes_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.scale.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x + self.l(x) * self.scale


def gives_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape)


def leaks(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    LEAKED.append(y)
    return x + y


LEAKED: list[torch.Tensor] = []


def run_leaks(self: Stack, x: torch.Tensor) -> torch.Tensor:
    LEAKED.clear()
    for layer in self.layers:
        x = layer(x)
    return x + sum(LEAKED)


def penalty(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
    return x + sum(p.square().sum() for p in self.layers.parameters())


def reaches_in(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer.l(x) if hasattr(layer, "l") else x
    return x


def by_layer_position(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x) * (layer.index + 1)
    return x


def sets_attribute(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for k, layer in enumerate(self.layers):
        layer.extra = k
        x = layer(x)
    return x


def sets_one_attribute(self: Stack, x: torch.Tensor) -> torch.Tensor:
    self.layers[3].gain = 2.0
    for layer in self.layers:
        x = layer(x)
    return x


def switched() -> Stack:
    """The parent sets, for one layer only, an object that all of them hold."""
    shared = types.SimpleNamespace(gain=1.0)

    def run(self: Stack, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            self.layers[0].shared.gain = 2.0 if k == 3 else 1.0
            x = layer(x)
        return x

    layer = with_layer(lambda self, x: x + self.l(x) * self.shared.gain, shared=lambda k: shared)
    return Stack(layer, run)


def in_turn(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for TURN["k"], layer in enumerate(self.layers):
        x = layer(x)
    return x


def run_times(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for k, layer in enumerate(self.layers):
        x, _ = layer((x, {"gain": x, "times": 3.0 if k == 3 else 2.0}))
    return x


def twice(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in (*self.layers, *self.layers):
        x = layer(x)
    return x


def backwards(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in reversed(self.layers):
        x = layer(x)
    return x


def odd_shapes(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for k, layer in enumerate(self.layers):
        x = layer(x[None] if k == 3 else x)
        x = x[0] if k == 3 else x
    return x


def in_place_between(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
        x += 1
    return x


def checkpointed(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    return x


def swallowing(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
        try:
            weight = layer.l.weight
        except Exception:  # noqa: BLE001
            continue
        x = x + weight.sum()
    return x


def own_masks(self: Stack, x: torch.Tensor) -> torch.Tensor:
    shared = x.sigmoid()
    for k, layer in enumerate(self.layers):
        x = layer((x, shared * 2 if k == 3 else shared))
    return x


def counting() -> Stack:
    shared = types.SimpleNamespace(depth=0)
    return Stack(with_layer(counts, shared=lambda k: shared), depth=8)


FULL: dict[str, Callable[[], nn.Module]] = {
    "depends on its position": lambda: Stack(with_layer(by_position)),
    "position as an index": lambda: Stack(with_layer(by_lookup)),
    "keeps a tensor": lambda: Stack(with_layer(keeps)),
    "assigns a buffer": lambda: Stack(with_layer(assigns_buffer)),
    "the last by a global": lambda: Stack(with_layer(by_turn), in_turn),
    "one attribute set": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * self.gain, gain=lambda k: 1.0),
        sets_one_attribute,
    ),
    "a shared object set": switched,
    "another argument in the middle": lambda: Stack(with_layer(nested), run_times),
    "writes its input": lambda: Stack(with_layer(writes_input)),
    "writes a buffer": lambda: Stack(with_layer(writes_buffer)),
    "gives a view": lambda: Stack(with_layer(gives_view)),
    "leaks a tensor": lambda: Stack(with_layer(leaks), run_leaks),
    "weights in the loss": lambda: Stack(run=penalty),
    "parts called by the parent": lambda: Stack(run=reaches_in),
    "parent uses positions": lambda: Stack(run=by_layer_position),
    "parent sets attributes": lambda: Stack(run=sets_attribute),
    "called twice": lambda: Stack(run=twice),
    "backwards": lambda: Stack(run=backwards),
    "another shape in the middle": lambda: Stack(run=odd_shapes),
    "written to between": lambda: Stack(run=in_place_between),
    "looks inside, and hides it": lambda: Stack(run=swallowing),
    "a mask of its own": lambda: Stack(
        with_layer(lambda self, pair: pair[0] + self.l(pair[0]) * pair[1]), own_masks
    ),
}


KEEPING: dict[str, Callable[[], nn.Module]] = {
    "appends to a list": lambda: Stack(with_layer(appends, history=lambda k: [])),
    "counts elsewhere": counting,
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
    refusals(Stack(run=checkpointed), (rows(WIDTH),))
