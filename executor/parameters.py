"""Parameters of a stage: plain local leaves inside the graphs, DTensors under their FQNs at the
API.

Three tensors may stand for one parameter on a rank. The *leaf* is what the lowered graphs read, in
the compute dtype. The *stored* tensor is what the optimizer updates, in fp32, divided over the data
axis under ZeRO-1; where it would equal the leaf, the two share memory. The *gradient* is
accumulated over micro-batches in fp32, summed over the axes on which it is partial once per step,
in buckets, and handed to the stored one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from costmodel.strategies import Placement, R
from executor.meshes import Place
from executor.reshard import all_gather, local_part


@dataclass(slots=True, kw_only=True)
class StageParameter:
    """One parameter on this rank. `placement` is its state on the tensor axis, `sum_data` and
    `sum_tensor` say on which axes its gradient comes out partial, `zero` is how ZeRO-1 divides it
    (R: not)."""

    value: str
    fqn: str
    shape: tuple[int, ...]
    placement: Placement
    sum_data: bool
    sum_tensor: bool
    trainable: bool
    leaf: torch.Tensor
    stored: torch.Tensor
    zero: Placement = R
    gradient: torch.Tensor | None = None
    api: Any = None
    shared_stages: tuple[int, ...] = ()

    @property
    def scattered(self) -> bool:
        """Whether the data axis reduce-scatters its gradient: not where stages still have to add
        theirs."""
        return self.zero.sharded and self.sum_data and len(self.shared_stages) < 2

    @property
    def aliased(self) -> bool:
        return self.leaf.data_ptr() == self.stored.data_ptr()


def zero_placement(shape: Sequence[int], placement: Placement, dp: int) -> Placement:
    """How ZeRO-1 divides a local tensor: along a dim the tensor axis leaves alone, if one
    divides."""
    dims = sorted(range(len(shape)), key=lambda d: (placement.sharded and d == placement.dim, d))
    for d in dims:
        if placement.sharded and d == placement.dim and placement.split > 1:
            continue
        if shape[d] % dp == 0 and shape[d] >= dp:
            return Placement("S", d)
    return R


def make_parameter(
    *, value: str, fqn: str, source: torch.Tensor, placement: Placement, place: Place,
    sum_data: bool, sum_tensor: bool, zero: int, dtype: torch.dtype, shared_stages: tuple[int, ...],
) -> StageParameter:  # fmt: skip
    """This rank's part of a parameter, copied from the user's; the user's tensor is left alone."""
    local = source.detach()
    if placement.sharded:
        local = local_part(local, placement, place.tensor.size, place.tensor.rank)
    floating = source.is_floating_point()
    meta = source.is_meta
    local = torch.empty_like(local, device=place.device) if meta else local.to(place.device).clone()
    local = local.contiguous()
    stored = local.float() if floating else local
    divide = (
        zero_placement(local.shape, placement, place.data.size)
        if zero and source.requires_grad
        else R
    )
    if divide.sharded and place.data.size > 1:
        stored = local_part(stored, divide, place.data.size, place.data.rank).clone()
    else:
        divide = R
    shares = not divide.sharded and stored.dtype == dtype
    leaf = stored.detach() if shares else local.to(dtype)
    parameter = StageParameter(
        value=value, fqn=fqn, shape=tuple(source.shape), placement=placement, sum_data=sum_data,
        sum_tensor=sum_tensor, trainable=source.requires_grad, leaf=leaf, stored=stored,
        zero=divide,
        shared_stages=shared_stages,
    )  # fmt: skip
    parameter.leaf.requires_grad_(source.requires_grad)
    parameter.api = _api_tensor(parameter, stored, place)
    if source.requires_grad and dtype != torch.float32:
        parameter.leaf.register_post_accumulate_grad_hook(lambda _: _accumulate(parameter))
    return parameter


def _accumulate(parameter: StageParameter) -> None:
    """Low-precision gradients of one micro-batch are added up in fp32."""
    grad = parameter.leaf.grad
    assert grad is not None
    if parameter.gradient is None:
        parameter.gradient = grad.float()
    else:
        parameter.gradient.add_(grad)
    parameter.leaf.grad = None


def wrap(parameter: StageParameter, local: torch.Tensor, place: Place) -> torch.Tensor:
    """A local tensor of the stored layout as a DTensor on the stage's mesh (itself on one
    device)."""
    if place.mesh is None:
        return local
    placement, zero = parameter.placement, parameter.zero
    on_tensor: Any = Replicate()
    if placement.sharded:
        strided = placement.split > 1
        on_tensor = (
            _StridedShard(placement.dim, split_factor=placement.split)
            if strided
            else Shard(placement.dim)
        )
    on_data: Any = Replicate()
    if zero.sharded:
        nested = placement.sharded and placement.dim == zero.dim
        on_data = (
            _StridedShard(zero.dim, split_factor=place.tensor.size) if nested else Shard(zero.dim)
        )
    shape = torch.Size(parameter.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, place.mesh, [on_data, on_tensor], run_check=False, shape=shape, stride=stride
    )


def _api_tensor(parameter: StageParameter, stored: torch.Tensor, place: Place) -> nn.Parameter:
    return nn.Parameter(wrap(parameter, stored, place), requires_grad=parameter.trainable)


def refresh(parameters: Iterable[StageParameter], place: Place) -> None:
    """Leaves from what the optimizer updated: gathered under ZeRO-1, cast in mixed precision."""
    with torch.no_grad():
        for p in parameters:
            if p.aliased or not p.trainable:
                continue
            whole = all_gather(p.stored, p.zero, place.data) if p.zero.sharded else p.stored
            p.leaf.copy_(whole)


def load(parameter: StageParameter, source: torch.Tensor, place: Place) -> None:
    """Copy a whole tensor's local part into a stored parameter."""
    local = source.detach()
    if parameter.placement.sharded:
        local = local_part(local, parameter.placement, place.tensor.size, place.tensor.rank)
    if parameter.zero.sharded:
        local = local_part(local, parameter.zero, place.data.size, place.data.rank)
    with torch.no_grad():
        parameter.stored.copy_(local)
