"""Bytes that stages hold at their peak, and whether they fit: the one place that says so.

A stage holds its states, buffers and what one backward needs (`static_bytes`), and the activations
of its micro-batches in flight (`activation_bytes` each). Stages that take turns on a device group
hold their states together, but only one of them is in a backward, and their activations need not
peak at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.schedules import peak_activation, stages_of_devices
from meshwright.costmodel.stages.stage import StageCosts
from meshwright.costmodel.stages.sums import Floats
from meshwright.profiles.cluster import Cluster


def room_bytes(cluster: Cluster, stages: int = 1) -> float:
    """Bytes of a device that tensors may take, or each of the stages that share it evenly."""
    return cluster.device.usable_bytes / stages


@overload
def stage_bytes(static_bytes: float, activation_bytes: float, in_flight: float) -> float: ...
@overload
def stage_bytes(
    static_bytes: Floats, activation_bytes: Floats, in_flight: float | Floats
) -> Floats: ...
def stage_bytes(
    static_bytes: float | Floats, activation_bytes: float | Floats, in_flight: float | Floats
) -> float | Floats:
    """Bytes that stages hold with so many micro-batches in flight."""
    return static_bytes + in_flight * activation_bytes


@overload
def fits(used_bytes: float, room: float) -> bool: ...
@overload
def fits(used_bytes: Floats, room: float) -> NDArray[np.bool_]: ...
def fits(used_bytes: float | Floats, room: float) -> bool | NDArray[np.bool_]:
    """Whether so many bytes fit."""
    return used_bytes <= room


def peak_bytes(
    stages: Sequence[StageCosts[float]],
    cluster: Cluster,
    *,
    schedule: str,
    num_microbatches: int,
    num_devices: int,
) -> list[int]:
    """Bytes of a device of each device group at its peak, reserved ones included: the states of all
    its stages, the most that is in flight, and the most that one backward holds besides."""
    active = peak_activation(
        schedule,
        num_microbatches=num_microbatches,
        bytes_per_stage=[own.activation_bytes for own in stages],
        num_devices=num_devices,
    )
    peaks = []
    placed = stages_of_devices(schedule, num_stages=len(stages), num_devices=num_devices)
    for device, members in enumerate(placed):
        states = sum(stages[k].kept_bytes for k in members)
        passing = max(stages[k].passing_bytes for k in members)
        peaks.append(math.ceil(states + passing + active[device] + cluster.device.reserved_bytes))
    return peaks


def shortfall_bytes(peaks: Sequence[int], cluster: Cluster) -> list[int]:
    """Bytes by which each device group's peak exceeds its devices' memory; 0 where it fits."""
    return [max(0, peak - cluster.device.memory_bytes) for peak in peaks]
