"""What the blocks of a plan's stages send to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.costmodel.stages import BlockBytes, Sent, sent_by_block
from meshwright.planner.plan import away_blocks
from meshwright.planner.pricing.segments import in_segments, spans_of
from meshwright.planner.pricing.stage_costs import StageBlocks


def sent_of(own: StageBlocks) -> Sent | None:
    """What a stage sends, and how long its passes wait for that; None where it sends nothing."""
    if not away_blocks(own.stage):
        return None
    entering = entering_bytes(own)
    pairs = zip(own.blocks, own.stage.policies, strict=True)
    repeated = [each.sums.recompute(policy) for each, policy in pairs]
    held = [
        BlockBytes(
            kept=float(each.sums.saved_bytes - again.freed_bytes) + enters,
            passing=0.0,
            releases=False,
            course=(),
        )
        for each, again, enters in zip(own.blocks, repeated, entering, strict=True)
    ]
    kept = [each.kept for each in in_segments(own, held, entering)]
    inside = {k for span in spans_of(own) for k in span}
    forward = np.array([float(each.sums.forward_s) for each in own.blocks])
    backward = np.array(
        [
            float(each.sums.backward_s + again.seconds + each.sums.forward_s * (k in inside))
            for k, (each, again) in enumerate(zip(own.blocks, repeated, strict=True))
        ]
    )
    return sent_by_block(np.array(moved_bytes(own, kept)), forward, backward, own.setting)


def entering_bytes(own: StageBlocks) -> list[float]:
    """Bytes of what each block is the first to read."""
    read: set[object] = set()
    found = []
    for each in own.blocks:
        found.append(sum(own.pricer.nbytes(*item) for item in each.inputs.items() - read))
        read |= each.inputs.items()
    return found


def moved_bytes(own: StageBlocks, kept: Sequence[float]) -> list[float]:
    """Bytes of a micro-batch that each block sends of what it `kept`: not what other stages sent,
    whose gradients they wait for, nor what a block reads that sends nothing."""
    count, blocks = away_blocks(own.stage), own.blocks
    for span in spans_of(own):
        if span.start < count:
            count = max(count, span.stop)
    made = {value for each in blocks for value in each.block.outputs}
    later = {value for each in blocks[count:] for value in each.inputs}
    read: set[object] = set()
    found = []
    for each, nbytes in zip(blocks[:count], kept, strict=False):
        entering = each.inputs.items() - read
        stays = sum(own.pricer.nbytes(v, s) for v, s in entering if v not in made or v in later)
        found.append(max(0.0, nbytes - stays))
        read |= entering
    return found + [0.0] * (len(blocks) - count)


def sending(own: StageBlocks, held: Sequence[BlockBytes]) -> list[BlockBytes]:
    """Blocks of which some send what they keep: it comes back while the next one's backward lasts,
    and is let go with their own."""
    if not away_blocks(own.stage):
        return [*held]
    moved = moved_bytes(own, [each.kept for each in held])
    return [
        replace(each, kept=each.kept - sent, passing=each.passing + sent + before)
        for each, sent, before in zip(held, moved, [0.0, *moved[:-1]], strict=True)
    ]
