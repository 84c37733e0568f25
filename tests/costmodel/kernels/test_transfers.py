"""Sends between stages: which cross a node, and how many share its NICs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.kernels.transfers import crosses_node, packed, send_seconds
from meshwright.costmodel.targets import EAGER
from tests.helpers.planning import cluster

SIZES = st.integers(1, 40)
NODES = st.integers(1, 9)
# one byte takes a second inside a node, 100 between nodes
SLOW = cluster(4, nodes=4, bandwidth=1.0, node_bandwidth=1e-2)


def sent(source: range, destination: range, *, tp: int = 1, scatter: bool = False) -> float:
    target = dataclasses.replace(EAGER, scatter_sends=scatter)
    return send_seconds(8.0, source, destination, tp=tp, cluster=SLOW, target=target)


@given(SIZES, SIZES, SIZES, NODES)
def test_contiguous_stages_cross_where_they_touch_different_nodes(
    first: int, one: int, two: int, node: int
) -> None:
    source, destination = range(first, first + one), range(first + one, first + one + two)
    touched = [{rank // node for rank in side} for side in (source, destination)]
    assert crosses_node(source, destination, node) == (touched[0] != touched[1])
    assert crosses_node(source, destination, node) == crosses_node(destination, source, node)
    assert packed(source, node) == min(one, node)


def test_stages_inside_each_node_send_inside_it() -> None:
    """Four stages of four ranks, one on each node: the pipeline runs inside the nodes."""
    first, second, third = (range(k, 16, 4) for k in range(3))
    assert sent(first, second) == sent(second, third) == pytest.approx(8)
    assert packed(first, 4) == 1


def test_two_stages_a_node_share_its_nics_by_two() -> None:
    """Ranks 0, 1, 4, 5 send to 8, 9, 12, 13: two of each node."""
    nodes = [0, 1, 4, 5], [8, 9, 12, 13]
    seconds = send_seconds(8.0, *nodes, tp=2, cluster=SLOW, target=EAGER)
    assert seconds == pytest.approx(8 * 100 * 2)
    assert sent(range(4), range(4, 8)) == pytest.approx(8 * 100 * 4)


def test_tensor_ranks_send_their_parts_and_gather() -> None:
    whole = sent(range(2), range(2, 4), tp=2)
    assert whole == pytest.approx(8)
    assert sent(range(2), range(2, 4), tp=2, scatter=True) == pytest.approx(4 + 4)


def test_the_same_ranks_hand_over_what_they_hold() -> None:
    assert sent(range(4), range(4)) == 0
