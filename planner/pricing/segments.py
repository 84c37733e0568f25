"""The segments of a plan's stages as their price has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.costmodel.operators import Pricer
from meshwright.costmodel.stages import NO_RECOMPUTE, BlockBytes, Recompute, Sums
from meshwright.planner.plan import StagePlan, segments_of
from meshwright.planner.pricing.segment_costs import SegmentBlock, segment_recompute
from meshwright.planner.pricing.stage_costs import Entered


def spans_of(stage: StagePlan, blocks: Sequence[Entered], pricer: Pricer) -> list[range]:
    """Positions of the blocks in each segment of a stage."""
    if stage.segments == 1:
        return []
    return segments_of([each.block for each in blocks], stage.segments, pricer.graph.loss)


def stage_recompute(stage: StagePlan, blocks: Sequence[Entered], pricer: Pricer) -> Recompute:
    """What a stage's blocks run again, in segments or each by itself."""
    spans, policies = spans_of(stage, blocks, pricer), stage.policies
    alone = [*range(len(blocks))]
    for span in spans:
        alone = [k for k in alone if k not in span]
    found = NO_RECOMPUTE
    for policy in dict.fromkeys(policies[k] for k in alone):
        own = [blocks[k].sums.array for k in alone if policies[k] == policy]
        found = found + Sums(np.stack(own)).recompute(policy).together()
    for span in spans:
        found = found + segment_recompute(_segment(span, blocks, policies, pricer))
    return found


def _segment(
    span: range, blocks: Sequence[Entered], policies: Sequence[str], pricer: Pricer
) -> list[SegmentBlock]:
    made: set[str] = set()
    found = []
    for k in span:
        each, states = blocks[k], blocks[k].assignment.states
        found.append(
            SegmentBlock(
                sums=each.sums,
                policy=policies[k],
                inside=sum(pricer.nbytes(v, s) for v, s in each.inputs.items() if v in made),
                leaving=sum(pricer.nbytes(v, states[v]) for v in each.block.outputs),
            )
        )
        made.update(each.block.outputs)
    return found


def in_segments(
    held: Sequence[BlockBytes],
    entering: Sequence[float],
    stage: StagePlan,
    blocks: Sequence[Entered],
    pricer: Pricer,
) -> list[BlockBytes]:
    """What a stage's blocks hold where some are in segments: of those what enters is kept, and the
    rest while the backward goes through them. `entering` are the bytes of what each is the first to
    read."""
    found = [*held]
    for span in spans_of(stage, blocks, pricer):
        parts = _segment(span, blocks, stage.policies, pricer)
        again = parts[-1].leaving
        for k, part in zip(span, parts, strict=True):
            outside = max(0.0, entering[k] - part.inside)
            again += held[k].kept - outside
            found[k] = replace(held[k], kept=outside, passing=held[k].passing + again)
    return found
