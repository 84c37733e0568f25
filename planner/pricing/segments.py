"""What a segment of blocks costs that keeps its inputs alone and runs again in the backward.

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

import numpy as np

from meshwright.costmodel.stages import NO_RECOMPUTE, BlockBytes, Recompute, Sums
from meshwright.planner.plan import segments_of
from meshwright.planner.pricing.stage_costs import StageBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBlock:
    """A block of a segment: its sums, its recompute policy, bytes of its inputs that the segment
    makes (`inside`), and of what it hands on (`leaving`)."""

    sums: Sums
    policy: str
    inside: float
    leaving: float


def segment_recompute(blocks: Sequence[SegmentBlock]) -> Recompute:
    """What the blocks of a segment run again, together."""
    own = [block.sums.recompute(block.policy) for block in blocks]
    inside = sum(block.inside for block in blocks)
    saved = sum(block.sums.saved_bytes for block in blocks)
    freed = sum(each.freed_bytes for each in own)
    held = saved - freed + inside + blocks[-1].leaving

    def added(column: str, recompute: str) -> np.ndarray:
        forwards = sum(getattr(block.sums, column) for block in blocks)
        return np.asarray(forwards + sum(getattr(each, recompute) for each in own))

    return Recompute(
        seconds=added("forward_s", "seconds"),
        comm_s=added("forward_comm_s", "comm_s"),
        host_s=added("forward_host_s", "host_s"),
        freed_bytes=np.asarray(saved + inside),
        excess=held + np.max([each.excess for each in own], axis=0),
        put_off_bytes=np.asarray(sum(each.put_off_bytes for each in own)),
        gather_s=np.asarray(sum(block.sums.zero3_gather_s for block in blocks[:-1])),
    )


def spans_of(own: StageBlocks) -> list[range]:
    """Positions of the blocks in each segment of a stage."""
    if own.stage.segments == 1:
        return []
    blocks = [each.block for each in own.blocks]
    return segments_of(blocks, own.stage.segments, own.pricer.graph.loss)


def stage_recompute(own: StageBlocks) -> Recompute:
    """What a stage's blocks run again, in segments or each by itself."""
    spans, policies = spans_of(own), own.stage.policies
    inside = {k for span in spans for k in span}
    alone = [k for k in range(len(own.blocks)) if k not in inside]
    found = NO_RECOMPUTE
    for policy in dict.fromkeys(policies[k] for k in alone):
        sums = [own.blocks[k].sums.array for k in alone if policies[k] == policy]
        found = found + Sums(np.stack(sums)).recompute(policy).together()
    for span in spans:
        found = found + segment_recompute(_segment(span, own))
    return found


def _segment(span: range, own: StageBlocks) -> list[SegmentBlock]:
    made: set[str] = set()
    found = []
    for k in span:
        each, states, nbytes = own.blocks[k], own.blocks[k].assignment.states, own.pricer.nbytes
        found.append(
            SegmentBlock(
                sums=each.sums,
                policy=own.stage.policies[k],
                inside=sum(nbytes(v, s) for v, s in each.inputs.items() if v in made),
                leaving=sum(nbytes(v, states[v]) for v in each.block.outputs),
            )
        )
        made.update(each.block.outputs)
    return found


def in_segments(
    own: StageBlocks, held: Sequence[BlockBytes], entering: Sequence[float]
) -> list[BlockBytes]:
    """What a stage's blocks hold where some are in segments: of those what enters is kept, and the
    rest while the backward goes through them. `entering` are the bytes of what each is the first to
    read."""
    found = [*held]
    for span in spans_of(own):
        parts = _segment(span, own)
        again = parts[-1].leaving
        for k, part in zip(span, parts, strict=True):
            outside = max(0.0, entering[k] - part.inside)
            again += held[k].kept - outside
            found[k] = replace(held[k], kept=outside, passing=held[k].passing + again)
    return found
