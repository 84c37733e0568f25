"""Numbers of the batch in a trace, against Python's; and draws that no trace may keep."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.planner.tracing.numbers import Number, NumberNeeded, tensor_of
from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers.traced import WIDTH, rows, with_forward

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


def number(value: float) -> Number:
    return Number(torch.tensor(value), type(value), "n", set())


@pytest.mark.parametrize("value", [3, 2.5])
@pytest.mark.parametrize("other", [2, 0.5])
def test_arithmetic_is_pythons(value: float, other: float) -> None:
    ways = [(name, getattr(operator, name)) for name in BINARY]
    for name, function in ways:
        for found, wanted in (
            (function(number(value), other), function(value, other)),
            (function(other, number(value)), function(other, value)),
            (function(number(value), number(other)), function(value, other)),
        ):
            assert isinstance(found, type(wanted)), name
            assert float(tensor_of(found)) == pytest.approx(wanted), name
    for function in (operator.neg, operator.pos, abs):
        assert float(function(number(-value)).tensor) == function(-value)
    product = number(value) * torch.ones(2)
    assert isinstance(product, torch.Tensor) and product.tolist() == [value] * 2
    assert torch.add(torch.ones(()), number(value)).item() == 1 + value


@pytest.mark.parametrize("ask", [int, float, bool, hash, round, range, lambda n: n > 1])
def test_whatever_asks_for_the_value_is_told(ask: Callable[[Any], Any]) -> None:
    found = number(2)
    with pytest.raises(NumberNeeded, match="the forward needs the value of the number 'n'"):
        ask(found)
    assert found.asked == {"n"} and f"{found}" == "<number n>"


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: random.random(), "random.random"),
        (lambda: np.random.rand(), "numpy.random.rand"),
        (lambda: np.random.default_rng().random(), "numpy.random.default_rng"),
    ],
)
def test_draws_from_global_generators_are_refused(draw: Callable[[], float], name: str) -> None:
    forward = lambda self, x: self.l(x).sum() * draw()  # noqa: E731
    with pytest.raises(TraceError, match=rf"test_numbers.py:\d+ the forward calls {name}: a plan"):
        trace(with_forward(forward), (rows(WIDTH),))
    assert draw() != draw()  # outside of a trace


def test_draws_with_a_seed_are_taken_and_hidden_ones_found() -> None:
    seeded = lambda self, x: self.l(x).sum() * float(np.random.default_rng(3).random())  # noqa: E731
    trace(with_forward(seeded), (rows(WIDTH),))
    hidden = random.Random.random
    sneaky = lambda self, x: self.l(x).sum() * hidden(random._inst)  # noqa: E731
    with pytest.raises(TraceError, match="at an unknown place the forward draws from random or"):
        trace(with_forward(sneaky), (rows(WIDTH),))
