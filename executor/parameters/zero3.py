"""ZeRO-3 by torch's `fully_shard`: all-gather of weights, frozen ones too, for each block's use,
reduce-scatter of gradients.

It shards the plain local tensors of a stage over the shard axis. The API's DTensors lie over its
shards, so names, placements and checkpoints are those of every other plan. Gradients are summed,
not averaged, as the losses of all ranks add up. Under expert parallelism, experts are sharded over
the ranks that hold the same ones, and gathered beside the rest of their block.

With secondary shards (ZeRO++'s hpZ) the forward's all-gather over all n ranks leaves 1/k of the
whole weights on each of k neighbours, in the precision that is computed in, and the backward
gathers from these. torch cuts a weight along its dim 0 for that, which suits no weight that ZeRO
shards along another dim: here it is cut as flat memory, which is whole again when gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from meshwright.costmodel.quantized import BLOCK, GRADIENT_BITS, WEIGHT_BITS
from meshwright.executor.devices import has_streams
from meshwright.executor.host_values import has_values
from meshwright.executor.parameters.parameters import StageParameter, local_of
from meshwright.executor.ranks import Holders, Place, StageMesh, device_mesh
from meshwright.planner.plan import Plan, PlanError

# a placement on another mesh than the module's, which older versions of torch lack
_ON_OTHER_MESH: Any = getattr(_fsdp_common, "ShardPlacementResult", None)


def shard_stage(
    stage: nn.Module,
    blocks: Sequence[nn.Module],
    parameters: Sequence[StageParameter],
    place: Place,
    dtype: torch.dtype,
    *,
    kept: torch.dtype,
    ends: bool,
) -> None:
    """Apply `fully_shard` to a stage's blocks and to the stage itself, gathering in `dtype` and
    reducing in `kept`.

    Parameters that are not `gathered` are left alone; those of a block lie in host memory where all
    of them are to. `ends`: the stage's forward is followed at
    once by its backward, so the last block's weights are kept for it.
    """
    by_leaf = {id(p.leaf): p for p in parameters if p.gathered}
    ignored = {p.leaf for p in parameters if not p.gathered}
    mesh = _mesh(place.holders(experts=False), place)
    if any(p.experts and p.gathered for p in parameters):
        experts = _mesh_of_experts(place)

    def sharding(leaf: nn.Parameter) -> Any:
        p = by_leaf[id(leaf)]
        over_shards = Shard(p.shard_placement.dim)
        return _ON_OTHER_MESH(over_shards, experts) if p.experts else over_shards

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept, cast_forward_inputs=False)
    # fake tensors can't be pinned
    pinned = has_streams(place.device) and all(has_values(p.stored) for p in parameters)
    for module in (*blocks, stage):
        named = module.named_parameters(recurse=False)
        gathered = [(name, by_leaf[id(leaf)]) for name, leaf in named if id(leaf) in by_leaf]
        if not gathered and module is not stage:
            continue
        hosted = bool(gathered) and all(p.hosted for _, p in gathered)
        sharded = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=not (ends and module in (blocks[-1], stage)),
            shard_placement_fn=sharding,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if hosted else OffloadPolicy(),
            ignored_params=ignored,
        )
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        _keep_secondary(sharded, place)
        quantize(sharded, place)
        for name, p in gathered:
            p.leaf = p.sharded = getattr(module, name)  # frees the whole one
            p.stored = local_of(p.sharded.detach())
            p.home = "host" if hosted else "device"


class _SecondaryParam(FSDPParam):
    """torch's sharded parameter, whose shard between forward and backward is a part of its flat
    memory, on the ranks of `post_forward_mesh_info`."""

    @property
    def fsdp_placement(self) -> Shard:
        """The dim that a gather's parts are laid side by side on: the first of flat parts."""
        flat = self.sharded_state == ShardedState.SHARDED_POST_FORWARD
        return Shard(0) if flat else self.__dict__["_own_placement"]

    @fsdp_placement.setter
    def fsdp_placement(self, placement: Shard) -> None:
        self.__dict__["_own_placement"] = placement

    def to_sharded_post_forward(self) -> None:
        """Keep this rank's part of the whole weight, and free the rest."""
        mesh: Any = self.post_forward_mesh_info
        gathered = self.all_gather_outputs[0]
        part = gathered.numel() // mesh.shard_mesh_size
        shard = gathered.narrow(0, part * mesh.shard_mesh_rank, part)
        self._sharded_post_forward_param_data = shard.clone()
        self._setattr_on_modules(self.sharded_param)
        self.free_unsharded_param()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD


