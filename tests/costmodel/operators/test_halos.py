"""A shift over the context axis: a token of each chunk is gathered; of one less, all are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.costmodel.operators.test_pricing import (
    LENGTH,
    ROWS,
    WIDTH,
    costs,
    moving,
    pricer,
    talking,
)
from tests.helpers.planning import Traced, cut

TOKEN = 4 * ROWS * WIDTH


class Moved(nn.Module):
    """A layer whose output is moved."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.move = nn.Linear(WIDTH, WIDTH), move

    def forward(self, x: Tensor) -> Tensor:
        return self.move(self.layer(x)).square().mean()


def traced(move: Callable[[Tensor], Tensor]) -> Traced:
    with torch.device("meta"):
        return cut(Moved(move), (torch.empty(ROWS, LENGTH, WIDTH),), None, precision="fp32")


@pytest.mark.parametrize(
    ("short", "move"),
    [("pad", lambda y: F.pad(y, (0, 0, 1, -1))), ("roll", lambda y: y.roll(-1, 1))],
)
def test_a_shift_takes_a_token_of_a_neighbour(short: str, move: Callable[[Tensor], Tensor]) -> None:
    of = traced(move)
    (sent,) = costs(pricer(of, talking(), cp=2), short)
    assert sent.forward_comm_s == sent.backward_comm_s == sent.forward_s == pytest.approx(TOKEN)
    (copied,), (alone,) = (costs(pricer(of, moving(), cp=cp), short) for cp in (2, 1))
    assert copied.forward_s == pytest.approx(alone.forward_s / 2) and not alone.forward_comm_s


@pytest.mark.parametrize("move", [lambda y: y[:, 1:], lambda y: y[:, :-1]])
def test_one_token_less_needs_them_all(move: Callable[[Tensor], Tensor]) -> None:
    (cost,) = costs(pricer(traced(move), talking(), cp=2), "slice")
    assert cost.forward_comm_s == pytest.approx(TOKEN * LENGTH / 2)
