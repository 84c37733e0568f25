"""Micro-batches that a device holds at the moments of a step that can be its peak.

Along a stream (`schedule.py`) a forward adds a micro-batch, its backward lets it go. Where a
backward is split, its first half leaves what the second one needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.schedules.orders import Action, Compute
from meshwright.costmodel.schedules.schedule import (
    RECEIVES,
    SENDS,
    Instruction,
    ScheduleError,
    build_schedule,
)
from meshwright.costmodel.schedules.table import Pipeline, check_count, compute_orders
from meshwright.costmodel.target import POSTED_AHEAD

_FIRST = (Action.BACKWARD, Action.BACKWARD_INPUT)
_LAST = (Action.BACKWARD, Action.BACKWARD_WEIGHT)


class Message(NamedTuple):
    """A message of a stage: `action`, and the stage at the other end."""

    stage: int
    action: Action
    peer: int


class Moment(NamedTuple):
    """A device in an instruction of a stage: of each of its stages in their order the micro-batches
    that are `active`, from their forward to the end of the backward that is not put off, this one
    included, those that are `put_off` then, and whether a backward of it was done (`later`), or one
    that is split was `begun`; whether it is (part of) the stage's `last` one; and the messages that
    are posted, or on their way."""

    action: Action
    stage: int
    active: tuple[int, ...]
    put_off: tuple[int, ...]
    later: tuple[bool, ...]
    begun: tuple[bool, ...]
    last: bool
    messages: tuple[Message, ...]


def moments(
    pipeline: Pipeline, edges: frozenset[tuple[int, int]] | None = None
) -> tuple[tuple[Moment, ...], ...]:
    """Per device, moments at which it may hold most, without messages where no `edges` are given.
    Raises ValueError as `build_schedule`."""
    return _moments(fewest_alike(pipeline), edges)


def fewest_alike(pipeline: Pipeline) -> Pipeline:
    """The pipeline of fewest micro-batches that has the same moments."""
    count, each = pipeline.num_microbatches, pipeline.round
    at = range(pipeline.num_stages) if pipeline.depths else (0, pipeline.num_stages - 1)
    ends = [pipeline.most_in_flight(k) for k in at]
    # the schedules repeat themselves, in rounds
    warm = 5 * each
    if (most := max(filter(None, ends), default=None)) is not None:
        warm = most + 2 * pipeline.slices
    few = min(count, warm + (count - warm) % each)
    return pipeline._replace(num_microbatches=few)


def in_flight(pipeline: Pipeline, stage: int) -> int:
    """Peak number of micro-batches in flight on `stage`: from their F to the end of their backward,
    which is W where the backward is split. Raises ValueError as `build_schedule`, and for a stage
    that is not in the pipeline."""
    placed, count, m = pipeline.placed, pipeline.num_stages, pipeline.num_microbatches
    check_count("num_microbatches", m)
    if not 0 <= stage < count:
        raise ScheduleError(f"stage={stage}: a pipeline of {count} has 0..{count - 1}")
    if (most := pipeline.most_in_flight(stage)) is not None:
        return min(most, m) if pipeline.record.flushes else most
    device = pipeline.device_of[stage]
    at = placed[device].index(stage)
    return max(one.active[at] + one.put_off[at] for one in moments(pipeline)[device])


def least_in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """Per device, micro-batches of its stage with fewest, at its peak in a backward behind others
    of the step, if there are any. Raises ValueError as `build_schedule`."""
    return tuple(
        max(min(moment.active) for moment in [m for m in held if all(m.later)] or held)
        for held in moments(pipeline)
    )


@lru_cache(maxsize=256)
def _moments(
    pipeline: Pipeline, edges: frozenset[tuple[int, int]] | None
) -> tuple[tuple[Moment, ...], ...]:
    streams: list[Sequence[Compute | Instruction]] = []
    streams += compute_orders(pipeline) if edges is None else build_schedule(pipeline, edges)
    m = 0 if pipeline.record.flushes else pipeline.num_microbatches
    return tuple(
        tuple(_highest(_followed({k: pipeline.left(k) for k in stages}, stream, m)))
        for stages, stream in zip(pipeline.placed, streams, strict=True)
    )


def _followed(
    left: Mapping[int, int], stream: Sequence[Compute | Instruction], m: int
) -> Iterator[Moment]:
    """The moments of a stream, which begins with micro-batches `left` to it by the step before,
    whose steps of `m` end apart."""
    stages = [*left]
    active, put_off = dict(left), dict.fromkeys(stages, 0)
    done = {k: (-n) % m > 0 if m else False for k, n in left.items()}
    begun = dict(done)
    receives = [_message(i) for i in stream if i.action in RECEIVES]
    ending = (i for i in stream if i.action in _LAST and (not m or i.microbatch % m == m - 1))
    ends = {i.stage: i.microbatch for i in ending}
    taken, posted, sending = 0, list[Message](), list[Message]()
    for instruction in stream:
        action, stage = instruction.action, instruction.stage
        if action in RECEIVES:
            taken += 1
            posted = receives[taken : taken + POSTED_AHEAD]
            continue
        if action in SENDS:
            sending = [_message(instruction)]
            continue
        if action is Action.FORWARD:  # what follows holds as much
            active[stage] += 1
        if action not in (*_FIRST, *_LAST):
            continue
        yield Moment(
            action=action,
            stage=stage,
            active=tuple(active.values()),
            put_off=tuple(put_off.values()),
            later=tuple(done.values()),
            begun=tuple(begun.values()),
            last=instruction.microbatch == ends[stage],
            messages=tuple(sorted(posted + sending)),
        )
        if action in _FIRST:
            active[stage] -= 1
        begun[stage] = True
        if action is Action.BACKWARD_INPUT:
            put_off[stage] += 1
        if action is Action.BACKWARD_WEIGHT:
            put_off[stage] -= 1
        if action in _LAST:
            done[stage] = True
        if m and instruction.microbatch % m == m - 1:
            done[stage] = begun[stage] = False


def _message(instruction: Compute | Instruction) -> Message:
    assert isinstance(instruction, Instruction) and instruction.peer is not None
    return Message(instruction.stage, instruction.action, instruction.peer)


def _highest(candidates: Iterable[Moment]) -> list[Moment]:
    """Moments that no other of their kind exceeds everywhere."""
    kinds: dict[object, list[Moment]] = {}
    for one in dict.fromkeys(candidates):
        kinds.setdefault((one.action, one.stage, one.later, one.begun, one.last), []).append(one)
    return [one for moments in kinds.values() for one in _unexceeded(moments)]


def _unexceeded(alike: Sequence[Moment]) -> list[Moment]:
    """Moments of a kind that no other one holds as much as of everything."""
    if len(alike) == 1:
        return [*alike]
    kinds = sorted({message for one in alike for message in one.messages})
    counts = np.array(
        [
            [*one.active, *one.put_off, *(one.messages.count(message) for message in kinds)]
            for one in alike
        ]
    )
    holds_as_much = (counts[:, None] >= counts).all(axis=2).sum(axis=0)  # itself, too
    return [one for one, more in zip(alike, holds_as_much, strict=True) if more == 1]
