"""Errors of prices by device, the slowest of many nodes, and quantiles of the errors: of the most
particular group that has rows enough."""

from __future__ import annotations

import pytest

from meshwright.costmodel.errors import ALL_GPUS, NODE_SCATTER, compute_error, slowest_of
from meshwright.costmodel.intervals import memory_quantiles, step_quantiles
from meshwright.profiles.hardware.catalog_reader import catalog_names


def test_errors_are_of_the_gpus_generation() -> None:
    assert compute_error("a100-40gb") == compute_error("a100-80gb")
    assert compute_error("h100-sxm") != compute_error("a100-40gb")
    assert compute_error("rtx-4090") == ALL_GPUS.fraction


def test_the_slowest_of_two_nodes() -> None:
    """The larger of two normal variables is sqrt(1/pi) deviations above the mean."""
    assert slowest_of(1) == 1
    assert slowest_of(2) == pytest.approx(1 + NODE_SCATTER * 0.564, abs=0.001)


def test_more_nodes_wait_longer_ever_more_slowly() -> None:
    steps = [slowest_of(4 * n) - slowest_of(n) for n in (1, 4, 16, 64)]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)


TARGETS = ("eager", "megatron", "megatron-lm", "fsdp", "alpa")


@pytest.mark.parametrize("experts", [False, True])
def test_every_device_and_target_has_an_interval_around_its_prices(experts: bool) -> None:
    for device in (*catalog_names(), "local-cpu"):
        for target in TARGETS:
            for found in (
                step_quantiles(device, target, experts=experts),
                memory_quantiles(device, target, experts=experts),
            ):
                assert 0.3 < found.low < found.high < 3
                assert found.rows >= 20 or found.of == "all"


def test_the_most_particular_group_is_taken() -> None:
    assert step_quantiles("a100-80gb", "megatron-lm", experts=False).of.endswith("megatron-lm")
    assert step_quantiles("a100-80gb", "eager", experts=False).of == "a100, dense"
    assert step_quantiles("rtx-4090", "eager", experts=False).of == "dense"
