"""A step's memory in the course of time: the instruction streams of a plan run in mind.

`peak.py` adds up the most of everything, which never comes together: gradients grow as a backward
lets go of what the forward kept. Here a device group's stream is followed, in `train_step`'s terms:

    F       a micro-batch's kept activations are added; what it made for other stages alone is let
            go when it was sent
    B, I    block by block from the last: what the blocks up to this one keep, what this one makes
            again and the gradients it works on (`passing`), the gradients of parameters made so far
    B, W    what the micro-batch kept is let go
    step    weights, states and gradients, and what the optimizer makes beside them

The peak is the highest of these sums. Fragmentation is none of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.memory import GradientBytes, Reduction, Trained
from meshwright.costmodel.schedules import (
    SCHEDULES,
    Action,
    Instruction,
    build_schedule,
    stages_of_devices,
)
from meshwright.costmodel.target import POSTED_AHEAD

RECEIVES = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)
ALIKE = 4  # backwards of a step that differ: the first ones, one of those between, the last


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """What a block keeps of a micro-batch, and holds in all of its backward besides (`passing`:
    made again, or gathered), or in the part of it that is put off (`late`); that backward's
    moments, each with the parameters, by number in their stage, whose gradients it makes.
    `releases`: what is kept is let go on the way."""

    kept: float
    passing: float
    releases: bool
    course: Sequence[tuple[Moment, tuple[int, ...]]]
    late: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What a stage holds: `fixed` always, `optimizer` beside the gradients in the optimizer's step;
    its blocks and parameters in the order of the forward; of a micro-batch what it alone makes for
    other stages (`leaving`), and by stage what is `sent` there and `received`."""

    fixed: float
    optimizer: float
    blocks: Sequence[BlockBytes]
    leaving: float
    sent: Mapping[int, float]
    received: Mapping[int, float]
    trained: Sequence[Trained]
    reduction: Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes at once, and when: in the instruction (`action`) of a `stage`, in the backward
    of its block of that number; or in the optimizer's step, no action."""

    nbytes: float
    action: Action | None = None
    stage: int = 0
    block: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The most at once in a backward of a stage, with its own micro-batch's activations, that of
    which `block`, and the gradients that are left; what is `put_off` to a second half, and the most
    at once in that."""

    highest: float
    block: int
    left: float
    put_off: float = 0.0
    second: float = 0.0


class _Stage:
    """A stage on its way through a step."""

    def __init__(self, own: StageBytes, num_microbatches: int, *, split: bool) -> None:
        self.own = own
        self.kept = math.fsum(block.kept for block in own.blocks)
        seeds = sum(own.sent.values())
        self.fixed, self.optimizer = own.fixed, own.optimizer
        self.count, self.done = num_microbatches, 0
        gradients = GradientBytes(own.trained, own.reduction)
        self.passes: list[_Backward] = []
        for k in range(min(num_microbatches, ALIKE)):
            gradients.begin(last=k + 1 == min(num_microbatches, ALIKE))
            if split:
                found = _halves(own.blocks, gradients, seeds)
            else:
                highest, block = _highest(own.blocks, gradients, seeds)
                found = _Backward(highest=highest, block=block, left=gradients.live)
            self.passes.append(found)
        self.delivered = gradients.finish()
        self.live = 0.0  # gradients
        self.halves: deque[_Backward] = deque()

    def backward(self) -> _Backward:
        """The next one."""
        self.done += 1
        if self.done == self.count:
            return self.passes[-1]
        return self.passes[min(self.done, max(1, len(self.passes) - 1)) - 1]


def _highest(
    blocks: Sequence[BlockBytes], gradients: GradientBytes, seeds: float
) -> tuple[float, int]:
    """The most bytes at once in a backward of blocks that keep all of one micro-batch at first, and
    the number of the block. Gradients that were received (`seeds`) are held to its end; the last
    block's moments have them."""
    held, highest, place = math.fsum(block.kept for block in blocks), 0.0, len(blocks) - 1
    for number, block in reversed([*enumerate(blocks)]):
        whole, before = held + block.passing, highest
        for moment, parameters in block.course:
            at = whole - moment.released * block.releases
            given = sum(map(gradients.given, parameters))
            highest = max(highest, at + moment.during + given + gradients.live)
            for k in parameters:
                given -= gradients.given(k)
                now = at + moment.after + given
                highest = max(highest, now + gradients.take(k))
        place = number if highest > before else place
        held -= block.kept
        if block is blocks[-1]:
            held += seeds
    return highest, place


