"""What a backward holds of activations' gradients, operator by operator, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.blocks.price import price_pass
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.layouts import BlockLayouts
from tests.costmodel.blocks.test_block_memory import stack
from tests.costmodel.blocks.test_price import price
from tests.costmodel.operators.test_pricing import busy
from tests.helpers.planning import cut, setting_on

ROWS, WIDTH, WIDE, WORDS = 4, 8, 32, 24
X, INNER, LOGITS, LOSS = 4 * ROWS * WIDTH, 4 * ROWS * WIDE, 4 * ROWS * WORDS, 4


class Layer(nn.Module):
    """A residual perceptron; a square one runs the same weights twice."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], wide: int = WIDE) -> None:
        super().__init__()
        self.act = act
        self.up = nn.Linear(WIDTH, wide, bias=False)
        self.down = self.up if wide == WIDTH else nn.Linear(wide, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def course(*layers: nn.Module, block: int, words: bool = False) -> tuple[Moment, ...]:
    """Of one block of the layers, the last operator first."""
    with torch.device("meta"):
        to = torch.empty(ROWS, dtype=torch.long) if words else torch.empty(ROWS, WIDTH)
        loss = F.cross_entropy if words else F.mse_loss
        of = cut(stack(*layers), (torch.empty(ROWS, WIDTH), to), loss, precision="fp32")
    own = BlockLayouts(of.graph, of.table, of.graph.blocks[block], 1)
    pricer = Pricer(graph=of.graph, table=of.table, setting=setting_on(busy(), rows=ROWS))
    return price_pass(pricer, own, own.complete({}, {}), {}).course


def test_a_product_holds_its_gradients_beside_the_residual_ones() -> None:
    """`down`: of its result, its operand and x; `up`: of its result, and x's twice, to be added."""
    with torch.device("meta"):
        found = course(*(Layer(F.gelu) for _ in range(3)), block=1)
    products = [moment for moment in found if moment.parameters]
    assert [moment.during for moment in products] == [X + INNER + X, INNER + X + X]
    assert [moment.parameters for moment in products] == [(1,), (0,)]
    assert max(moment.during for moment in found) == X + 2 * INNER  # gelu's


def test_a_power_makes_two_temporaries() -> None:
    with torch.device("meta"):
        found = course(*(Layer(lambda y: y**3) for _ in range(3)), block=1)
    assert max(moment.during for moment in found) == X + 2 * INNER + 2 * INNER


def test_a_gradient_is_there_from_the_first_reader_on() -> None:
    with torch.device("meta"):
        found = course(*(Layer(F.gelu, WIDTH) for _ in range(3)), block=1)
    assert [moment.parameters for moment in found if moment.parameters] == [(0,)]


def test_a_loss_makes_its_log_softmax_again() -> None:
    with torch.device("meta"):
        layers = [Layer(F.gelu), Layer(F.gelu), nn.Linear(WIDTH, WORDS)]
        found = course(*layers, block=-1, words=True)
    assert max(moment.during for moment in found) == LOSS + 2 * LOGITS


def test_alternate_runs_every_other_product_again() -> None:
    """The first one's result stays; of the rest, gelu's is read."""
    own = price(busy()).repeats["alternate"]
    assert (own.seconds, own.freed_bytes) == (pytest.approx(0, abs=1e-20), INNER)
