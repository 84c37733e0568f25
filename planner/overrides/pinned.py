"""Overrides against a plan: those under which the search finds it, those that it does not heed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import Assignment, Entry
from meshwright.planner.decisions import BY_BLOCK, DECISIONS, SHARING, not_in_fp16
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import Restrictions
from meshwright.planner.plan import (
    Plan,
    StagePlan,
    compress_names,
    express_shardings,
    pipelines,
    placement_of,
    resolve_shardings,
    sent_in_parts,
)


def plan_overrides(plan: Plan, graph: Graph) -> Overrides:
    """Overrides that pin a checked plan, of the shardings those that it states. Raises `PlanError`
    where the ranks follow no placement that the search knows."""
    chain = [plan.stages[k] for k in pipelines(plan)[0]]
    blocks = [name for stage in chain for name in stage.blocks]
    values = {
        name: [decided(name, stage, policy) for stage in chain for policy in stage.policies]
        for name in BY_BLOCK
    }
    return Overrides(
        **{name: _pinned(blocks, of_blocks) for name, of_blocks in values.items()},
        **_of_all_stages(plan),
        pp=len(plan.devices),
        virtual_stages=len(plan.stages) // len(plan.devices),
        placement=placement_of(plan),
        stages=[compress_names(stage.blocks) for stage in chain],
        shardings=_shardings(plan, graph),
    )


def _of_all_stages(plan: Plan) -> dict[str, Any]:
    """A plan's values of decisions that overrides have one value of: of parts the most of any
    stage; None where it does without."""
    values: dict[str, Any] = {}
    for name, decision in DECISIONS.items():
        if decision.by_block or not (holders := plan.having(name)):
            continue
        value, beside = getattr(holders[0], name), decision.beside
        if decision.parts:
            parts = [getattr(stage, name) for stage in holders]
            value = {part: max(p.get(part, 0.0) for p in parts) for part in decision.parts}
            value = value if any(value.values()) else None
        idle = beside and getattr(holders[0], beside) == DECISIONS[beside].off
        values[name] = None if idle else value or (1 if decision.sizes else None)
    return values


def decided(name: str, stage: StagePlan, policy: str) -> Any:
    """A stage's value of an override by block, with the recompute policy of one of its blocks;
    None where there is nothing to divide."""
    decision = DECISIONS[name]
    if decision.acts == "block":
        return policy
    if decision.shared is None:
        return getattr(stage, name)
    return decision.shared(stage, stage.holders) if decision.works(stage) else None


def _pinned(blocks: Sequence[str], values: Sequence[Any]) -> Any:
    """One value for all blocks, or by their names; None is free."""
    by_value = defaultdict[Any, list[str]](list)
    for block, value in zip(blocks, values, strict=True):
        by_value[value].append(block)
    if len(by_value) == 1:
        return values[0]
    by_value.pop(None, None)
    return {name: value for value, of in by_value.items() for name in compress_names(of)}


def _shardings(plan: Plan, graph: Graph) -> dict[str, str]:
    """The globs of all stages, over a stage's blocks, as globs over the model. What is sent whole
    is so whatever the globs say: its state is not pinned."""
    entries: dict[str, Entry] = {}
    in_parts = sent_in_parts(plan, graph)
    for k, stage in enumerate(plan.stages):
        blocks = [block for block in graph.blocks if block.name in stage.blocks]
        read = {v for block in graph.blocks if block.name not in stage.blocks for v in block.inputs}
        read -= in_parts
        leaving = {op.name for block in blocks for op in block.ops if read.intersection(op.results)}
        resolved = resolve_shardings(graph, blocks, stage.shardings, f"plan: stage {k}")
        resolved |= {n: replace(resolved[n], state=None) for n in leaving & resolved.keys()}
        entries |= {name: entry for name, entry in resolved.items() if entry != Entry()}
    return express_shardings(graph, graph.blocks, entries)


# --- overrides without an effect ------------------------------------------------------------------


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


def allowed_without_effect(allow: Collection[str], precision: str) -> list[str]:
    """A sentence for each decision that is allowed, and that a precision can't have."""
    barred = {name: not_in_fp16(name) for name in allow if precision == "fp16"}
    return [f"allow={name!r} has no effect in fp16: {why}" for name, why in barred.items() if why]


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
        nothing = "be divided" if decision.column == "ZeRO" else "be summed"
        return f"there is one data-parallel rank, so that nothing can {nothing}"
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
