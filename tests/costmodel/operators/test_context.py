"""Prices of the context axis by hand: what it divides, and what each kind of attention sends."""

from __future__ import annotations

import pytest

from tests.costmodel.operators.test_pricing import (
    ENDLESS,
    GELU,
    LENGTH,
    ROWS,
    SCORES,
    WIDTH,
    busy,
    costs,
    net,
    pricer,
    talking,
)
from tests.helpers.planning import cluster


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
