"""What stages hold at their peak, and whether it fits."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.costmodel.stages.peak import (
    fits,
    peak_bytes,
    room_bytes,
    shortfall_bytes,
    stage_bytes,
)
from meshwright.costmodel.stages.stage import StageCosts
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster


def reserving(reserved_bytes: int, memory_bytes: float) -> Cluster:
    on = cluster(2, memory_bytes=memory_bytes)
    return dataclasses.replace(
        on, device=dataclasses.replace(on.device, reserved_bytes=reserved_bytes)
    )


def stage(static_bytes: float, passing_bytes: float, activation_bytes: float) -> StageCosts[float]:
    costs = {each.name: 0.0 for each in dataclasses.fields(StageCosts)}
    costs |= {"static_bytes": static_bytes, "passing_bytes": passing_bytes}
    return StageCosts(**costs | {"activation_bytes": activation_bytes})


def test_stages_hold_their_states_and_what_is_in_flight() -> None:
    assert stage_bytes(100.0, 7.0, 3) == 121
    used = stage_bytes(np.array([100.0, 200.0]), np.array([7.0, 5.0]), 3)
    np.testing.assert_array_equal(fits(used, 121.0), [True, False])


def test_tensors_may_take_what_is_not_reserved() -> None:
    assert room_bytes(reserving(100, 1000)) == 900
    assert room_bytes(reserving(100, 1000), stages=2) == 450


def test_a_plan_lacks_what_its_peaks_exceed_the_memory_by() -> None:
    """1F1B: the first of two stages has two micro-batches in flight, the last one."""
    on = reserving(100, 1000)
    stages = [stage(700.0, 50.0, 150.0), stage(700.0, 50.0, 150.5)]
    peaks = peak_bytes(stages, on, schedule="1f1b", num_microbatches=4, num_devices=2)
    assert peaks == [700 + 2 * 150 + 100, 951]
    assert shortfall_bytes(peaks, on) == [100, 0]


def test_stages_of_one_device_are_never_in_a_backward_together() -> None:
    on = reserving(0, 1000)
    stages = [stage(100.0, passing, 0.0) for passing in (10.0, 40.0, 30.0, 20.0)]
    peaks = peak_bytes(stages, on, schedule="zb_v", num_microbatches=4, num_devices=2)
    assert peaks == [90 + 80 + 20, 60 + 70 + 40]
