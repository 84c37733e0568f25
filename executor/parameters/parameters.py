"""Parameters of a rank: plain local leaves inside the graphs, DTensors under their FQNs at the API.

Three tensors may stand for one parameter on a rank. The *leaf* is what the lowered graphs read, in
the compute dtype. The *stored* tensor is what the optimizer updates, in fp32, divided over the data
axis by ZeRO; where it would equal the leaf, the two share memory. The *gradient* is accumulated
over micro-batches in fp32, summed over the axes on which it is partial (`gradients.py`), and handed
to the stored one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.lowering.reshard import local_part
from meshwright.executor.ranks.meshes import Holders, Place


@dataclass(slots=True, kw_only=True, eq=False)
class StageParameter:
    """One parameter on this rank.

    `placement` is its state on the tensor axis, `sum_data` and `sum_tensor` say on which axes its
    gradient comes out partial, `zero` how ZeRO divides the local tensor over the shard axis of its
    holders (R: not) and `level` which stage of ZeRO does; `sharded` is `fully_shard`'s tensor where
    it is gathered. `reached`: it is trained and the loss depends on it; `norm` is that of this
    rank's gradient as the last backward left it. `shared_stages` are all stages of the plan that
    hold it. `experts` says that dim 0 counts experts, which its holders' `part` divides before
    anything else does.
    """

    value: str
    fqn: str
    shape: tuple[int, ...]
    placement: Placement
    sum_data: bool
    sum_tensor: bool
    trainable: bool
    leaf: nn.Parameter
    stored: torch.Tensor
    zero: Placement = R
    level: int = 0
    reached: bool = True
    gradient: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    api: Any = None
    sharded: Any = None
    shared_stages: tuple[int, ...] = ()
    experts: bool = False

    @property
    def scattered(self) -> bool:
        """Whether ranks of the shard axis get a part of its gradient each."""
        return self.zero.sharded and self.sum_data

    @property
    def gathered(self) -> bool:
        """Whether `fully_shard` gathers it for each block's use (ZeRO-3)."""
        return self.level == 3 and self.zero.sharded

    @property
    def aliased(self) -> bool:
        """Whether what the optimizer updates is what the graphs read."""
        return self.gathered or self.leaf.data_ptr() == self.stored.data_ptr()


def zero_placement(
    shape: Sequence[int], placement: Placement, n: int, *, first: int = 0, even: bool = True
) -> Placement:
    """How ZeRO divides a local tensor among n: along a dim from `first` on that the tensor axis
    leaves alone, if one divides; along the one it splits only if the parts are `even`, so that all
    its ranks decide alike."""
    dims = sorted(
        range(first, len(shape)), key=lambda d: (placement.sharded and d == placement.dim, d)
    )
    for d in dims:
        if placement.sharded and d == placement.dim and (placement.split > 1 or not even):
            continue
        if shape[d] % n == 0 and shape[d] >= n:
            return Placement("S", d)
    return R


