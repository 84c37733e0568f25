"""What a schedule adds to equal stages: seconds to fill and drain, micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.costmodel.schedules import Action, Moment, Pipeline, in_flight, moments
from meshwright.costmodel.stages import Floats, InFlight, StageCosts


def filling_s(own: Pipeline, costs: StageCosts[Any], *, validated: bool = False) -> Floats:
    """Seconds that each device but one adds to fill and drain a pipeline of stages like these.
    `validated`: steps are, afterwards."""
    f, b, w = map(np.asarray, (costs.forward_s, costs.backward_s, costs.weight_s))
    fill = own.record.fill_s(f, b, w, own.shape)
    return np.maximum(fill - f, 0.0) if validated and own.record.staggered else fill


def in_turn_s(own: Pipeline, one_s: float) -> float:
    """Seconds in which the m micro-batches of a copy of the model go through it at least, of which
    each takes `one_s` to the last stage and back: the first stage has no more than N in
    flight, so that each enters when the Nth before it is back, ⌈m/N⌉ · one_s in all."""
    of_one_copy = own.num_microbatches / own.record.copies
    return math.ceil(of_one_copy / in_flight(own, 0)) * one_s


@lru_cache(maxsize=1024)
def held_at_peak(own: Pipeline) -> tuple[InFlight, ...]:
    """Per stage, the micro-batches in flight on its device at its peak, shared out evenly among the
    device's stages."""
    if own.each == 1 and not own.record.splits_backward:
        alone = [in_flight(own, k) for k in range(own.num_stages)]
        return tuple(InFlight(active=min(n, own.num_microbatches - 1), first=n) for n in alone)
    each = [_at_peak(held, own.each) for held in moments(own)]
    return tuple(each[device] for device in own.device_of)


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
