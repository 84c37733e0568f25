"""What a schedule adds to equal stages: seconds to fill and drain, micro-batches in flight."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.costmodel.schedules import PipelineShape, Schedule, peak_activation
from meshwright.costmodel.stages import Floats, StageCosts
from meshwright.planner.drafts.space import groups_of


def filling_s(
    schedule: Schedule, costs: StageCosts[Any], shape: PipelineShape, validated: bool = False
) -> Floats:
    """Seconds that each device but one adds to fill and drain a pipeline of stages like these.
    `validated`: steps are, afterwards."""
    f, b, w = map(np.asarray, (costs.forward_s, costs.backward_s, costs.weight_s))
    fill = schedule.fill_s(f, b, w, shape)
    return np.maximum(fill - f, 0.0) if validated and schedule.staggered else fill


@lru_cache(maxsize=1024)
def held_at_peak(schedule: str, stages: int, m: int, groups: int) -> tuple[float, ...]:
    """Per stage, the micro-batches in flight on its device at its peak, shared out evenly among the
    device's stages."""
    peaks = peak_activation(
        schedule, num_microbatches=m, bytes_per_stage=[1.0] * stages, num_devices=groups
    )
    return tuple(peaks[g] * groups / stages for g in groups_of(schedule, groups, stages // groups))
