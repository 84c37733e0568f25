"""Weight gradients that are put off equal autograd's, and I computes none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.executor.backward.deferred import DeferredProduct, WeightGradientQueue, accumulate

ROWS, IN, OUT = 6, 5, 4


def _leaf(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def _operands(operator: str, bias: bool, lead: tuple[int, ...]) -> list[Any]:
    x = torch.randn(*lead, IN, dtype=torch.float64, requires_grad=True)
    weight = _leaf(OUT, IN) if operator == "linear" else _leaf(IN, OUT)
    if operator == "addmm":
        return [_leaf(OUT), x, weight]
    return [x, weight, *([_leaf(OUT)] if bias else [])]


def _twins(operands: list[Any]) -> list[Any]:
    return [x.detach().clone().requires_grad_() for x in operands]


PLAIN = {
    "linear": torch.nn.functional.linear, "addmm": torch.addmm, "mm": torch.mm,
    "matmul": torch.matmul,
}  # fmt: skip
CALLS = [
    ("linear", True, (2, ROWS)), ("linear", False, (ROWS,)), ("addmm", True, (ROWS,)),
    ("mm", False, (ROWS,)), ("matmul", False, (2, 3, ROWS)),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "bias", "lead"), CALLS)
@pytest.mark.parametrize("bias_too", [True, False])
def test_gradients_equal_autograds(
    operator: str, bias: bool, lead: tuple[int, ...], bias_too: bool
) -> None:
    torch.manual_seed(0)
    operands = _operands(operator, bias, lead)
    twins = _twins(operands)
    queue = WeightGradientQueue()
    product = DeferredProduct(operator, queue, defer_bias=bias_too and bias)
    for _ in range(2):  # micro-batches add up
        made: list[int] = []
        product(*operands).square().sum().backward()
        PLAIN[operator](*twins).square().sum().backward()
        items = queue.take()
        assert len(items) == 1 + (bias and bias_too) and not queue.items
        accumulate(items, lambda leaf, made=made: made.append(id(leaf)))
        assert len(made) == len(set(made)) == 1 + (bias and bias_too)
        for own, other in zip(operands, twins, strict=True):
            torch.testing.assert_close(own.grad, other.grad)


def test_nothing_is_computed_twice_and_weights_come_last() -> None:
    queue = WeightGradientQueue()
    x, weight = _operands("linear", False, (ROWS,))
    product = DeferredProduct("linear", queue, defer_bias=False)
    each = 2 * ROWS * IN * OUT
    with FlopCounterMode(display=False) as forward:
        y = product(x, weight).sum()
    with FlopCounterMode(display=False) as of_input:
        y.backward()
    assert weight.grad is None and x.grad is not None
    with FlopCounterMode(display=False) as of_weight:
        accumulate(queue.take(), lambda leaf: None)
    counts = [c.get_total_flops() for c in (forward, of_input, of_weight)]
    assert counts == [each, each, each]


def test_a_weight_that_is_not_trained_is_not_put_off() -> None:
    queue = WeightGradientQueue()
    x, weight = _operands("linear", False, (ROWS,))
    DeferredProduct("linear", queue, defer_bias=False)(
        x, weight.requires_grad_(False)
    ).sum().backward()
    assert not queue.items and x.grad is not None
