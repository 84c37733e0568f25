"""A shift over the context axis: one token goes to a neighbour, and what is shifted is copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.costmodel.operators.test_pricing import (
    LENGTH,
    ROWS,
    WIDTH,
    costs,
    moving,
    pricer,
    talking,
)
from tests.helpers.planning import cut


class Shifted(nn.Module):
    """A layer whose output is taken without the last token, or (`late`) without the first."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.layer, self.late = nn.Linear(WIDTH, WIDTH), late

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y[:, 1:] if self.late else y[:, :-1]).square().mean()


@pytest.mark.parametrize("late", [False, True])
def test_a_token_is_sent_where_another_ranks_comes_in(late: bool) -> None:
    with torch.device("meta"):
        of = cut(Shifted(late=late), (torch.empty(ROWS, LENGTH, WIDTH),), None, precision="fp32")
    token = 4 * ROWS * WIDTH if late else 0
    (sent,) = costs(pricer(of, talking(), cp=2), "slice")
    assert sent.forward_comm_s == sent.backward_comm_s == sent.forward_s == pytest.approx(token)
    (copied,) = costs(pricer(of, moving(), cp=2), "slice")
    assert bool(copied.forward_s) == late
    (alone,) = costs(pricer(of, moving(), cp=1), "slice")
    assert not alone.forward_s and not alone.forward_comm_s
