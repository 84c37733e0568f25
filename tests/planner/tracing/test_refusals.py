"""Models and batches that cannot be traced are refused with the place and the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers.traced import WIDTH, agree, rows, shorts, with_forward
from tests.planner.tracing.test_trace import perceptron

# --- what can't be traced ------------------------------------------------------------------------


def _branching(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    if y.sum() > 0:  # the line that the message names
        y = 2 * y
    return y.sum()


def _selecting(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    return y[y > 0].sum()


def _decaying(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.l.weight.mul_(0.9)
    return self.l(x).sum()


@pytest.mark.parametrize(
    ("forward", "line", "way_out"),
    [
        (_branching, 2, "torch.where"),
        (_selecting, 2, "masks"),
        (lambda self, x: self.l(x), None, "loss_fn="),
        (_decaying, None, "between steps"),
        (lambda self, x: self.l(x).detach().sum(), None, "no trainable parameter"),
    ],
    ids=["branch", "selection", "no scalar", "parameter", "no gradient"],
)
def test_trace_errors_say_where_and_what_to_do(
    forward: Callable[..., Any], line: int | None, way_out: str
) -> None:
    with pytest.raises(TraceError, match=way_out) as raised:
        trace(with_forward(forward), (rows(WIDTH),))
    if line is not None:
        first = inspect.getsourcelines(forward)[1]
        assert f"{__file__}:{first + line}" in str(raised.value)


def test_symbolic_trace_where_export_fails() -> None:
    """A model that keeps its activations as numpy arrays to look at."""

    def forward(self: Any, x: torch.Tensor, mask: Any = None, scale: float = 1.0) -> torch.Tensor:
        y = self.l(x)
        self.seen = y.detach().numpy()
        return (y if mask is None else y * mask).mul(scale).sum()

    graph = agree(with_forward(forward), {"x": rows(WIDTH), "scale": 2.0})
    assert shorts(graph) == ["linear", "mul", "sum"]
    assert "symbolic_trace" in graph.notes[0]


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"n": 3}, {}, "no tensor with a batch dim"),
        ((torch.tensor(1.0),), {}, "no tensor with a batch dim"),
        ({"input": rows(WIDTH), "y": rows(WIDTH)}, {}, r"Sequential.forward.*'y'.*\['input'\]"),
        ((rows(WIDTH), rows(4)), {}, r"too many positional.*\['input'\].*loss_fn"),
        ({"input": rows(WIDTH)}, {"loss_fn": F.mse_loss}, "add the entry 'targets'"),
        ((rows(WIDTH),), {"loss_fn": F.mse_loss}, "inputs..., targets"),
        ((rows(WIDTH),), {"loss_fn": torch.sum, "precision": "fp8"}, "legal: fp32, bf16, fp16"),
        ((rows(WIDTH),), {"loss_fn": torch.sum, "batch_size": 0}, "an integer from 1"),
        ((rows(WIDTH), rows(4)), {"loss_fn": nn.Bilinear(4, 4, 1)}, "parameters of its own"),
    ],
)
def test_batches_that_do_not_fit(batch: Any, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(perceptron(), batch, **options)


def test_a_condition_over_several_lines_is_named() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        scale = 2.0 if y.sum() > 0 else 1.0
        return scale * y.sum()

    ways_out = r"(?s)the condition `y.sum\(\) > 0` depends on tensor values.*leaf.*loss_fn="
    with pytest.raises(TraceError, match=ways_out):
        trace(with_forward(forward), (rows(WIDTH),))


# --- hooks ---------------------------------------------------------------------------------------


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
        TraceError, match=r"test_refusals.py:\d+: y.register_hook.*forward are followed"
    ):
        trace(with_forward(forward), (rows(WIDTH),))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: 2 * gradient)  # untouched outside of a trace
    x.sum().backward()
    assert x.grad is not None and x.grad.item() == 2.0
