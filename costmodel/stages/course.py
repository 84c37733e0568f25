"""Memory of a stage in the course of a backward, block by block of a plan.

Gradients grow as a backward lets go of what the forward kept, in `train_step`'s terms:

    F       block by block from the first: what they keep, and the weights that are gathered for
            this one (`gathered`), which no gradients exceed where they are frozen
    B, I    block by block from the last: what the blocks up to this one keep, what this one makes
            again and the gradients it works on (`passing`), the gradients of parameters made so far
    B, W    what the micro-batch kept is let go
    step    weights, states and gradients, and what the optimizer makes beside them

Backwards of a step differ in the gradients that are there: the first one, those behind it, the last
one, which reduces. The peak of a device is put together in `peak.py`, without fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeAlias

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.memory import GradientBytes, Reduction, Trained
from meshwright.costmodel.schedules import Action

ALIKE = 4  # backwards of a step that differ, at most: first ones, one of those between, the last
Pass: TypeAlias = Literal["first", "later", "last", "second", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes of a block: what it keeps of a micro-batch, and holds besides in all of its backward
    (`passing`: made again, or gathered), or in the part of it that is put off (`late`); that
    backward's moments, each with the parameters, by number in their stage, whose gradients it
    makes. `releases`: what is kept is let go on the way. `gathered`: weights in its forward, and as
    it begins those of the block before."""

    kept: float
    passing: float
    releases: bool
    course: Sequence[tuple[Moment, tuple[int, ...]]]
    late: float = 0.0
    gathered: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes of a stage: `fixed` always, of which the `weights` that are computed with; `optimizer`
    beside the gradients in the optimizer's step; its blocks and parameters in the order of the
    forward; gradients that it receives of a micro-batch (`seeds`)."""

    fixed: float
    weights: float
    optimizer: float
    blocks: Sequence[BlockBytes]
    seeds: float
    trained: Sequence[Trained]
    reduction: Reduction


@dataclass(slots=True)
class _Most:
    """Most bytes at once so far, in which block, and the gradients of parameters then."""

    nbytes: float = 0.0
    block: int | None = None
    gradients: float = 0.0

    def beside(self, gradients: float) -> _Most:
        """Bytes beside gradients that were there before."""
        return _Most(self.nbytes - gradients, self.block, self.gradients - gradients)

    def reach(self, block: int | None, gradients: float, others: float) -> None:
        """Take a moment's bytes into account."""
        if gradients + others > self.nbytes:
            self.nbytes, self.block, self.gradients = gradients + others, block, gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Memory of a stage: the fields of `StageMemory`; and by `Pass` the block that holds most, and
    the gradients of parameters then: all in the second half, else beside those of earlier
    backwards."""

    memory: Mapping[str, float]
    where: Mapping[Pass, tuple[int | None, float]]

    def at(self, action: Action, *, first: bool, last: bool) -> tuple[int | None, float]:
        """The block of an instruction's peak, and the gradients then."""
        if action is Action.BACKWARD_WEIGHT:
            return self.where["end" if last else "second"]
        return self.where["first" if first else "last" if last else "later"]


def walked(stage: StageBytes, num_microbatches: int, *, split: bool) -> Walked:
    """Memory of a stage of so many micro-batches, whose backwards may be `split`."""
    activations = math.fsum(block.kept for block in stage.blocks)
    gradients = GradientBytes(stage.trained, stage.reduction)
    firsts, seconds = list[_Most](), list[_Most]()  # beside the gradients that are there before
    between_bytes, begun, put_off, count = 0.0, 0.0, 0.0, min(num_microbatches, ALIKE)
    before = -1.0
    for k in range(count):
        last = k + 1 == count
        if gradients.live == before and not last:  # another one like the one before
            continue
        gradients.begin(last=last)
        before = gradients.live
        if split:
            first, second, halfway, put_off = _halves(stage.blocks, gradients, stage.seeds)
            begun = begun if k else halfway
        else:
            first, second = _highest(stage.blocks, gradients, stage.seeds), _Most()
        seconds.append(second)
        gradients.end()
        firsts.append(first.beside(before))
        between_bytes = gradients.live if not last or count == 1 else between_bytes
    most: dict[Pass, _Most] = {
        "first": firsts[0],
        "later": max(firsts[1:-1] or firsts[-1:], key=attrgetter("nbytes")),
        "second": max(seconds[:-1] or seconds, key=attrgetter("nbytes")),
        "last": firsts[-1],
        "end": seconds[-1],
    }
    read = gradients.finish()
    return Walked(
        memory={
            "weight_bytes": stage.weights,
            "fixed_bytes": stage.fixed,
            "gradient_bytes": between_bytes,
            "first_bytes": most["first"].nbytes - activations,
            "later_bytes": most["later"].nbytes - activations,
            "begun_bytes": begun,
            "half_bytes": most["later"].nbytes - activations,
            "second_bytes": most["second"].nbytes - put_off,
            "last_bytes": most["last"].nbytes - most["later"].nbytes,
            "end_bytes": most["end"].nbytes - most["second"].nbytes,
            "step_bytes": max(read + stage.optimizer, gradients.ending),
            "put_off_bytes": put_off,
            **dict.fromkeys(("version_bytes", "copied_bytes", "waiting_bytes"), 0.0),  # in fixed
            "activation_bytes": activations,
        },
        where={kind: (peak.block, peak.gradients) for kind, peak in most.items()},
    )


def _highest(blocks: Sequence[BlockBytes], gradients: GradientBytes, seeds: float) -> _Most:
    """Most bytes at once in a micro-batch's forward and backward. Received gradients (`seeds`) are
    held to the end of the last block's moments, among those."""
    held, most = 0.0, _Most()
    for number, block in enumerate(blocks):
        weights, before = block.gathered
        most.reach(number, gradients.live, held + weights + max(before, block.kept))
        held += block.kept
    held = math.fsum(block.kept for block in blocks)
    for number, block in reversed([*enumerate(blocks)]):
        held_here = held + block.passing
        for moment, parameters in block.course:
            others = held_here - moment.released * block.releases
            pending = sum(map(gradients.given, parameters), 0.0)
            most.reach(number, pending + gradients.live, others + moment.during)
            for k in parameters:
                pending -= gradients.given(k)
                most.reach(number, gradients.take(k) + pending, others + moment.after)
        held -= block.kept
        if block is blocks[-1]:
            held += seeds
    return most


def _halves(
    blocks: Sequence[BlockBytes], gradients: GradientBytes, seeds: float
) -> tuple[_Most, _Most, float, float]:
    """Peaks of both halves of a split backward, gradients between them, and what is put off."""
    held, put_off = math.fsum(block.kept for block in blocks), 0.0
    first, second = _Most(), _Most()
    for number, block in reversed([*enumerate(blocks)]):
        for moment, parameters in block.course:
            at = held + block.passing - moment.released * block.releases + put_off
            first.reach(number, gradients.live, at + moment.during)
            put_off += moment.put_off
            for k in () if moment.put_off else parameters:
                first.reach(number, gradients.take(k), at + moment.after)
        held -= block.kept
        if block is blocks[-1]:
            held += seeds
    later, between = put_off, gradients.live
    for block in reversed(blocks):
        for moment, parameters in block.course:
            for k in parameters if moment.put_off else ():
                second.reach(None, gradients.take(k), later + block.late)
            later -= moment.put_off
    return first, second, between, put_off
