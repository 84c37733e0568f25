"""Hooks of a traced model: those on a forward are followed, those of autograd refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers.traced import WIDTH, agree, rows, with_forward


def test_hooks_on_a_forward_are_followed() -> None:
    model = with_forward(lambda self, x: self.l(x).square().sum())
    model.l.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model.l.register_forward_hook(lambda module, args, made: made + 1)
    agree(model, (rows(WIDTH),))


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (lambda m: m.l.register_full_backward_hook(lambda *_: None), "'l' has a register_full_"),
        (lambda m: m.l.register_full_backward_pre_hook(lambda *_: None), "backward_pre_hook"),
        (lambda m: m.l.weight.register_hook(lambda g: g), "'l.weight' has a register_hook"),
        (
            lambda m: m.l.weight.register_post_accumulate_grad_hook(lambda p: None),
            "register_post_accumulate_grad_hook",
        ),
    ],
)
def test_hooks_that_autograd_would_call_are_refused(place: Callable[[Any], Any], says: str) -> None:
    model = with_forward(lambda self, x: self.l(x).sum())
    hook = place(model)
    with pytest.raises(TraceError, match=says):
        trace(model, (rows(WIDTH),))
    hook.remove()
    assert trace(model, (rows(WIDTH),)).ops


def test_a_hook_on_an_activation_is_refused_with_its_line() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y.sum()

    with pytest.raises(
        TraceError, match=r"test_hooks.py:\d+: y.register_hook.*forward are followed"
    ):
        trace(with_forward(forward), (rows(WIDTH),))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: 2 * gradient)  # untouched outside of a trace
    x.sum().backward()
    assert x.grad is not None and x.grad.item() == 2.0