def make_parameter(
    *,
    value: str,
    fqn: str,
    source: torch.Tensor,
    placement: Placement,
    place: Place,
    sum_data: bool,
    sum_tensor: bool,
    zero: int,
    dtype: torch.dtype,
    shared_stages: tuple[int, ...],
    gatherable: bool = True,
    experts: bool = False,
    reached: bool = True,
) -> StageParameter:
    """This rank's part of a parameter, copied from the user's; the user's tensor is left alone.
    ZeRO-3 leaves whole what is not `gatherable`."""
    holders = place.holders(experts=experts)
    local = _part(source.detach(), placement, place, holders)
    n = holders.shard.size
    divided = bool(zero) and source.requires_grad and n > 1
    even = not placement.sharded or source.shape[placement.dim] % place.tensor.size == 0
    divide = (
        zero_placement(local.shape, placement, n, first=int(experts), even=even) if divided else R
    )
    if zero == 3 and not (sum_data and gatherable):
        divide = R  # `fully_shard` would sum what is whole on every rank
    gathered = zero == 3 and divide.sharded
    # what `fully_shard` divides waits on the host, and is moved block by block
    where = torch.device("cpu") if gathered else place.device
    local = local.contiguous()
    local = torch.empty_like(local, device=where) if local.is_meta else local.to(where, copy=True)
    stored = local.float() if source.is_floating_point() else local
    if divide.sharded and not gathered:
        stored = local_part(stored, divide, n, holders.shard.rank).clone()
    shares = divide == R and stored.dtype == dtype
    leaf = stored if shares or gathered else local.to(dtype)
    return StageParameter(
        value=value,
        fqn=fqn,
        shape=tuple(source.shape),
        placement=placement,
        sum_data=sum_data,
        sum_tensor=sum_tensor,
        trainable=source.requires_grad,
        leaf=nn.Parameter(leaf, requires_grad=source.requires_grad),
        stored=stored,
        zero=divide,
        level=zero,
        shared_stages=shared_stages,
        experts=experts,
        reached=reached and source.requires_grad,
    )


def _part(x: torch.Tensor, placement: Placement, place: Place, holders: Holders) -> torch.Tensor:
    """This rank's part of a whole tensor, before ZeRO divides it."""
    if holders.part.size > 1:
        x = local_part(x, Placement("S", 0), holders.part.size, holders.part.rank)
    if placement.sharded:
        x = local_part(x, placement, place.tensor.size, place.tensor.rank)
    return x


def expose(parameter: StageParameter, place: Place) -> None:
    """Make the tensor of the API, over what is stored."""
    wrapped = wrap(parameter, parameter.stored, place)
    parameter.api = nn.Parameter(wrapped, requires_grad=parameter.trainable)


def wrap(parameter: StageParameter, local: torch.Tensor, place: Place) -> torch.Tensor:
    """A local tensor of the stored layout as a DTensor on the stage's mesh (itself on one
    device)."""
    if place.mesh is None:
        return local
    placement, zero = parameter.placement, parameter.zero
    on_shard: Any = Replicate()
    if zero.sharded:
        nested = placement.sharded and placement.dim == zero.dim
        on_shard = (
            _StridedShard(zero.dim, split_factor=place.tensor.size) if nested else Shard(zero.dim)
        )
    data = [
        on_shard if kind == "shard" else Shard(0) if kind == "part" else Replicate()
        for kind in place.here.data_dims(experts=parameter.experts)
    ]
    shape = torch.Size(parameter.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, place.mesh, [*data, as_torch(placement)], run_check=False, shape=shape, stride=stride
    )


def as_torch(placement: Placement) -> Replicate | Shard | _StridedShard:
    """A placement on one axis as DTensors have it."""
    if not placement.sharded:
        return Replicate()
    if placement.split > 1:
        return _StridedShard(placement.dim, split_factor=placement.split)
    return Shard(placement.dim)


def wrap_like(parameter: StageParameter, local: torch.Tensor) -> torch.Tensor:
    """A local tensor of the stored layout as one of the API's, every step: `from_local` checks what
    is known."""
    api = parameter.api.data
    if not isinstance(api, DTensor):
        return local
    return DTensor(local, api._spec, requires_grad=False)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of an API tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def load(parameter: StageParameter, source: torch.Tensor, place: Place) -> None:
    """Copy a whole tensor's local part into a stored parameter."""
    holders = place.holders(experts=parameter.experts)
    local = _part(source.detach(), parameter.placement, place, holders)
    if parameter.zero.sharded:
        local = local_part(local, parameter.zero, holders.shard.size, holders.shard.rank)
    with torch.no_grad():
        parameter.stored.copy_(local)


def settle(parameters: Iterable[StageParameter]) -> None:
    """Leaves of frozen parameters after a load: no step refreshes them."""
    with torch.no_grad():
        for p in parameters:
            if not p.aliased and not p.trainable:
                p.leaf.copy_(p.stored)
