"""Bytes that the blocks of a plan's stages send to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from meshwright.costmodel.stages import BlockBytes, Sent, sent_by_block
from meshwright.planner.plan import away_blocks
from meshwright.planner.pricing.segment_costs import in_segments
from meshwright.planner.pricing.stage_costs import StageBlocks


def sent_of(priced: StageBlocks) -> Sent | None:
    """Bytes that a stage sends, and how long its passes wait for that; None for none."""
    if not away_blocks(priced.stage):
        return None
    entering, sums = entering_bytes(priced), [block.sums for block in priced.blocks]
    repeated = [s.recompute(policy) for s, policy in zip(sums, priced.stage.policies, strict=True)]
    held = [
        BlockBytes(
            kept=float(s.saved_bytes - again.freed_bytes) + enters,
            passing=0.0,
            releases=False,
            course=(),
        )
        for s, again, enters in zip(sums, repeated, entering, strict=True)
    ]
    saved = [block.kept for block in in_segments(priced, held, entering)]
    inside = {*chain(*priced.spans)}
    forward = np.array([float(s.forward_s) for s in sums])
    backward = np.array(
        [
            float(s.backward_s + again.seconds + s.forward_s * (k in inside))
            for k, (s, again) in enumerate(zip(sums, repeated, strict=True))
        ]
    )
    return sent_by_block(np.array(moved_bytes(priced, saved)), forward, backward, priced.setting)


def entering_bytes(priced: StageBlocks) -> list[float]:
    """Bytes of the values that each block is the first to read."""
    read: set[object] = set()
    entering = []
    for block in priced.blocks:
        values = block.inputs.items() - read
        entering.append(sum(priced.pricer.nbytes(*value) for value in values))
        read |= block.inputs.items()
    return entering


def moved_bytes(priced: StageBlocks, saved: Sequence[float]) -> list[float]:
    """Bytes of a micro-batch that each block sends of those that it `saved`: not those that other
    stages sent, whose gradients they wait for, nor those that a block reads that sends nothing."""
    count, blocks = away_blocks(priced.stage), priced.blocks
    for span in priced.spans:
        if span.start < count:
            count = max(count, span.stop)
    inside = {value for entered in blocks for value in entered.block.outputs}
    later = {value for entered in blocks[count:] for value in entered.inputs}
    read: set[object] = set()
    moved = []
    for entered, nbytes in zip(blocks[:count], saved, strict=False):
        entering = entered.inputs.items() - read
        stays = sum(
            priced.pricer.nbytes(v, s) for v, s in entering if v not in inside or v in later
        )
        moved.append(max(0.0, nbytes - stays))
        read |= entering
    return moved + [0.0] * (len(blocks) - count)


def sending(priced: StageBlocks, held: Sequence[BlockBytes]) -> list[BlockBytes]:
    """Blocks of which some send what they keep: it comes back while the next one's backward lasts,
    and is let go with their own."""
    if not away_blocks(priced.stage):
        return [*held]
    moved = moved_bytes(priced, [block.kept for block in held])
    return [
        replace(block, kept=block.kept - sent, passing=block.passing + sent + before)
        for block, sent, before in zip(held, moved, [0.0, *moved[:-1]], strict=True)
    ]
