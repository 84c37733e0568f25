"""Steps of a schedule without a flush: many in a row, of which one is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter

from meshwright.costmodel.schedules.orders import Action
from meshwright.costmodel.schedules.schedule import FORWARD_MESSAGES, Instruction, Streams, unrolled
from meshwright.costmodel.schedules.simulate import (
    Event,
    SliceTimes,
    StageTimes,
    Timeline,
    TimeSlot,
    _play,
    _seconds,
    _start_s,
    event_of,
    program_of,
    simulate,
)
from meshwright.costmodel.schedules.table import Pipeline

MOST_STEPS, MOST_MICROBATCHES = 16, 256  # of which a step's seconds are the mean
SETTLED = 8  # times the devices' number of micro-batches, after which steps repeat themselves


@dataclass(frozen=True, kw_only=True)
class SteadyTimeline(Timeline):
    """A step of a schedule without a flush, behind and before many others: `step_time_s` is the
    time from one to the next, and its events those of a call of `count` micro-batches, the
    `call`-th from `start_s` on."""

    count: int
    call: int
    start_s: float

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Computes, sends and reductions of the call, by start; micro-batches below 0 are of
        earlier steps."""
        program, end_s, events = self._program, self._end_s, list[Event]()
        shift, deep = self.call * self.count, program.num_stages - 1
        for n, i in enumerate(program.instructions, start=1):
            if i is None or _call_of(i, deep, self.count) != self.call:
                continue
            i = replace(i, microbatch=i.microbatch - shift)
            times = (t - self.start_s for t in (_start_s(program, end_s, n), end_s[n]))
            event = event_of(i, **dict(zip(("start_s", "end_s"), times, strict=True)))
            if program.steps[n - 1][2] % len(TimeSlot) == TimeSlot.OPTIMIZER and i.peer is None:
                event = replace(event, track="compute", name="optimizer")
            events.append(event)
        return tuple(sorted(events, key=attrgetter("start_s", "stage", "track")))


def _call_of(i: Instruction, deep: int, count: int) -> int:
    """The call in which an instruction runs, of stages 0 to `deep`."""
    forward = i.action is Action.FORWARD or i.action in FORWARD_MESSAGES
    return (i.microbatch + (0 if forward else deep - i.stage)) // count


def simulate_steady(
    pipeline: Pipeline,
    streams: Streams,
    times: Sequence[StageTimes],
    transfer_s: Mapping[tuple[int, int], float],
) -> SteadyTimeline:
    """The timeline of a schedule without a flush, in its steady state: of a step as many steps in
    as it takes for what began it to end, and then each device's slowest cycle of stages to show.
    Raises as `simulate`."""
    count, p = pipeline.num_microbatches, pipeline.num_stages
    settled = 2 + math.ceil(SETTLED * p / count)
    # of a way of n micro-batches steps are alike after n / gcd(n, m)
    alike = math.lcm(*(n // math.gcd(n, count) for n in range(1, p + 1)))
    more = min(alike, MOST_STEPS, max(2, MOST_MICROBATCHES // count))
    program = program_of(_steps_in_a_row(streams, count, settled + more + 1))
    seconds = _seconds(program, times, transfer_s)
    end_s = _play(program, seconds)
    ends, starts = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    for n, i in enumerate(program.instructions, start=1):
        if i is not None and i.peer is None:
            key = i.stage, _call_of(i, p - 1, count)
            ends[key] = end_s[n]
            starts.setdefault(key, _start_s(program, end_s, n))
    period_s = max((ends[k, settled + more] - ends[k, settled]) / more for k in range(p))
    busy_s = tuple(count * (t.forward_s + t.backward_s) for t in times)
    once_s = max(t.reduce_s + t.optimizer_s for t in times)
    return SteadyTimeline(
        stages_of=program.stages_of,
        step_time_s=period_s,
        pipeline_s=max(period_s - once_s, *busy_s),
        busy_s=busy_s,
        span_s=(period_s,) * p,
        count=count,
        call=settled,
        start_s=min(starts[k, settled] for k in range(p)),
        _program=program,
        _end_s=end_s,
    )


def simulate_step(
    pipeline: Pipeline,
    streams: Streams,
    times: Sequence[StageTimes],
    transfer_s: Mapping[tuple[int, int], float],
    slices: Sequence[SliceTimes] = (),
) -> Timeline:
    """The timeline of a step: by itself, or where the schedule is not flushed among many."""
    if pipeline.record.flushes:
        return simulate(streams, times, transfer_s, slices)
    return simulate_steady(pipeline, streams, times, transfer_s)


@lru_cache(maxsize=64)
def _steps_in_a_row(streams: Streams, count: int, calls: int) -> Streams:
    return unrolled(streams, count, calls)
