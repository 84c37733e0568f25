"""Overrides without an effect on the plan that was found: said, for nothing may pass in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.costmodel.sharding import Assignment
from meshwright.planner.decisions import BY_BLOCK, DECISIONS, SHARING
from meshwright.planner.overrides.pinned import decided
from meshwright.planner.overrides.restrictions import Restrictions
from meshwright.planner.plan import Plan, StagePlan, compress_names


def without_effect(
    given: Restrictions, plan: Plan, assignments: Sequence[Mapping[str, Assignment]]
) -> list[str]:
    """A sentence per value that blocks were given and don't have, and per tensor-parallel degree
    that was given and splits nothing."""
    found = [
        f"override {name}={asked!r} has no effect on {', '.join(compress_names(blocks))}: {why}"
        for name in BY_BLOCK
        for asked, why, blocks in _unheeded(name, given, plan)
    ]
    for name, own in DECISIONS.items():
        idle = own.beside and all(getattr(stage, own.beside) == 1 for stage in plan.stages)
        if idle and (value := getattr(given, name)):
            found.append(f"override {name}={value!r} has no effect: {own.beside}=1 on all stages")
    position = {block: b for b, block in enumerate(given.blocks)}
    for k, stage in enumerate(plan.stages):
        asked = {given.tp[position[name]] for name in stage.blocks} - {None}
        if stage.tp > 1 and asked and not _splits(assignments[k]):
            found.append(
                f"override tp={stage.tp} splits nothing in stage {k}: each of its {stage.tp} ranks "
                "computes all of it; drop the override, or give shardings"
            )
    return found


def _unheeded(
    name: str, given: Restrictions, plan: Plan
) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """Values of an override, why they are not there, and the blocks that lack them."""
    asked = dict(zip(given.blocks, getattr(given, name), strict=True))
    lacking: dict[tuple[Any, str], list[str]] = {}
    for stage in plan.stages:
        for block, policy in zip(stage.blocks, stage.policies, strict=True):
            value = asked[block]
            has = decided(name, stage, policy)
            if value is not None and has != value:
                lacking.setdefault((value, _why(name, stage, has)), []).append(block)
    for (value, why), blocks in lacking.items():
        yield value, why, tuple(blocks)


def _why(name: str, stage: StagePlan, has: Any) -> str:
    own = DECISIONS[name]
    if own in SHARING and stage.holders == 1:
        return "there is one data-parallel rank, so that nothing can be divided"
    if not own.works(stage):
        return "the plan uses no ZeRO" + f"-{own.zeros[0]}" * (len(own.zeros) == 1)
    return f"the plan has {has!r}"


def _splits(assigned: Mapping[str, Assignment]) -> bool:
    """Whether an operator of these blocks takes or gives less than the whole on a rank."""
    return any(
        placement.kind != "R"
        for assignment in assigned.values()
        for strategy in assignment.strategies.values()
        for placement in (*strategy.operands, *strategy.results)
    )
