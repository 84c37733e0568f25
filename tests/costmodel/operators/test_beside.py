"""What a product hides of the collective it belongs to, against a simulated ring."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.costmodel.sharding.strategies import P, Placement
from meshwright.costmodel.targets import EAGER
from tests.costmodel.operators.test_pricing import ENDLESS, LENGTH, ROWS, WIDE, WIDTH, net, pricer
from tests.helpers.planning import cluster


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
