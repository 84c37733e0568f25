"""Data flow between stages: the activations sent, the stages of parameters, their distances."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.graph import Graph
from meshwright.planner.plan.plan import Plan, StagePlan


def spread_of(stage: StagePlan) -> int:
    """The spread of a stage: the distance between neighbours on its data axis, in units of that in
    a contiguous mesh; 1 where they have no one distance."""
    rows = np.array(stage.ranks).reshape(-1, stage.tp)
    steps = np.diff(rows[:, 0])
    regular = (np.diff(rows) == 1).all() and len(steps) and (steps == steps[0]).all()
    return max(1, int(steps[0]) // stage.tp) if regular and steps[0] % stage.tp == 0 else 1


def stage_of(plan: Plan) -> dict[str, int]:
    """Block name -> index of its stage."""
    return {name: k for k, stage in enumerate(plan.stages) for name in stage.blocks}


def crossings(plan: Plan, graph: Graph) -> dict[tuple[int, int], tuple[str, ...]]:
    """(source stage, target stage) -> the activations sent from one to the other."""
    owner = stage_of(plan)
    maker = {value: owner[b.name] for b in graph.blocks for value in b.outputs}
    sent: dict[tuple[int, int], dict[str, None]] = {}
    for block in graph.blocks:
        for value in block.inputs:
            edge = (maker[value], owner[block.name])
            if edge[0] != edge[1]:
                sent.setdefault(edge, {})[value] = None
    return {edge: tuple(values) for edge, values in sorted(sent.items())}


def stages_of_parameters(plan: Plan, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Parameter value -> the stages that hold it, ascending."""
    owner = stage_of(plan)
    holders: dict[str, dict[int, None]] = {}
    for block in graph.blocks:
        for value in block.parameters:
            holders.setdefault(value, {})[owner[block.name]] = None
    return {value: tuple(sorted(stages)) for value, stages in holders.items()}


def shared_apart(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Parameters that stages on different ranks hold, whose gradients meet before a step."""
    return tuple(
        graph.parameters[value]
        for value, stages in stages_of_parameters(plan, graph).items()
        if len({plan.stages[k].ranks for k in stages}) > 1
    )