def course_peaks(
    stages: Sequence[StageBytes],
    *,
    schedule: str,
    num_microbatches: int,
    num_devices: int,
    edges: frozenset[tuple[int, int]],
) -> list[Peak]:
    """The most bytes at once on a device of each device group, and when."""
    counts = {"num_stages": len(stages), "num_devices": num_devices}
    streams = build_schedule(
        schedule, num_microbatches=num_microbatches, edges=edges, paired=False, **counts
    )
    placed = stages_of_devices(schedule, **counts)
    each = num_microbatches // SCHEDULES[schedule].copies
    split = any(i.action is Action.BACKWARD_INPUT for stream in streams for i in stream)
    return [
        _peak({k: _Stage(stages[k], each, split=split) for k in members}, stream)
        for members, stream in zip(placed, streams, strict=True)
    ]


def _halves(blocks: Sequence[BlockBytes], gradients: GradientBytes, seeds: float) -> _Backward:
    """A backward that puts products' weight gradients off to its second half."""
    held, highest, put_off = math.fsum(block.kept for block in blocks), 0.0, 0.0
    place = len(blocks) - 1
    for number, block in reversed([*enumerate(blocks)]):
        before = highest
        for moment, parameters in block.course:
            at = held + block.passing - moment.released * block.releases + put_off
            highest = max(highest, at + moment.during + gradients.live)
            put_off += moment.put_off
            if not moment.put_off:
                for k in parameters:
                    highest = max(highest, at + moment.after + gradients.take(k))
        place = number if highest > before else place
        held -= block.kept
        if block is blocks[-1]:
            held += seeds
    second = 0.0
    for block in reversed(blocks):
        for moment, parameters in block.course:
            for k in parameters if moment.put_off else ():
                second = max(second, gradients.take(k) + put_off + block.late)
            put_off -= moment.put_off
    everything = sum(moment.put_off for block in blocks for moment, _ in block.course)
    return _Backward(
        highest=highest, block=place, left=gradients.live, put_off=everything, second=second
    )


def _peak(stages: dict[int, _Stage], stream: Sequence[Instruction]) -> Peak:
    fixed = sum(own.fixed for own in stages.values())
    receives = [i for i in stream if i.action in RECEIVES]
    sizes = [_message(stages, i) for i in receives]
    held = sending = posted = 0.0  # of activations, of messages
    highest, taken = Peak(nbytes=0.0), 0

    def reaches(nbytes: float, block: int | None = None) -> None:
        nonlocal highest
        if nbytes > highest.nbytes:
            highest = Peak(nbytes=nbytes, action=action, stage=instruction.stage, block=block)

    for instruction in stream:
        action, own = instruction.action, stages[instruction.stage]
        beside = sending + posted + sum(each.live for each in stages.values())
        if action in RECEIVES:
            taken += 1
            posted = sum(sizes[taken : taken + POSTED_AHEAD])
        elif action is Action.SEND_GRADIENT:
            sending = _message(stages, instruction)
        elif action is Action.SEND_ACTIVATION:
            sending = own.own.leaving  # the rest the micro-batch keeps
        elif action is Action.FORWARD:
            held += own.kept
            reaches(held + beside + own.own.leaving)
        elif action in (Action.BACKWARD, Action.BACKWARD_INPUT):
            found = own.backward()
            held -= own.kept
            others = held + beside - own.live
            reaches(others + found.highest, found.block)
            if action is Action.BACKWARD_INPUT:
                held += found.put_off
                own.halves.append(found)
            else:
                reaches(others + found.second)
                own.live = found.left
        elif action is Action.BACKWARD_WEIGHT:
            found = own.halves.popleft()
            held -= found.put_off
            reaches(held + beside - own.live + found.second)
            own.live = found.left
    delivered = sum(own.delivered + own.optimizer for own in stages.values())
    if delivered > highest.nbytes:
        highest = Peak(nbytes=delivered, stage=min(stages))
    return replace(highest, nbytes=fixed + highest.nbytes)


def _message(stages: Mapping[int, _Stage], instruction: Instruction) -> float:
    """Bytes of what an instruction sends or receives."""
    own, peer = stages[instruction.stage].own, instruction.peer
    assert peer is not None
    activation = instruction.action in (Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
    sends = instruction.action in (Action.SEND_ACTIVATION, Action.SEND_GRADIENT)
    return (own.sent if activation is sends else own.received)[peer]
