"""Costs of a segment of blocks that keeps its inputs alone and runs again in the backward.

Of block b with forward f seconds, under the policy of the time after that again s seconds and r
freed bytes of the a that it keeps, and i bytes of inputs that the segment itself makes:

    seconds of a backward more    Σ f[b] + s[b]
    kept of a micro-batch less    Σ a[b] + i[b]
    held while it runs again      Σ (a[b] - r[b] + i[b]) + max r[b] + what leaves it, made anew

ZeRO-3 gathers weights once more, but those of the last block, whose backward follows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from meshwright.costmodel.stages import NO_RECOMPUTE, BlockBytes, Recompute, Sums
from meshwright.planner.pricing.stage_costs import StageBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBlock:
    """A block of a segment: its sums, its recompute policy, bytes of its inputs that the segment
    makes (`inside`), and of its outputs (`leaving`)."""

    sums: Sums
    policy: str
    inside: float
    leaving: float


def segment_recompute(blocks: Sequence[SegmentBlock]) -> Recompute:
    """Recompute of the blocks of a segment, together."""
    repeated = [block.sums.recompute(block.policy) for block in blocks]
    inside = sum(block.inside for block in blocks)
    saved = sum(block.sums.saved_bytes for block in blocks)
    freed = sum(again.freed_bytes for again in repeated)
    held = saved - freed + inside + blocks[-1].leaving

    def added(column: str, recompute: str) -> np.ndarray:
        forwards = sum(getattr(block.sums, column) for block in blocks)
        return np.asarray(forwards + sum(getattr(again, recompute) for again in repeated))

    return Recompute(
        seconds=added("forward_s", "seconds"),
        comm_s=added("forward_comm_s", "comm_s"),
        host_s=added("forward_host_s", "host_s"),
        freed_bytes=np.asarray(saved + inside),
        excess=held + np.max([again.excess for again in repeated], axis=0),
        put_off_bytes=np.asarray(sum(again.put_off_bytes for again in repeated)),
        gather_s=np.asarray(sum(block.sums.zero3_gather_s for block in blocks[:-1])),
    )


def stage_recompute(priced: StageBlocks) -> Recompute:
    """Recompute of a stage's blocks, in segments or each by itself."""
    policies, inside = priced.stage.policies, {*chain(*priced.spans)}
    alone = [k for k in range(len(priced.blocks)) if k not in inside]
    total = NO_RECOMPUTE
    for policy in dict.fromkeys(policies[k] for k in alone):
        sums = [priced.blocks[k].sums.array for k in alone if policies[k] == policy]
        total = total + Sums(np.stack(sums)).recompute(policy).together()
    for span in priced.spans:
        total = total + segment_recompute(_segment(span, priced))
    return total


def _segment(span: range, priced: StageBlocks) -> list[SegmentBlock]:
    outputs: set[str] = set()
    segment, nbytes = [], priced.pricer.nbytes
    for k in span:
        entered = priced.blocks[k]
        states = {value: entered.assignment.states[value] for value in entered.block.outputs}
        segment.append(
            SegmentBlock(
                sums=entered.sums,
                policy=priced.stage.policies[k],
                inside=sum(nbytes(v, s) for v, s in entered.inputs.items() if v in outputs),
                leaving=sum(nbytes(v, s) for v, s in states.items()),
            )
        )
        outputs |= states.keys()
    return segment


def in_segments(
    priced: StageBlocks, held: Sequence[BlockBytes], entering: Sequence[float]
) -> list[BlockBytes]:
    """Bytes of a stage's blocks where some are in segments: of those their inputs are kept, and the
    rest while the backward goes through them. `entering` are the bytes that each is the first to
    read."""
    blocks = [*held]
    for span in priced.spans:
        segment = _segment(span, priced)
        again = segment[-1].leaving
        for k, block in zip(span, segment, strict=True):
            outside = max(0.0, entering[k] - block.inside)
            again += held[k].kept - outside
            blocks[k] = replace(held[k], kept=outside, passing=held[k].passing + again)
    return blocks
