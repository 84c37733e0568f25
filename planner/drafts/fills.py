"""What a schedule adds to equal stages: seconds to fill and drain, micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.costmodel.schedules import (
    SCHEDULES,
    Action,
    Moment,
    PipelineShape,
    Schedule,
    in_flight,
    moments,
)
from meshwright.costmodel.stages import Floats, InFlight, StageCosts
from meshwright.planner.drafts.space import groups_of


def filling_s(
    schedule: Schedule, costs: StageCosts[Any], shape: PipelineShape, validated: bool = False
) -> Floats:
    """Seconds that each device but one adds to fill and drain a pipeline of stages like these.
    `validated`: steps are, afterwards."""
    f, b, w = map(np.asarray, (costs.forward_s, costs.backward_s, costs.weight_s))
    fill = schedule.fill_s(f, b, w, shape)
    return np.maximum(fill - f, 0.0) if validated and schedule.staggered else fill


def in_turn_s(schedule: str, stages: int, m: int, groups: int, one_s: float) -> float:
    """Seconds in which m micro-batches go through a pipeline at least, of which each takes `one_s`
    to the last stage and back: the first stage has no more than N in flight, so that each enters
    when the Nth before it is back, ⌈m/N⌉ · one_s in all."""
    most = in_flight(schedule, stage=0, num_stages=stages, num_microbatches=m, num_devices=groups)
    return math.ceil(m / SCHEDULES[schedule].copies / most) * one_s


@lru_cache(maxsize=1024)
def held_at_peak(schedule: str, stages: int, m: int, groups: int) -> tuple[InFlight, ...]:
    """Per stage, the micro-batches in flight on its device at its peak, shared out evenly among the
    device's stages."""
    if stages == groups and not SCHEDULES[schedule].splits_backward:
        alone = [
            in_flight(schedule, stage=k, num_stages=stages, num_microbatches=m)
            for k in range(stages)
        ]
        return tuple(InFlight(active=min(n, m - 1), first=n) for n in alone)
    found = moments(schedule, num_stages=stages, num_microbatches=m, num_devices=groups)
    each = [_at_peak(own, stages // groups) for own in found]
    return tuple(each[g] for g in groups_of(schedule, groups, stages // groups))


def _at_peak(found: Sequence[Moment], stages: int) -> InFlight:
    """At the peak of a device with so many stages, of each."""
    split = any(one.action is Action.BACKWARD_INPUT for one in found)
    if split:
        halves = [one for one in found if one.action is Action.BACKWARD_INPUT]
        most = max(halves, key=lambda one: sum(one.active) + sum(one.put_off))
        return InFlight(sum(most.active) / stages, sum(most.put_off) / stages, split=True)
    backwards = [one for one in found if one.action is Action.BACKWARD]
    later = [sum(one.active) for one in backwards if any(one.later)]
    first = [sum(one.active) for one in backwards if not any(one.later)]
    return InFlight(max(later, default=0) / stages, first=max(first, default=0) / stages)
