"""What a layer keeps and pays where gathered inputs are gathered again in the backward."""

from __future__ import annotations

import pytest

from meshwright.costmodel.kernels.collectives import Group, collective_time
from meshwright.profiles.cluster import Cluster
from tests.costmodel.blocks.test_block_memory import A, B, H, S, layer_price


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sequence_parallel_layer_is_the_closed_form(tp: int) -> None:
    """Section 4.2.2 there: s·b·h·34/t, of which the two inputs that are gathered, 2 bytes each, are
    whole unless they are gathered again."""
    price = layer_price(0.1, tp, sequence=True)
    statistics = (4 * 4 * B * S + 4 * B * S * A) / tp
    kept = price.saved_bytes + price.input_bytes
    assert kept == B * S * H * (4 + 30 / tp) + statistics
    assert kept - price.repeats["regather"].freed_bytes == B * S * H * 34 / tp + statistics


def test_gathers_again_are_hidden_beside_products_alone() -> None:
    """The seconds of two gathers, less what the last product's weight gradient hides of them."""
    again = layer_price(0.1, 4, sequence=True).repeats["regather"]
    group = Group(size=4, per_node=4, concurrent=1)
    cluster = Cluster.from_catalog("h100-sxm")
    whole = 2 * float(collective_time("all_gather", B * S * H * 2, group, cluster))
    assert 0 < again.seconds == again.comm_s < whole