def _keep_secondary(module: FSDPModule, place: Place) -> None:
    """Let a module's weights stay on the secondary axis from its forward to its backward."""
    axis = place.secondary
    if axis is None or place.here.secondary == 1:
        return
    ranks = dist.get_process_group_ranks(axis.group)
    mesh = device_mesh((axis.group,), place.device.type, ranks, (axis.size,), ("secondary",))
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # one in older versions of torch
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is None or group.post_forward_mesh_info is None:
            continue  # kept whole for a backward that follows at once
        group.post_forward_mesh_info = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        for fsdp_param in group.fsdp_params:
            placement = fsdp_param.__dict__.pop("fsdp_placement")
            fsdp_param.__class__ = _SecondaryParam
            fsdp_param.fsdp_placement = placement
            fsdp_param.post_forward_mesh_info = group.post_forward_mesh_info


def check_sharding(plan: Plan, meshes: Sequence[StageMesh]) -> None:
    """Raise PlanError, on all ranks alike, for ZeRO-3 that this version of torch can't run."""
    for k, (stage, mesh) in enumerate(zip(plan.stages, meshes, strict=True)):
        sharded_experts = stage.gathers and mesh.experts > 1 and mesh.expert_shards > 1
        if sharded_experts and _ON_OTHER_MESH is None:
            raise PlanError(
                f"torch {torch.__version__} can't shard the parameters of one block over different "
                "ranks",
                place=f"plan: stage {k}: zero=3 with ep={stage.ep}",
                legal="zero 0, 1 or 2, an ep that leaves no two ranks the same experts, or a newer "
                "torch",
            )


def _mesh(holders: Holders, place: Place) -> DeviceMesh:
    """The device mesh for `fully_shard`: (shard,), or (replicate, shard) for hybrid sharding."""
    device, shard, replicate = place.device.type, holders.shard, holders.replicate
    if replicate.size == 1:
        ranks = dist.get_process_group_ranks(shard.group)
        return device_mesh((shard.group,), device, ranks, (shard.size,), ("shard",))
    ranks = dist.get_process_group_ranks(holders.data.group)
    groups, sizes = (replicate.group, shard.group), (replicate.size, shard.size)
    return device_mesh(groups, device, ranks, sizes, ("replicate", "shard"))


def _mesh_of_experts(place: Place) -> Any:
    """The mesh of the experts' holders, as `fully_shard` takes it for single parameters."""
    holders = place.holders(experts=True)
    mesh = _mesh(holders, place)
    if holders.replicate.size == 1:
        return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def collect_gradients(parameters: Iterable[StageParameter], place: Place) -> None:
    """Take the reduce-scattered gradients from `fully_shard` after the step's last backward, and
    all-reduce over the tensor axis those that are partial on it."""
    partial: list[tuple[StageParameter, torch.Tensor]] = []
    for p in parameters:
        if not (p.gathered and p.reached):
            continue
        grad = p.sharded.grad
        gradient = torch.zeros_like(p.stored) if grad is None else local_of(grad)
        p.gradient, p.sharded.grad = gradient, None
        if p.sum_tensor and place.tensor.size > 1:
            partial.append((p, gradient))
    if not partial:
        return
    flat = torch.cat([gradient.reshape(-1).to(place.device) for _, gradient in partial])
    dist.all_reduce(flat, group=place.tensor.group)
    start = 0
    for p, gradient in partial:
        stop = start + gradient.numel()
        p.gradient = flat[start:stop].view_as(gradient).to(gradient.device)
        start = stop


# --- quantized gathers ----------------------------------------------------------------------------

