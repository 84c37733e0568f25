"""The price of a block by hand: a residual perceptron, where one resource alone costs; what its
backward holds of activations' gradients, operator by operator."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.blocks.price import BlockPrice, PassNeeds, price_block, price_pass
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.layouts import BlockLayouts, Entry
from meshwright.costmodel.stages.sums import LATER, block_sums
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from tests.costmodel.blocks.test_block_memory import stack
from tests.costmodel.operators.test_pricing import busy, hosted, talking
from tests.helpers.planning import Traced, changed, cut, setting_on

ROWS, WIDTH, WIDE = 4, 8, 32
UP = 2 * ROWS * WIDTH * WIDE  # FLOPs of either product
X, INNER = 4 * ROWS * WIDTH, 4 * ROWS * WIDE  # bytes of what enters, and of what is inside


class Layer(nn.Module):
    """A residual perceptron; a square one runs the same weights twice."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = F.gelu, wide: int = WIDE):
        super().__init__()
        self.act = act
        self.up = nn.Linear(WIDTH, wide, bias=False)
        self.down = self.up if wide == WIDTH else nn.Linear(wide, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


@cache
def layers() -> Traced:
    with torch.device("meta"):
        batch = (torch.empty(ROWS, WIDTH),) * 2
        return cut(stack(*(Layer() for _ in range(3))), batch, F.mse_loss, precision="fp32")


def price(on: Cluster, tp: int = 1, **given: Any) -> BlockPrice:
    """Of the layer in the middle; with several ranks split as Megatron does."""
    of = layers()
    (block,) = (block for block in of.graph.blocks if block.name == "layers.1")
    layouts = BlockLayouts(of.graph, of.table, block, tp)
    up = next(op for op in block.ops if op.short == "linear")
    entries = {up.name: Entry(strategy="colwise")} if tp > 1 else {}
    setting = setting_on(on, **{"tp": tp, "rows": ROWS, **given})
    prices = Pricer(graph=of.graph, table=of.table, setting=setting)
    return price_block(prices, layouts, layouts.complete(entries, {}), {})


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_work_and_memory_are_those_of_its_operators(tp: int) -> None:
    found = price(busy(), tp)
    cost, passes = found.cost, found.passes
    assert (cost.forward_s, cost.backward_s) == pytest.approx((2 * UP / tp, 4 * UP / tp))
    assert cost.weight_s == pytest.approx(2 * UP / tp)
    assert (passes.saved_bytes, passes.input_bytes) == (2 * INNER / tp, X)  # of gelu, and of `down`
    # `up` has made its input's gradient, and holds its weight's, the kept ones being let go
    assert found.parameters == found.unit_parameters == 2 * WIDTH * WIDE / tp
    assert found.shard_parameters == found.parameters and not found.frozen_bytes
    by_parameter = dataclasses.replace(EAGER, unit="parameter")
    assert price(busy(), tp, target=by_parameter).unit_parameters == WIDTH * WIDE / tp
    assert price(busy(), tp, dp=4 // tp).shard_parameters == found.parameters / (4 // tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_each_pass_sums_over_the_ranks_once(tp: int) -> None:
    each = 2 * X * (tp - 1) / tp
    cost = price(talking(), tp).cost
    assert (cost.forward_comm_s, cost.backward_comm_s) == pytest.approx((each, each))
    assert (cost.forward_s, cost.backward_s) == (cost.forward_comm_s, cost.backward_comm_s)


@pytest.mark.parametrize(
    ("policy", "seconds", "freed", "kernels"),
    [
        ("selective", 0, 0, 0),
        ("pointwise", 0, INNER, 1),  # gelu, of what `up` made
        ("widening", UP, 2 * INNER, 2),  # and `up`, of what entered
        ("products", UP, 2 * INNER, 2),  # what `down` made nobody reads
        ("full", UP, 2 * INNER, 2),
    ],
)
def test_policies(policy: str, seconds: float, freed: float, kernels: int) -> None:
    own = price(busy()).passes.repeats[policy]
    assert (own.seconds, own.comm_s, own.freed_bytes) == pytest.approx((seconds, 0, freed))
    assert price(hosted()).passes.repeats[policy].host_s == pytest.approx(kernels)
    whole = price(busy(), target=dataclasses.replace(EAGER, repeats_whole=True)).passes.repeats
    assert whole[policy].seconds == pytest.approx(2 * UP if policy == "full" else seconds)
    sums = block_sums(price(busy()))
    again = sums.recompute(policy)
    assert (again.seconds, again.freed_bytes) == (own.seconds, own.freed_bytes)
    decided = sums.with_policy(policy)
    assert decided.backward_s == sums.backward_s + own.seconds
    assert decided.saved_bytes == 2 * INNER - freed
    assert decided.recompute("full").seconds == 0  # no policy changes it any more
    both = sums.recompute_by(["none", policy])
    assert both.seconds.tolist() == [0, own.seconds]
    assert (both.excess[:, 1] == again.excess).all() and again.excess[LATER] >= freed
    assert (decided.excess == again.excess[:, None]).all()


def test_what_a_price_depends_on() -> None:
    """Statistics and losses on the data axis, experts on their own; the rest on neither."""
    setting = setting_on(busy(), rows=ROWS)
    named = (("dp", 2), ("dp", 4), ("microbatches", 2), ("ep", 2), ("ep", 4))
    changes: list[dict[str, Any]] = [{}, *({name: count} for name, count in named)]
    for needs, differ in (
        (PassNeeds(met=False, loss=False, experts=False), 2),
        (PassNeeds(met=True, loss=False, experts=False), 4),
        (PassNeeds(met=False, loss=True, experts=False), 4),
        (PassNeeds(met=False, loss=False, experts=True), 3),
    ):
        narrowed = (needs.narrowed(changed(setting, **change)) for change in changes)
        assert len({(own.mesh, own.batch) for own in narrowed}) == differ, needs


WORDS = 24
LOGITS, LOSS = 4 * ROWS * WORDS, 4


def course(*layers: nn.Module, block: int, words: bool = False) -> tuple[Moment, ...]:
    """Of one block of the layers, the last operator first."""
    with torch.device("meta"):
        to = torch.empty(ROWS, dtype=torch.long) if words else torch.empty(ROWS, WIDTH)
        loss = F.cross_entropy if words else F.mse_loss
        model = stack(*layers).to("meta")
        of = cut(model, (torch.empty(ROWS, WIDTH), to), loss, precision="fp32")
    own = BlockLayouts(of.graph, of.table, of.graph.blocks[block], 1)
    pricer = Pricer(graph=of.graph, table=of.table, setting=setting_on(busy(), rows=ROWS))
    return price_pass(pricer, own, own.complete({}, {}), {}).course


def test_temporaries_and_gradients_of_a_backward() -> None:
    """`down`: of its result, its operand and x; `up`: of its result, and x's twice, to be added."""
    found = course(*(Layer() for _ in range(3)), block=1)
    products = [moment for moment in found if moment.parameters]
    assert [moment.during for moment in products] == [X + INNER + X, INNER + X + X]
    assert [moment.parameters for moment in products] == [(1,), (0,)]
    assert max(moment.during for moment in found) == X + 2 * INNER  # gelu's
    found = course(*(Layer(lambda y: y**3) for _ in range(3)), block=1)
    assert max(moment.during for moment in found) == X + 2 * INNER + 2 * INNER
    found = course(*(Layer(wide=WIDTH) for _ in range(3)), block=1)
    assert [moment.parameters for moment in found if moment.parameters] == [(0,)]
    found = course(Layer(), Layer(), nn.Linear(WIDTH, WORDS), block=-1, words=True)
    assert max(moment.during for moment in found) == LOSS + 2 * LOGITS


def test_alternate_runs_every_other_product_again() -> None:
    """The first one's result stays; of the rest, gelu's is read."""
    own = price(busy()).passes.repeats["alternate"]
    assert (own.seconds, own.freed_bytes) == (pytest.approx(0, abs=1e-20), INNER)
