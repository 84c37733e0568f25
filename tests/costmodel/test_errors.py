"""Errors of prices by device, and the slowest of many nodes."""

from __future__ import annotations

import pytest

from meshwright.costmodel.errors import ALL_GPUS, NODE_SCATTER, compute_error, slowest_of


def test_errors_are_of_the_gpus_generation() -> None:
    assert compute_error("a100-40gb") == compute_error("a100-80gb")
    assert compute_error("h100-sxm") != compute_error("a100-40gb")
    assert compute_error("rtx-4090") == ALL_GPUS.fraction


def test_one_node_waits_for_nobody() -> None:
    assert slowest_of(1) == 1


def test_the_slowest_of_two_nodes() -> None:
    """The larger of two normal variables is sqrt(1/pi) deviations above the mean."""
    assert slowest_of(2) == pytest.approx(1 + NODE_SCATTER * 0.564, abs=0.001)


def test_more_nodes_wait_longer_ever_more_slowly() -> None:
    steps = [slowest_of(4 * n) - slowest_of(n) for n in (1, 4, 16, 64)]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)
