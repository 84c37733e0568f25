"""Quantiles of prices' errors: the most particular group that has rows enough."""

from __future__ import annotations

import pytest

from meshwright.costmodel.intervals import memory_quantiles, step_quantiles
from meshwright.profiles.hardware.catalog_reader import catalog_names

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
