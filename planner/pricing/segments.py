"""The segments of a plan's stages as their price has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.blocks import PassPrice
from meshwright.costmodel.graph import Block
from meshwright.costmodel.operators import Pricer
from meshwright.costmodel.sharding import Assignment, Placement
from meshwright.costmodel.stages import NO_RECOMPUTE, BlockBytes, Recompute, Sums, in_a_row
from meshwright.planner.plan import StagePlan, segments_of
from meshwright.planner.pricing.segment_costs import SegmentBlock, segment_recompute
from meshwright.planner.pricing.stage_costs import StageCoster


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A block of a stage, what it reads in which states, its price per micro-batch and its sums."""

    block: Block
    assignment: Assignment
    inputs: Mapping[str, Placement]
    passes: PassPrice
    sums: Sums

    @staticmethod
    def of(
        coster: StageCoster,
        pricer: Pricer,
        block: Block,
        assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> Entered:
        passes, sums = coster.block(pricer, block, assignment, inputs)
        return Entered(block=block, assignment=assignment, inputs=inputs, passes=passes, sums=sums)

    def repeats(self, policy: str) -> float:
        """Bytes that it makes again under a policy."""
        own = self.passes.repeats.get(policy)
        return own.freed_bytes if own else 0.0

    @property
    def parameters(self) -> list[tuple[str, Placement]]:
        """Its parameters, each in the state in which it is stored."""
        return [(value, self.assignment.states[value]) for value in self.block.parameters]

    def segment_block(self, pricer: Pricer, made: set[str], policy: str) -> SegmentBlock:
        """It as part of a segment whose blocks before it made these values."""
        states = self.assignment.states
        return SegmentBlock(
            sums=self.sums,
            policy=policy,
            inside=sum(pricer.nbytes(v, s) for v, s in self.inputs.items() if v in made),
            leaving=sum(pricer.nbytes(v, states[v]) for v in self.block.outputs),
        )


def spans_of(stage: StagePlan, blocks: Sequence[Entered], pricer: Pricer) -> list[range]:
    """Positions of the blocks in each segment of a stage."""
    if stage.segments == 1:
        return []
    return segments_of([each.block for each in blocks], stage.segments, pricer.graph.loss)


def stage_recompute(stage: StagePlan, blocks: Sequence[Entered], pricer: Pricer) -> Recompute:
    """What a stage's blocks run again, in segments or each by itself."""
    spans, policies = spans_of(stage, blocks, pricer), stage.policies
    inside, found = {k for span in spans for k in span}, NO_RECOMPUTE
    alone = [(blocks[k].sums, policies[k]) for k in range(len(blocks)) if k not in inside]
    for policy in dict.fromkeys(policy for _, policy in alone):
        found = found + in_a_row([own for own, p in alone if p == policy]).recompute(policy)
    if not spans:
        decided = {each: each[0].with_policy(each[1]) for each in dict.fromkeys(alone)}
        row = in_a_row([decided[each] for each in alone])
        found = replace(found, excess=row.recompute("none").excess)
    for span in spans:
        found = found + segment_recompute(_segment(span, blocks, policies, pricer))
    return found


def _segment(
    span: range, blocks: Sequence[Entered], policies: Sequence[str], pricer: Pricer
) -> list[SegmentBlock]:
    made: set[str] = set()
    found = []
    for k in span:
        found.append(blocks[k].segment_block(pricer, made, policies[k]))
        made.update(blocks[k].block.outputs)
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
