"""What the ranks of a plan agree on before it runs: process groups, stages, the seed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.executor.host_values import read
from meshwright.executor.parameters import check_sharding
from meshwright.executor.ranks import Place, join_groups, single_process, stage_meshes, world_size
from meshwright.executor.stages import CheckedPlan
from meshwright.planner.plan import Plan, PlanError, crossings, stages_of_parameters


def join_plan(checked: CheckedPlan, device: torch.device) -> Place:
    """Make this process' groups for a plan, together with all other ranks. Raises PlanError, on all
    alike and before any group is made, for a plan of another number of ranks."""
    plan, graph = checked.plan, checked.graph
    meshes = stage_meshes(plan, graph, checked.factors, checked.assignments)
    check_sharding(plan, meshes)
    if plan.num_ranks == 1 and world_size() == 1:
        return single_process(device, meshes)
    if world_size() != plan.num_ranks:
        raise PlanError(
            f"made for {plan.num_ranks} ranks, but {world_size()} are running",
            place="plan",
            way_out=f"launch {plan.num_ranks} with torchrun, take a plan file for {world_size()} "
            f"ranks, or plan again for a cluster of {world_size()} devices",
        )
    edges = [e for e in crossings(plan, graph) if meshes[e[0]].ranks != meshes[e[1]].ranks]
    tied = sorted({o for o in stages_of_parameters(plan, graph).values() if len(o) > 1})
    return join_groups(meshes, device, edges, tied)


def stages_of_ranks(plan: Plan) -> dict[int, list[int]]:
    """Rank -> the stages that it runs."""
    stages: dict[int, list[int]] = {}
    for k, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            stages.setdefault(rank, []).append(k)
    return stages


def shared_seed(place: Place) -> int:
    """Rank 0's torch seed, on every rank: the root of all dropout masks."""
    seed = torch.tensor(torch.initial_seed() & 0x7FFFFFFF, device=place.device)
    if place.mesh is not None:
        dist.broadcast(seed, src=0)
    shared: int = read(seed, lambda: 0)
    return shared
