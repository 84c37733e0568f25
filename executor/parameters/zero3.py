"""ZeRO-3 by torch's `fully_shard`: weights gathered for each block's use, gradients scattered.

What it shards are the plain local tensors of a stage, over the shard axis; the API's DTensors are
laid over its shards, so that names, placements and checkpoints are those of every other plan. It
sums gradients as the losses of all ranks add up, and divides by nothing. Experts that are shared
out are sharded over the ranks that hold the same ones, and gathered beside the rest of their block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from meshwright.executor.parameters.parameters import StageParameter, local_of
from meshwright.executor.ranks.meshes import Holders, Place, StageMesh
from meshwright.planner.plan.plan import Plan, PlanError

# a placement on another mesh than the module's, which older versions of torch lack
_PLACED: Any = getattr(_fsdp_common, "ShardPlacementResult", None)


def shard_stage(
    stage: nn.Module,
    blocks: Sequence[nn.Module],
    parameters: Sequence[StageParameter],
    place: Place,
    dtype: torch.dtype,
    *,
    ends: bool,
) -> None:
    """Shard the parameters registered on a stage's blocks and on the stage itself, to be gathered
    in `dtype`. Those that are not `gathered` are left alone. `ends`: the stage's forward is
    followed by its backward."""
    held = {id(p.leaf): p for p in parameters if p.gathered}
    whole = {p.leaf for p in parameters if not p.gathered}
    mesh = _mesh(place.holders(experts=False), place)
    if any(p.experts and p.gathered for p in parameters):
        experts = _mesh_of_experts(place)

    def sharding(leaf: nn.Parameter) -> Any:
        p = held[id(leaf)]
        over_shards = Shard(p.zero.dim)
        return _PLACED(over_shards, experts) if p.experts else over_shards

    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*blocks, stage):
        own = module.named_parameters(recurse=False)
        found = [(name, held[id(leaf)]) for name, leaf in own if id(leaf) in held]
        if not found and module is not stage:
            continue
        sharded = fully_shard(
            module,
            mesh=mesh,
            # where the backward follows at once, what it needs first is kept
            reshard_after_forward=not (ends and module in (blocks[-1], stage)),
            shard_placement_fn=sharding,
            mp_policy=policy,
            ignored_params=whole,
        )
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        for name, p in found:
            p.leaf = p.sharded = getattr(module, name)  # the whole one is let go
            p.stored = local_of(p.sharded.detach())


def check_sharding(plan: Plan, meshes: Sequence[StageMesh]) -> None:
    """Raise `PlanError`, on all ranks alike, for a plan that this version of torch can't shard."""
    for k, (stage, mesh) in enumerate(zip(plan.stages, meshes, strict=True)):
        if stage.zero == 3 and mesh.experts > 1 and mesh.expert_shards > 1 and _PLACED is None:
            raise PlanError(
                f"plan: stage {k}: zero=3 with ep={stage.ep}: torch {torch.__version__} can't "
                "shard the parameters of one block over different ranks; legal: zero 0, 1 or 2, an "
                "ep that leaves no two ranks the same experts, or a newer torch"
            )


def _mesh(holders: Holders, place: Place) -> DeviceMesh:
    """The mesh that `fully_shard` divides over, and replicates across where ZeRO does."""
    device, shard, replicate = place.device.type, holders.shard, holders.replicate
    if replicate.size == 1:
        return DeviceMesh.from_group(shard.group, device, mesh_dim_names=("shard",))
    ranks = torch.tensor(dist.get_process_group_ranks(holders.data.group))
    return DeviceMesh.from_group(
        [replicate.group, shard.group],
        device,
        mesh=ranks.view(replicate.size, shard.size),
        mesh_dim_names=("replicate", "shard"),
    )


def _mesh_of_experts(place: Place) -> Any:
    """The same for experts that are shared out, as `fully_shard` takes it for single parameters."""
    holders = place.holders(experts=True)
    mesh = _mesh(holders, place)
    if holders.replicate.size == 1:
        return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def collect(parameters: Iterable[StageParameter], place: Place) -> None:
    """After the last backward of a step: this rank's gradients of what is sharded, whole on the
    tensor axis, too."""
    summed = []
    for p in parameters:
        if not (p.gathered and p.reached):
            continue
        grad = p.sharded.grad
        found = torch.zeros_like(p.stored) if grad is None else local_of(grad)
        p.gradient, p.sharded.grad = found, None
        if p.sum_tensor and place.tensor.size > 1:
            summed.append((p, found))
    if not summed:
        return
    flat = torch.cat([found.reshape(-1) for _, found in summed])
    dist.all_reduce(flat, group=place.tensor.group)
    parts = flat.split([found.numel() for _, found in summed])
    for (p, found), part in zip(summed, parts, strict=True):
        p.gradient = part.view_as(found)
