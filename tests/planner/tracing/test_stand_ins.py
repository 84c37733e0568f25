"""Short traces of models with repeated layers are the full ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from meshwright.planner.tracing.trace import trace
from meshwright.planner.tracing.user_module.similar_layers import find_similar_layers
from tests.helpers.tiers import second_tier
from tests.helpers.traced import WIDTH, agree, hugging_face, rows
from tests.models.stacks import DEPTH, Layer, Stack, each, nested, refusals, with_layer

# --- models of transformers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt2", "bf16"),
        ("t5", "fp32"),
        *(
            pytest.param(name, "fp32", marks=second_tier("gpt2, t5 and stacks of every kind stay"))
            for name in ("llama", "bert")
        ),
    ],
)
def test_transformers_models(name: str, precision: str) -> None:
    model, batch = hugging_face(name, DEPTH)
    assert find_similar_layers(model)
    assert not refusals(model, batch, precision=precision)


def test_a_short_trace_computes_what_the_model_does() -> None:
    model, batch = hugging_face("gpt2", DEPTH)
    assert find_similar_layers(model)
    agree(model.eval(), batch)


def test_hidden_states_that_hooks_record() -> None:
    model, batch = hugging_face("bert", DEPTH)
    model.config.output_hidden_states = True
    refusals(model, batch)


# --- stacks that are shortened -------------------------------------------------------------------


def collected(self: Stack, x: torch.Tensor) -> torch.Tensor:
    kept = []
    for k, layer in enumerate(self.layers):
        x = layer(x)
        if k in (0, 3, 5):
            kept.append(self.head(x))
    return torch.stack(kept).sum(0)


@each
def between(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Views, in-place operations of the parent's own, and layers that are skipped or turned."""
    return x if k == 2 else layer(x.flip(0) if k % 2 else x).relu() + k


def run_nested(self: Stack, x: torch.Tensor) -> torch.Tensor:
    state: Any = (x, {"gain": x.mean(0), "times": 2.0})
    for layer in self.layers:
        y, more = layer(state)
        state = (y, {k: more[k] for k in ("gain", "times")})
    return state[0]


def under_autocast(self: Stack, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in self.layers:
            x = layer(x)
    return x.float()


def frozen_trunk(self: Stack, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for layer in self.layers:
            x = layer(x)
    return self.head(x)


def inner_writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).relu_()
    y[:, 0] = 0
    return x + y.chunk(2, dim=1)[1].sum()


def no_grad_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = self.l(x).sigmoid()
    return x + self.l(x) * gate


def tied_everywhere(stack: Stack) -> Stack:
    for layer in stack.layers[1:]:
        layer.l.bias = stack.layers[0].l.bias
    return stack


SHORT: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "collected": lambda: Stack(run=collected),
    "between": lambda: Stack(run=between),
    "sequential": lambda: nn.Sequential(*(Layer() for _ in range(DEPTH)), nn.Linear(WIDTH, 4)),
    "nested structures": lambda: Stack(with_layer(nested), run_nested),
    "constants": lambda: Stack(
        with_layer(
            lambda self, x: x + self.l(x) * torch.tensor([1.0] * WIDTH) + torch.arange(WIDTH)
        )
    ),
    "writes inside": lambda: Stack(with_layer(inner_writes)),
    "no_grad inside": lambda: Stack(with_layer(no_grad_inside)),
    "autocast": lambda: Stack(run=under_autocast),
    "frozen trunk": lambda: Stack(run=frozen_trunk),
    "tied everywhere": lambda: tied_everywhere(Stack()),
    "two kinds in turn": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * self.gain, gain=lambda k: 1.0 + k % 2), depth=11
    ),
    "frozen input": lambda: nn.Sequential(*(Layer() for _ in range(DEPTH))),
}


@pytest.mark.parametrize("name", SHORT)
def test_stacks_with_a_short_trace(name: str) -> None:
    model = SHORT[name]()
    assert find_similar_layers(model)
    loss_fn = None if isinstance(model, Stack) else lambda y: y.square().mean()
    assert not refusals(model, (rows(WIDTH),), loss_fn=loss_fn)


def test_only_three_layers_are_run() -> None:
    calls: list[int] = []

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + self.l(x)

    trace(Stack(with_layer(counted)), (rows(WIDTH),))
    assert len(calls) == 3


def test_the_model_is_left_as_it_was() -> None:
    model = Stack()
    classes = [type(m) for m in model.modules()]
    before = [dict(vars(m)) for m in model.modules()]
    trace(model, (rows(WIDTH),))
    assert [type(m) for m in model.modules()] == classes
    assert [vars(m) for m in model.modules()] == before
