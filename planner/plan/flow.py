"""Data flow between stages: the activations sent, the stages of parameters, their distances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.written_buffers import updates_of
from meshwright.planner.plan.plan import Plan, StagePlan
from meshwright.planner.plan.ranges import PlanError


def spread_of(stage: StagePlan) -> int:
    """The spread of a stage: the distance between neighbours on its data axis, in units of that in
    a contiguous mesh; 1 where they have no one distance."""
    rows = np.array(stage.ranks).reshape(-1, stage.tp)
    steps = np.diff(rows[:, 0])
    regular = (np.diff(rows) == 1).all() and len(steps) and (steps == steps[0]).all()
    return max(1, int(steps[0]) // stage.tp) if regular and steps[0] % stage.tp == 0 else 1


def pipelines(plan: Plan) -> tuple[range, ...]:
    """The stages of each copy of the model that the schedule holds."""
    return SCHEDULES[plan.schedule].pipelines(len(plan.stages))


def passes_of(plan: Plan) -> int:
    """Micro-batches that each stage runs in a step: its copy's share of them."""
    return plan.num_microbatches // SCHEDULES[plan.schedule].copies


def check_copies(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` unless a schedule's copies of the model are alike, share the micro-batches
    out, and hold nothing that is not built for several."""
    schedule, count = SCHEDULES[plan.schedule], len(plan.stages)
    if schedule.copies == 1:
        return
    place, copies = f"plan: schedule={plan.schedule!r}", schedule.copies
    for name, value in (("stages", count), ("num_microbatches", plan.num_microbatches)):
        if value % copies:
            raise PlanError(
                f" with {name}={value}: it runs {copies} copies of the model, each with as many",
                place=place,
                legal=f"{name} a multiple of {copies}",
                way_out="change one of the two",
            )
    first, second = pipelines(plan)
    for one, other in zip(first, second, strict=True):
        own = plan.stages[one]
        beside: dict[str, Any] = {
            "ranks": own.ranks,
            "recompute": own.recompute,
            "segments": own.segments,
        }
        if own != replace(plan.stages[other], **beside):
            raise PlanError(
                f": stages {one} and {other} are copies of one stage, and differ",
                place=place,
                legal="equal stages but for their ranks and recompute",
                way_out=f"give stage {other} the blocks and decisions of stage {one}",
            )
    stage, updated = plan.stages[0], updates_of(graph, graph.blocks)
    for what, held in (
        ("zero=3", any(s.zero == 3 for s in plan.stages)),
        ("offload", any(any(s.offload.values()) for s in plan.stages)),
        ("post_validation", plan.post_validation),
        (f"cp={stage.cp}", stage.cp > 1),
        (f"ep={stage.ep}", any(s.ep > 1 for s in plan.stages)),
        (f"a buffer that the forward writes ({next(iter(updated), '')})", bool(updated)),
    ):
        if held:
            raise PlanError(
                f" with {what}: two copies of the model are not built for it",
                place=place,
                legal="zero 0 to 2 with dp and tp, states on devices, buffers that stay",
                way_out="drop it, or take a schedule with one copy (1f1b, zb_v, dualpipe_v)",
            )


def stage_of(plan: Plan, copy: int = 0) -> dict[str, int]:
    """Block name -> index of its stage, in a copy of the model."""
    return {name: k for k in pipelines(plan)[copy] for name in plan.stages[k].blocks}


def crossings(plan: Plan, graph: Graph) -> dict[tuple[int, int], tuple[str, ...]]:
    """(source stage, target stage) -> the activations sent from one to the other."""
    sent: dict[tuple[int, int], dict[str, None]] = {}
    for copy in range(len(pipelines(plan))):
        owner = stage_of(plan, copy)
        maker = {value: owner[b.name] for b in graph.blocks for value in b.outputs}
        for block in graph.blocks:
            for value in block.inputs:
                edge = (maker[value], owner[block.name])
                if edge[0] != edge[1]:
                    sent.setdefault(edge, {})[value] = None
    return {edge: tuple(values) for edge, values in sorted(sent.items())}


def stages_of_parameters(plan: Plan, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Parameter value -> the stages that hold it, ascending."""
    owners = [stage_of(plan, copy) for copy in range(len(pipelines(plan)))]
    holders: dict[str, set[int]] = {}
    for block in graph.blocks:
        for value in block.parameters:
            holders.setdefault(value, set()).update(owner[block.name] for owner in owners)
    return {value: tuple(sorted(stages)) for value, stages in holders.items()}


def shared_apart(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Parameters that stages on different ranks hold, whose gradients meet before a step."""
    return tuple(
        graph.parameters[value]
        for value, stages in stages_of_parameters(plan, graph).items()
        if len({plan.stages[k].ranks for k in stages}) > 1
    )
