"""Overrides without an effect on the plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.costmodel.sharding import Assignment
from meshwright.planner.decisions import BY_BLOCK, DECISIONS, SHARING
from meshwright.planner.overrides.pinned import decided
from meshwright.planner.overrides.restrictions import Restrictions
from meshwright.planner.plan import Plan, StagePlan, compress_names


def without_effect(
    restrictions: Restrictions, plan: Plan, assignments: Sequence[Mapping[str, Assignment]]
) -> list[str]:
    """A sentence per value that blocks were asked to have and don't, and per tensor-parallel degree
    that was asked for and splits nothing."""
    sentences = []
    for name in BY_BLOCK:
        for (value, why), blocks in _lacking(name, restrictions, plan).items():
            names = ", ".join(compress_names(blocks))
            sentences.append(f"override {name}={value!r} has no effect on {names}: {why}")
    for name, decision in DECISIONS.items():
        beside = decision.beside
        idle = beside and all(getattr(stage, beside) == 1 for stage in plan.stages)
        if idle and (value := getattr(restrictions, name)):
            sentences.append(f"override {name}={value!r} has no effect: {beside}=1 on all stages")
    tp = dict(zip(restrictions.blocks, restrictions.tp, strict=True))
    for k, stage in enumerate(plan.stages):
        asked = any(tp[block] is not None for block in stage.blocks)
        if stage.tp > 1 and asked and not _splits(assignments[k]):
            sentences.append(
                f"override tp={stage.tp} splits nothing in stage {k}: each of its {stage.tp} ranks "
                "computes all of it; drop the override, or give shardings"
            )
    return sentences


def _lacking(
    name: str, restrictions: Restrictions, plan: Plan
) -> Mapping[tuple[Any, str], list[str]]:
    """Blocks that lack a value of an override, by the value and the reason."""
    asked = dict(zip(restrictions.blocks, getattr(restrictions, name), strict=True))
    lacking: dict[tuple[Any, str], list[str]] = defaultdict(list)
    for stage in plan.stages:
        for block, policy in zip(stage.blocks, stage.policies, strict=True):
            value = asked[block]
            has = decided(name, stage, policy)
            if value is not None and has != value:
                lacking[value, _why(name, stage, has)].append(block)
    return lacking


def _why(name: str, stage: StagePlan, has: Any) -> str:
    decision = DECISIONS[name]
    if decision in SHARING and stage.holders == 1:
        return "there is one data-parallel rank, so that nothing can be divided"
    if not decision.works(stage):
        return "the plan uses no ZeRO" + f"-{decision.zeros[0]}" * (len(decision.zeros) == 1)
    return f"the plan has {has!r}"


def _splits(assignments: Mapping[str, Assignment]) -> bool:
    """Whether an operator of these blocks takes or gives less than the whole on a rank."""
    return any(
        placement.kind != "R"
        for assignment in assignments.values()
        for strategy in assignment.strategies.values()
        for placement in (*strategy.operands, *strategy.results)
    )
