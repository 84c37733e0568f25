"""The one walk over a stage of a plan, of which its price, memory and ledger are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.costmodel import stages
from meshwright.costmodel.sharding import Assignment, Placement
from meshwright.planner.plan import Plan
from meshwright.planner.pricing.away import sent_of
from meshwright.planner.pricing.segment_costs import stage_recompute
from meshwright.planner.pricing.stage_costs import StageBlocks, StageCoster, stage_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStage(StageBlocks):
    """A stage's blocks with their sums (a parameter that several blocks read alike is held once),
    what they repeat, what is sent to host memory (None for nothing), and the costs."""

    sums: stages.Sums
    repeated: stages.Recompute
    sent: stages.Sent | None
    costs: stages.StageCosts[float]


def priced_stage(
    plan: Plan,
    k: int,
    coster: StageCoster,
    assignments: Mapping[str, Assignment],
    arriving: Mapping[str, Placement],
) -> PricedStage:
    """Stage k of a checked plan, at which activations are `arriving` in parts."""
    walk = stage_blocks(plan, k, coster, assignments, arriving)
    stage, setting = walk.stage, walk.setting
    rows = stages.Sums(np.stack([block.sums.array for block in walk.blocks]))
    sums, stored = rows.joined(), set[tuple[str, Placement]]()
    for block in walk.blocks:
        for value, state in stored.intersection(block.shared):
            sums = sums - stages.parameter_sums(walk.pricer, value, state)
        stored.update(block.shared)
    sent, repeated = sent_of(walk), stage_recompute(walk)
    # where steps are followed, the walk over the blocks says what a backward holds
    if not stage.segmented and not setting.target.gradients_come:
        decided = rows.with_policies(stage.policies).joined()
        repeated = replace(repeated, excess=decided.excess[:, 0])  # the same under all of them
    return PricedStage(
        stage=stage,
        setting=setting,
        pricer=walk.pricer,
        blocks=walk.blocks,
        sums=sums,
        repeated=repeated,
        sent=sent,
        costs=stages.of_one(stages.stage_costs(sums, setting, repeated, sent)),
    )
