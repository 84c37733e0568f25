"""A schedule's additions to equal stages: seconds to fill and drain, micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.costmodel.schedules import Action, Moment, Pipeline, in_flight, moments
from meshwright.costmodel.stages import Floats, InFlight, StageCosts, late_at


def filling_s(pipeline: Pipeline, costs: StageCosts[Any], *, validated: bool = False) -> Floats:
    """Seconds that each device but one adds to fill and drain a pipeline of such stages."""
    f, b, w = map(np.asarray, (costs.forward_s, costs.backward_s, costs.weight_s))
    fill = pipeline.record.fill_s(f, b, w, pipeline.shape)
    return np.maximum(fill - f, 0.0) if validated and pipeline.record.staggered else fill


def in_turn_s(pipeline: Pipeline, one_s: float, send_s: float) -> float:
    """Lower bound on the seconds of the m micro-batches of a copy of the model, `one_s` to the last
    stage and back. A micro-batch enters when the Nth before it is back, N those in flight on the
    first stage: ⌈m/N⌉ · one_s in all. Between two stages, `send_s` a message, one message follows
    the other: one_s + (m-1) · send_s. Where steps don't end together, m/N · one_s and m · send_s.
    """
    microbatches = pipeline.num_microbatches / pipeline.record.copies
    turns = microbatches / in_flight(pipeline, 0)
    if not pipeline.record.flushes:
        return max(turns * one_s, microbatches * send_s)
    return max(math.ceil(turns) * one_s, one_s + (microbatches - 1) * send_s)


@lru_cache(maxsize=1024)
def held_at_peak(pipeline: Pipeline) -> tuple[InFlight, ...]:
    """Per stage, its even share of the micro-batches in flight at its device's peak."""
    alike = pipeline.each == 1 or pipeline.depths
    if alike and not pipeline.record.splits_backward:
        alone = [in_flight(pipeline, k) for k in range(pipeline.num_stages)]
        m = pipeline.num_microbatches
        if not pipeline.record.flushes:
            return tuple(
                InFlight(n, 0.0, n, False, *late_at(pipeline, k)) for k, n in enumerate(alone)
            )
        return tuple(InFlight(active=min(n, m - 1), first=n) for n in alone)
    of_devices = zip(moments(pipeline), pipeline.placed, strict=True)
    devices = [_at_peak(held, len(stages)) for held, stages in of_devices]
    return tuple(devices[device] for device in pipeline.device_of)


def _at_peak(device_moments: Sequence[Moment], stages: int) -> InFlight:
    """Micro-batches in flight of each of a device's stages, at its peak."""
    halves = [moment for moment in device_moments if moment.action is Action.BACKWARD_INPUT]
    if halves:
        most = max(halves, key=lambda moment: sum(moment.active) + sum(moment.put_off))
        return InFlight(sum(most.active) / stages, sum(most.put_off) / stages, split=True)
    backwards = [moment for moment in device_moments if moment.action is Action.BACKWARD]
    later = [sum(moment.active) for moment in backwards if any(moment.later)]
    first = [sum(moment.active) for moment in backwards if not any(moment.later)]
    return InFlight(max(later, default=0) / stages, first=max(first, default=0) / stages)
