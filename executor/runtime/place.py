"""Where a plan puts this process: checked before any group is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Assignment
from meshwright.executor.parameters.zero3 import check_sharding
from meshwright.executor.ranks.launch import world_size
from meshwright.executor.ranks.meshes import Place, alone, join, stage_meshes
from meshwright.planner.plan.flow import crossings, stages_of_parameters
from meshwright.planner.plan.plan import Plan, PlanError


def place_of(
    plan: Plan,
    graph: Graph,
    table: FactorTable,
    assignments: Sequence[Mapping[str, Assignment]],
    device: torch.device,
) -> Place:
    """This process' place in a plan; makes its groups, together with all other ranks. `PlanError`,
    on all alike, for a plan of another number of ranks."""
    meshes = stage_meshes(plan, graph, table, assignments)
    check_sharding(plan, meshes)
    if plan.num_ranks == 1 and world_size() == 1:
        return alone(device, meshes)
    if world_size() != plan.num_ranks:
        raise PlanError(
            f"plan: made for {plan.num_ranks} ranks, but {world_size()} are running; launch "
            f"{plan.num_ranks} with torchrun, take a plan file for {world_size()} ranks, or plan "
            f"again for a cluster of {world_size()} devices"
        )
    edges = [e for e in crossings(plan, graph) if meshes[e[0]].ranks != meshes[e[1]].ranks]
    owners = sorted({o for o in stages_of_parameters(plan, graph).values() if len(o) > 1})
    return join(meshes, device, edges, owners)


def stages_of_ranks(plan: Plan) -> dict[int, list[int]]:
    """What each rank of the plan runs."""
    found: dict[int, list[int]] = {}
    for k, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            found.setdefault(rank, []).append(k)
    return found
