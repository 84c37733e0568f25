"""Where stages lie and what passes between them: pure functions of a plan and its graph."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.graph import Graph
from meshwright.planner.plan.plan import Plan, StagePlan


def spread_of(stage: StagePlan) -> int:
    """How many times further apart than in a contiguous mesh the neighbours on a stage's data axis
    are: 1 where they have no one distance."""
    rows = np.array(stage.ranks).reshape(-1, stage.tp)
    apart = np.diff(rows[:, 0])
    regular = (np.diff(rows) == 1).all() and len(apart) and (apart == apart[0]).all()
    return max(1, int(apart[0]) // stage.tp) if regular and apart[0] % stage.tp == 0 else 1


def stage_of(plan: Plan) -> dict[str, int]:
    return {name: k for k, stage in enumerate(plan.stages) for name in stage.blocks}


def crossings(plan: Plan, graph: Graph) -> dict[tuple[int, int], tuple[str, ...]]:
    """(source stage, target stage) -> the activations that travel between them."""
    owner = stage_of(plan)
    made = {value: owner[b.name] for b in graph.blocks for value in b.outputs}
    found: dict[tuple[int, int], dict[str, None]] = {}
    for block in graph.blocks:
        for value in block.inputs:
            edge = (made[value], owner[block.name])
            if edge[0] != edge[1]:
                found.setdefault(edge, {})[value] = None
    return {edge: tuple(values) for edge, values in sorted(found.items())}


def stages_of_parameters(plan: Plan, graph: Graph) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter."""
    owner = stage_of(plan)
    found: dict[str, dict[int, None]] = {}
    for block in graph.blocks:
        for value in block.parameters:
            found.setdefault(value, {})[owner[block.name]] = None
    return {value: tuple(sorted(stages)) for value, stages in found.items()}
