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
from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.stages import Recompute, Sums


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