# `fully_shard`'s collectives in quantised blocks (ZeRO++'s qwZ and qgZ): `costmodel/quantized.py`
# has the mathematics.
#
# What is not finite stays so: its block's scale is infinite or NaN, and so is all that is made of
# it.


# torch 2.13 renamed it, and warns at the old name
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
AT_ONCE = 8  # parts in which gathered blocks are turned back, each in fp32 meanwhile


def packed(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers (r, n) as rows of bytes: the integers of all blocks, then their scales."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scales = torch.linalg.vector_norm(blocks, math.inf, dim=2).div_(2 ** (bits - 1) - 1)
    least = torch.finfo(torch.float32).tiny  # of a block of zeros
    codes = (blocks / scales.clamp_min(least)[..., None]).round_().to(torch.int8)
    if bits == 4:
        codes = (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)
    rows = codes.view(torch.uint8).flatten(1), scales.view(torch.uint8)
    return torch.cat(rows, dim=1)


def unpacked(rows: torch.Tensor, n: int, bits: int) -> torch.Tensor:
    """The numbers (r, n), in fp32, that `packed` rows stand for."""
    count = -(-n // BLOCK)
    stop = count * BLOCK * bits // 8
    codes = rows[:, :stop].reshape(len(rows), count, -1).view(torch.int8)
    scales = rows[:, stop:].clone().view(torch.float32)
    if bits == 4:
        codes = torch.stack(((codes << 4) >> 4, codes >> 4), dim=-1).flatten(2)
    return (codes * scales[..., None]).flatten(1)[:, :n]


def exchanged_sum(x: Sequence[torch.Tensor], group: Any, bits: int = GRADIENT_BITS) -> torch.Tensor:
    """The sum over the ranks of a group of what each of them has for this one; `x` has a tensor for
    each of them."""
    sent = torch.cat([packed(part.reshape(1, -1), bits) for part in x])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    n = x[0].numel()
    total = unpacked(received[:1], n, bits)
    for row in received[1:]:
        total.add_(unpacked(row[None], n, bits))
    return total.view(-1)


class _Allocating:
    """Buffers as `fully_shard` makes them by itself."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_Allocating):
    """All-gather of weights in blocks of 8 bits; over the group named `exact` as they are."""

    def __init__(self, exact: str | None) -> None:
        self.exact = exact

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        if group.group_name == self.exact:
            return _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        local_bits = packed(input_tensor.view(1, -1), WEIGHT_BITS)
        gathered = local_bits.new_empty(group.size(), local_bits.shape[1])
        _ALL_GATHER(gathered.view(-1), local_bits.view(-1), group=group)
        n, into = input_tensor.numel(), output_tensor.view(len(gathered), -1)
        chunk = -(-len(gathered) // AT_ONCE)
        for rows, here in zip(gathered.split(chunk), into.split(chunk), strict=True):
            here.copy_(unpacked(rows, n, WEIGHT_BITS))
        return None


class QuantizedReduceScatter(_Allocating):
    """Sum of gradients in blocks of 4 bits, by all-to-alls over `hops`: all ranks at once, or those
    near and then those far."""

    def __init__(self, hops: Sequence[Any]) -> None:
        self.hops = hops

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        parts = input_tensor.view(group.size(), -1)
        if self.hops:
            near, far = self.hops
            by_node = parts.view(far.size(), near.size(), -1)
            x = exchanged_sum([by_node[:, i] for i in range(near.size())], near)
            output_tensor.copy_(exchanged_sum([*x.view(far.size(), -1)], far))
        else:
            output_tensor.copy_(exchanged_sum([*parts], group))
        return None


def quantize(module: FSDPModule, place: Place) -> None:
    """Let a module's weights and gradients travel as its stage decides."""
    near, far, sharing = place.secondary, place.far, place.here.sharing
    if sharing.quantizes_weights:
        exact = near.group.group_name if near is not None and near.size > 1 else None
        module.set_custom_all_gather(QuantizedAllGather(exact))  # type: ignore[arg-type]
    if sharing.quantizes_gradients:
        hops = (near.group, far.group) if near and far and near.size > 1 else ()
        module.set_custom_reduce_scatter(QuantizedReduceScatter(hops))  # type: ignore[arg-type]
