"""The one walk over a stage of a plan: what its price, its memory and its ledger are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.operators import Pricer, Setting
from meshwright.costmodel.sharding import Assignment, Placement
from meshwright.costmodel.stages import (
    Recompute,
    Sent,
    StageCosts,
    Sums,
    of_one,
    parameter_sums,
    stage_costs,
)
from meshwright.planner.plan import Plan, StagePlan
from meshwright.planner.pricing.away import sent_of
from meshwright.planner.pricing.segments import Entered, stage_recompute
from meshwright.planner.pricing.stage_costs import StageCoster, stage_setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStage:
    """A stage with its blocks as they run, their sums (a parameter that several blocks read alike
    is held once), what every block repeats by its own policy, what is sent to host memory (None
    where nothing is), and the costs."""

    stage: StagePlan
    setting: Setting
    pricer: Pricer
    blocks: Sequence[Entered]
    sums: Sums
    repeated: Recompute
    sent: Sent | None
    costs: StageCosts[float]


def priced_stage(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> PricedStage:
    """Stage k of a checked plan."""
    stage = plan.stages[k]
    setting = stage_setting(plan, k, coster)
    pricer = coster.pricer(setting)
    sums, decided, blocks = Sums.zeros(), Sums.zeros(), list[Entered]()
    stored: set[tuple[str, Placement]] = set()
    entered = coster.entered(stage, assignments)
    for (block, assignment, inputs), policy in zip(entered, stage.policies, strict=True):
        own = Entered.of(coster, pricer, block, assignment, inputs)
        blocks.append(own)
        sums = sums.then(own.sums)
        decided = decided.then(own.sums.with_policy(policy))
        for value, state in stored.intersection(own.parameters):
            sums = sums - parameter_sums(pricer, value, state)
        stored.update(own.parameters)
    sent = sent_of(stage, blocks, pricer, setting)
    repeated = stage_recompute(stage, blocks, pricer)
    if stage.segments == 1:
        repeated = replace(repeated, excess=decided.recompute("none").excess)
    return PricedStage(
        stage=stage,
        setting=setting,
        pricer=pricer,
        blocks=blocks,
        sums=sums,
        repeated=repeated,
        sent=sent,
        costs=of_one(stage_costs(sums, setting, repeated, sent)),
    )
