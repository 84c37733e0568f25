"""The one walk over a stage of a plan: what its price, its memory and its ledger are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.costmodel import stages
from meshwright.costmodel.sharding import Assignment, Placement
from meshwright.planner.plan import Plan
from meshwright.planner.pricing.away import sent_of
from meshwright.planner.pricing.segments import stage_recompute
from meshwright.planner.pricing.stage_costs import StageBlocks, StageCoster, stage_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStage(StageBlocks):
    """With the sums of its blocks (a parameter that several blocks read alike is held once), what
    every block repeats by its own policy, what is sent to host memory (None where nothing is), and
    the costs."""

    sums: stages.Sums
    repeated: stages.Recompute
    sent: stages.Sent | None
    costs: stages.StageCosts[float]


def priced_stage(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> PricedStage:
    """Stage k of a checked plan."""
    own = stage_blocks(plan, k, coster, assignments)
    stage, setting, pricer, blocks = own.stage, own.setting, own.pricer, own.blocks
    rows = stages.Sums(np.stack([each.sums.array for each in blocks]))
    sums, stored = rows.joined(), set[tuple[str, Placement]]()
    for each in blocks:
        for value, state in stored.intersection(each.shared):
            sums = sums - stages.parameter_sums(pricer, value, state)
        stored.update(each.shared)
    sent, repeated = sent_of(own), stage_recompute(own)
    # where steps are followed, the walk over the blocks says what a backward holds
    if not stage.segmented and not setting.target.gradients_come:
        decided = rows.with_policies(stage.policies).joined()
        repeated = replace(repeated, excess=decided.excess[:, 0])  # the same under all of them
    return PricedStage(
        stage=stage,
        setting=setting,
        pricer=pricer,
        blocks=blocks,
        sums=sums,
        repeated=repeated,
        sent=sent,
        costs=stages.of_one(stages.stage_costs(sums, setting, repeated, sent)),
    )
