"""A whole plan as overrides, under which the search finds that plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import Entry
from meshwright.planner.decisions import BY_BLOCK, DECISIONS
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan import (
    Plan,
    StagePlan,
    compress_names,
    express_shardings,
    pipelines,
    placement_of,
    resolve_shardings,
)


def plan_overrides(plan: Plan, graph: Graph) -> Overrides:
    """Overrides that pin a checked plan: stages, meshes, ZeRO, recompute, schedule, micro-batches,
    ranks, and of the shardings those that the plan states.

    Raises `PlanError` where the ranks follow no placement that the search knows.
    """
    chain = [plan.stages[k] for k in pipelines(plan)[0]]
    blocks = [name for stage in chain for name in stage.blocks]
    values = {
        name: [decided(name, stage, policy) for stage in chain for policy in stage.policies]
        for name in BY_BLOCK
    }
    return Overrides(
        **{name: _pinned(blocks, own) for name, own in values.items()},
        **_of_all_stages(plan),
        pp=len(plan.devices),
        virtual_stages=len(plan.stages) // len(plan.devices),
        placement=placement_of(plan),
        stages=[compress_names(stage.blocks) for stage in chain],
        shardings=_shardings(plan, graph),
    )


def _of_all_stages(plan: Plan) -> dict[str, Any]:
    """What a plan has of the decisions of which overrides have one value: of parts the most of any
    stage; None where it does without."""
    found: dict[str, Any] = {}
    for name, own in DECISIONS.items():
        if own.by_block or not (of := plan.having(name)):
            continue
        value = getattr(of[0], name)
        if own.parts:
            value = {part: max(getattr(s, name).get(part, 0.0) for s in of) for part in own.parts}
            value = value if any(value.values()) else None
        idle = own.beside and getattr(of[0], own.beside) == DECISIONS[own.beside].off
        found[name] = None if idle else value or None
    return found


def decided(name: str, stage: StagePlan, policy: str) -> Any:
    """What a stage has of an override by block, with the recompute policy of one of its blocks;
    None where there is nothing to divide."""
    own = DECISIONS[name]
    if own.acts == "block":
        return policy
    if own.shared is None:
        return getattr(stage, name)
    return own.shared(stage, stage.holders) if own.works(stage) else None


def _pinned(blocks: Sequence[str], values: Sequence[Any]) -> Any:
    """One value for all blocks, or by their names; None is free."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    return {
        name: value
        for value in distinct
        if value is not None
        for name in compress_names(
            [b for b, own in zip(blocks, values, strict=True) if own == value]
        )
    }


def _shardings(plan: Plan, graph: Graph) -> dict[str, str]:
    """The globs of all stages, each about its own blocks, as globs over the model.

    What leaves a stage is whole there, whatever the globs say: its state is not pinned.
    """
    entries: dict[str, Entry] = {}
    for k, stage in enumerate(plan.stages):
        own = [block for block in graph.blocks if block.name in stage.blocks]
        read = {v for block in graph.blocks if block.name not in stage.blocks for v in block.inputs}
        leaving = {op.name for block in own for op in block.ops if read.intersection(op.results)}
        found = resolve_shardings(graph, own, stage.shardings, f"plan: stage {k}")
        for name in leaving & set(found):
            found[name] = replace(found[name], state=None)
        entries |= {name: entry for name, entry in found.items() if entry != Entry()}
    return express_shardings(graph, graph.blocks, entries)
