"""Prices of the context axis by hand: what it divides, what each kind of attention sends, tokens of
neighbours; what a product hides of the collective it belongs to, against a simulated ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.costmodel.sharding.strategies import P, Placement
from meshwright.costmodel.targets import EAGER
from tests.costmodel.operators.test_pricing import (
    ENDLESS,
    GELU,
    LENGTH,
    ROWS,
    SCORES,
    WIDE,
    WIDTH,
    busy,
    costs,
    moving,
    net,
    pricer,
    talking,
)
from tests.helpers.planning import Traced, cluster, cut
from tests.helpers.traced import with_forward


def test_context_parallelism_divides_activations_and_work() -> None:
    of = net()
    one, two = pricer(of, busy()), pricer(of, busy(), cp=2)
    for alone, shared in zip(costs(one, "linear"), costs(two, "linear"), strict=True):
        assert shared.forward_s == pytest.approx(alone.forward_s / 2)
        assert shared.backward_s == pytest.approx(alone.backward_s / 2)
    (alone,), (shared,) = (costs(p, "scaled_dot_product_attention") for p in (one, two))
    assert shared.forward_s == pytest.approx(alone.forward_s / 2)  # own queries, all keys
    (gelu,) = (op for op in of.graph.ops if op.short == "gelu")
    assert two.nbytes(gelu.results[0]) == one.nbytes(gelu.results[0]) / 2 == GELU / 2
    for value in of.graph.parameters:
        assert two.nbytes(value) == one.nbytes(value)


@pytest.mark.parametrize("cp", [2, 3])
def test_context_parallelism_gathers_keys_and_values(cp: int) -> None:
    """Of K and V together, (n-1)/n come from others; backward again, and their gradients go."""
    on = cluster(cp, flops=ENDLESS, memory_bandwidth=ENDLESS, bandwidth=1.0)
    (cost,) = costs(pricer(net(), on, cp=cp), "scaled_dot_product_attention")
    both = 2 * 4 * ROWS * LENGTH * WIDTH
    assert cost.forward_comm_s == pytest.approx(both * (cp - 1) / cp)
    assert cost.backward_comm_s == pytest.approx(2 * both * (cp - 1) / cp)
    assert not any(c.forward_comm_s for c in costs(pricer(net(), talking(), cp=2), "linear"))


def test_a_ring_hides_the_sends_behind_the_scores() -> None:
    """Where a device computes long enough; gradients of keys and values go all the way round."""
    on = cluster(4, flops=1.0, memory_bandwidth=ENDLESS, bandwidth=1e3)
    short = "scaled_dot_product_attention"
    (cost,) = costs(pricer(net(), on, cp=2, cp_kind="ring"), short)
    assert cost.forward_comm_s == cost.backward_comm_s == 0
    assert cost.forward_s == pytest.approx(SCORES)
    (slow,) = costs(pricer(net(), talking(), cp=2, cp_kind="ring"), short)
    one = 2 * 4 * ROWS * LENGTH * WIDTH / 2  # keys and values of a rank
    assert (slow.forward_comm_s, slow.backward_comm_s) == pytest.approx((one, 3 * one))


def test_ulysses_turns_tokens_into_heads_and_back() -> None:
    """q, k, v and the output, of which (n-1)/n go to others, either way."""
    found = pricer(net(), talking(), cp=2, cp_kind="ulysses")
    (cost,) = costs(found, "scaled_dot_product_attention")
    each = 4 * ROWS * LENGTH * WIDTH / 2
    assert cost.forward_comm_s == cost.backward_comm_s == pytest.approx(4 * each / 2)


TOKEN = 4 * ROWS * WIDTH


def traced(move: Callable[[Tensor], Tensor]) -> Traced:
    """A layer whose output is moved."""
    with torch.device("meta"):
        model = with_forward(lambda self, x: move(self.l(x)).square().mean())
        return cut(model, (torch.empty(ROWS, LENGTH, WIDTH),), None, precision="fp32")


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


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0, 100.0])
def test_a_product_hides_its_collective_part_by_part(rate: float) -> None:
    """By a simulation of a ring: of 4 parts the first one is there, each other arrives after one
    more send, and is multiplied once it has arrived and the one before is done."""
    on = cluster(4, flops=rate, memory_bandwidth=ENDLESS, bandwidth=1.0)
    target = dataclasses.replace(EAGER, overlap_tensor=("reduce_scatter",))
    plain, hidden = (pricer(net(), on, tp=4, target=each) for each in (EAGER, target))
    (down,) = (op for op in plain.graph.ops if op.results[0] == "linear_1")
    whole_s = 2 * ROWS * LENGTH * WIDE * WIDTH / 4 / rate
    sent_s = 4 * ROWS * LENGTH * WIDTH * 3 / 4
    done_s = 0.0
    for k in range(4):
        done_s = max(done_s, k * sent_s / 3) + whole_s / 4
    kept = Placement(kind="S", dim=1)
    cost = hidden.reshard(down.results[0], P, kept)
    assert cost is not None
    assert cost.forward_s == pytest.approx(max(done_s - whole_s, 0.0), rel=1e-6, abs=1e-6)
    without = plain.reshard(down.results[0], P, kept)
    assert without is not None
    assert without.forward_s == pytest.approx(sent_s)
    assert cost.backward_s == pytest.approx(without.backward_s)  # gathered, which is not hidden


def attends_causally(x: Tensor) -> Tensor:
    heads = x.view(ROWS, LENGTH, 2, WIDTH // 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@pytest.mark.parametrize(("cp", "late"), [(1, 1), (2, 3 / 2), (3, 1)])
def test_the_last_rank_has_most_of_causal_attention_but_in_zigzag(cp: int, late: float) -> None:
    """Half of the scores. Six tokens are two chunks for each of three ranks, not of two: there the
    second rank has 3/4 of them."""
    found = pricer(traced(attends_causally), busy(), cp=cp)
    (cost,) = costs(found, "scaled_dot_product_attention")
    assert cost.forward_s == pytest.approx(SCORES / cp * late)
