"""What the blocks of a plan's stages send to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.costmodel.operators import Pricer, Setting
from meshwright.costmodel.stages import BlockBytes, Sent, sent_by_block
from meshwright.planner.plan import StagePlan, away_blocks
from meshwright.planner.pricing.segments import in_segments, spans_of
from meshwright.planner.pricing.stage_costs import Entered


def sent_of(
    stage: StagePlan, blocks: Sequence[Entered], pricer: Pricer, setting: Setting
) -> Sent | None:
    """What a stage sends, and how long its passes wait for that; None where it sends nothing."""
    if not away_blocks(stage):
        return None
    entering = entering_bytes(blocks, pricer)
    repeated = [each.sums.recompute(p) for each, p in zip(blocks, stage.policies, strict=True)]
    held = [
        BlockBytes(
            kept=float(each.sums.saved_bytes - again.freed_bytes) + enters,
            passing=0.0,
            releases=False,
            course=(),
        )
        for each, again, enters in zip(blocks, repeated, entering, strict=True)
    ]
    kept = [each.kept for each in in_segments(held, entering, stage, blocks, pricer)]
    inside = {k for span in spans_of(stage, blocks, pricer) for k in span}
    forward = np.array([float(each.sums.forward_s) for each in blocks])
    backward = np.array(
        [
            float(each.sums.backward_s + again.seconds + each.sums.forward_s * (k in inside))
            for k, (each, again) in enumerate(zip(blocks, repeated, strict=True))
        ]
    )
    moved = np.array(moved_bytes(stage, blocks, pricer, kept))
    return sent_by_block(moved, forward, backward, setting)


def entering_bytes(blocks: Sequence[Entered], pricer: Pricer) -> list[float]:
    """Bytes of what each block is the first to read."""
    read: set[object] = set()
    found = []
    for each in blocks:
        found.append(sum(pricer.nbytes(*item) for item in each.inputs.items() - read))
        read |= each.inputs.items()
    return found


def moved_bytes(
    stage: StagePlan, blocks: Sequence[Entered], pricer: Pricer, kept: Sequence[float]
) -> list[float]:
    """Bytes of a micro-batch that each block sends of what it `kept`: not what other stages sent,
    whose gradients they wait for, nor what a block reads that sends nothing."""
    count = away_blocks(stage)
    for span in spans_of(stage, blocks, pricer):
        if span.start < count:
            count = max(count, span.stop)
    made = {value for each in blocks for value in each.block.outputs}
    later = {value for each in blocks[count:] for value in each.inputs}
    read: set[object] = set()
    found = []
    for each, own in zip(blocks[:count], kept, strict=False):
        entering = each.inputs.items() - read
        stays = sum(pricer.nbytes(v, s) for v, s in entering if v not in made or v in later)
        found.append(max(0.0, own - stays))
        read |= entering
    return found + [0.0] * (len(blocks) - count)


def sending(
    held: Sequence[BlockBytes], stage: StagePlan, blocks: Sequence[Entered], pricer: Pricer
) -> list[BlockBytes]:
    """Blocks of which some send what they keep: it comes back while the next one's backward lasts,
    and is let go with their own."""
    if not away_blocks(stage):
        return [*held]
    moved = moved_bytes(stage, blocks, pricer, [each.kept for each in held])
    before = [0.0, *moved[:-1]]
    return [
        replace(each, kept=each.kept - own, passing=each.passing + own + other)
        for each, own, other in zip(held, moved, before, strict=True)
    ]
