"""Parameters of a rank: plain local leaves inside the graphs, DTensors under their FQNs at the API.

Up to three tensors stand for one parameter on a rank:

    leaf       read by the lowered graphs, in the compute dtype
    stored     this rank's ZeRO shard: updated by the optimizer, in the dtype that the precision
               keeps (fp32, but in pure bf16); frozen, as the user's model has it. It shares the
               leaf's memory where the two are equal, and that of the user's parameter where it is
               all of it
    gradient   accumulated over micro-batches in the dtype of `stored`, all-reduced or
               reduce-scattered (`reducer.py`), of the shape of `stored` when the step ends
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.rules import overload
from meshwright.costmodel.sharding import Placement, R
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.executor.devices import synchronize, to_host
from meshwright.executor.host_values import share_memory
from meshwright.executor.parameters import partial_dtensors
from meshwright.executor.parameters.whole_operands import act_as_whole
from meshwright.executor.ranks import Holders, Place
from meshwright.executor.resharding import local_part
from meshwright.executor.states_in_files import in_file

# where what the optimizer reads and writes of a parameter lies: of what is in a file (`states_in_
# files.py`), its gradient is in host memory (`host_memory.py`)
Home: TypeAlias = Literal["device", "host", "file"]


@dataclass(slots=True, kw_only=True, eq=False)
class ParameterSpec:
    """The plan's layout of one parameter on this rank's stage.

    `value` is its name in the graph, `placement` its state on the tensor axis; `sum_data` and
    `sum_tensor` say on which axes its gradient comes out partial. `sharing` is the stage's; ZeRO-3
    gathers only a `gatherable` parameter. `dtype` is the leaf's, `kept` that of `stored` where it
    is trained. `shared_stages` are all stages of the plan that hold it. With `experts`, dim 0
    counts experts, and the holders' `part` axis splits it before anything else does. `reached`: the
    loss depends on it. Where its `home` is not the device, the leaf, too, may have memory only
    while its block runs: `away` (`block_weights.py`).
    """

    value: str
    fqn: str
    placement: Placement
    sum_data: bool
    sum_tensor: bool
    sharing: Sharing = UNSHARED
    gatherable: bool = True
    dtype: torch.dtype = torch.float32
    kept: torch.dtype = torch.float32
    shared_stages: tuple[int, ...] = ()
    experts: bool = False
    reached: bool = True
    home: Home = "device"
    away: bool = False

    @property
    def hosted(self) -> bool:
        """Whether its home is off the device."""
        return self.home != "device"


@dataclass(slots=True, kw_only=True, eq=False)
class StageParameter(ParameterSpec):
    """One parameter on this rank: its spec and its tensors.

    `shape` is global. `shard_placement` is ZeRO's shard of the local tensor over the shard axis of
    its holders (R: not sharded); `sharded` is `fully_shard`'s DTensor (ZeRO-3). `gradient` is None
    between steps, `norm` the L2 norm of this rank's gradient as the last backward left it, `api`
    the user's nn.Parameter. `reached` implies `trainable`. `staged`: other stages of the plan lie
    on other ranks. Where passes of earlier steps are under way, the leaf is one of its `versions`.
    """

    shape: tuple[int, ...]
    trainable: bool
    leaf: nn.Parameter
    stored: torch.Tensor
    shard_placement: Placement = R
    gradient: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    api: Any = None
    sharded: Any = None
    staged: bool = False
    versions: tuple[nn.Parameter, ...] = ()

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The leaf, or those of all versions."""
        return self.versions or (self.leaf,)

    @property
    def scattered(self) -> bool:
        """Whether its gradient is reduce-scattered over the shard axis."""
        return self.shard_placement.sharded and self.sum_data

    @property
    def gathered(self) -> bool:
        """Whether `fully_shard` all-gathers it for each block's use (ZeRO-3)."""
        return self.sharing.gathers and self.shard_placement.sharded

    @property
    def aliased(self) -> bool:
        """Whether the leaf and the stored tensor share memory."""
        return self.gathered or share_memory(self.leaf, self.stored)


def shard_placement(
    shape: Sequence[int], placement: Placement, n: int, *, first: int = 0, even: bool = True
) -> Placement:
    """ZeRO's shard of a local tensor of `shape` over n ranks; R where no dim is divisible by n.

    The first such dim from `first` on that the tensor axis leaves alone; else the one that the
    tensor axis splits, if its parts are `even`, so that all tensor ranks decide alike.
    """
    dims = sorted(
        range(first, len(shape)), key=lambda d: (placement.sharded and d == placement.dim, d)
    )
    for d in dims:
        if placement.sharded and d == placement.dim and (placement.split > 1 or not even):
            continue
        if shape[d] % n == 0 and shape[d] >= n:
            return Placement("S", d)
    return R


def make_parameter(spec: ParameterSpec, source: torch.Tensor, place: Place) -> StageParameter:
    """This rank's part of the parameter `source`: its memory where all of it is held as it is, else
    a copy."""
    holders = place.holders(experts=spec.experts)
    local = _local(source.detach(), spec.placement, place, holders).contiguous()
    shard = _shard_of(spec, source, local, place)
    gathered = spec.sharing.gathers and shard.sharded
    # `fully_shard` moves its shards to the device block by block: until then the host holds all
    where = torch.device("cpu") if gathered else place.device
    if local.is_meta:
        local = torch.empty_like(local, device=where)
    else:
        local = local.to(where, copy=local.shape != source.shape)
    trained = source.requires_grad and source.is_floating_point()
    stored = local.to(spec.kept) if trained else local
    if shard.sharded and not gathered:
        stored = local_part(stored, shard, holders.shard.size, holders.shard.rank)
        stored = _moved(stored, spec) if spec.hosted else stored.clone()
    elif spec.hosted and not gathered:
        stored = _moved(stored, spec)
    shares = shard == R and stored.dtype == spec.dtype and not spec.hosted
    leaf = stored if shares or gathered else local.to(spec.dtype, copy=spec.away)
    if spec.away:
        leaf.untyped_storage().resize_(0)
    plain = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return StageParameter(
        **plain | {"reached": spec.reached and source.requires_grad},
        shape=tuple(source.shape),
        trainable=source.requires_grad,
        leaf=nn.Parameter(leaf, requires_grad=source.requires_grad),
        stored=stored,
        shard_placement=shard,
        staged=len({mesh.ranks for mesh in place.meshes}) > 1,
    )


def _moved(x: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """A copy of a tensor where the optimizer steps it."""
    return in_file(x) if spec.home == "file" else to_host(x)


def _shard_of(
    spec: ParameterSpec, source: torch.Tensor, local: torch.Tensor, place: Place
) -> Placement:
    """ZeRO's shard of a parameter's local tensor."""
    n, trained = place.holders(experts=spec.experts).shard.size, source.requires_grad
    if n == 1 or not (spec.sharing.divides if trained else spec.sharing.gathers):
        return R
    if spec.sharing.gathers and not (spec.gatherable and (spec.sum_data or not trained)):
        return R  # `fully_shard` would sum a gradient that is whole on every rank
    placement = spec.placement
    even = not placement.sharded or source.shape[placement.dim] % place.tensor.size == 0
    return shard_placement(local.shape, placement, n, first=int(spec.experts), even=even)


def _local(x: torch.Tensor, placement: Placement, place: Place, holders: Holders) -> torch.Tensor:
    """This rank's expert and tensor shard of a whole tensor, not yet sharded by ZeRO."""
    if holders.part.size > 1:
        x = local_part(x, Placement("S", 0), holders.part.size, holders.part.rank)
    if placement.sharded:
        x = local_part(x, placement, place.tensor.size, place.tensor.rank)
    return x


def expose(parameter: StageParameter, place: Place, own: nn.Parameter | None = None) -> None:
    """Make the API's nn.Parameter over the stored tensor's memory: the user's `own` where the rank
    holds the whole model, else a DTensor."""
    if own is None or own.is_meta:
        partial_dtensors.read_whole_items()
        partial_dtensors.read_strided_parts()
        act_as_whole()
        local = parameter.stored if own is not None else wrap(parameter, parameter.stored, place)
        parameter.api = nn.Parameter(local, requires_grad=parameter.trainable)
        return
    if not share_memory(own, parameter.stored) or own.dtype != parameter.stored.dtype:
        own.grad = None
        own.data = parameter.stored
    parameter.stored = own.detach()  # shares its version
    parameter.api = own


def wrap(parameter: StageParameter, local: torch.Tensor, place: Place) -> torch.Tensor:
    """A local tensor of `stored`'s layout as a DTensor on the stage's mesh; itself on one
    device."""
    if place.mesh is None:
        return local
    placement, shard = parameter.placement, parameter.shard_placement
    on_shard: Any = Replicate()
    if shard.sharded:
        nested = placement.sharded and placement.dim == shard.dim
        on_shard = (
            _StridedShard(shard.dim, split_factor=place.tensor.size) if nested else Shard(shard.dim)
        )
    data = [
        on_shard if kind == "shard" else Shard(0) if kind == "part" else Replicate()
        for kind in place.here.data_dims(experts=parameter.experts)
    ]
    shape = torch.Size(parameter.shape)
    stride = torch.empty(shape, device="meta").stride()
    # `from_local` would move what lies in host memory to the mesh's device
    there = local.device.type == place.mesh.device_type
    dtensor = DTensor.from_local(
        local if there else torch.empty_like(local, device="meta"),
        place.mesh,
        [*data, as_torch(placement)],
        run_check=False,
        shape=shape,
        stride=stride,
    )
    make: Any = DTensor  # its constructor is untyped
    wrapped: torch.Tensor = dtensor if there else make(local, dtensor._spec, requires_grad=False)
    return wrapped


def as_torch(placement: Placement) -> Replicate | Shard | _StridedShard:
    """The DTensor placement on one mesh axis."""
    if not placement.sharded:
        return Replicate()
    if placement.split > 1:
        return _StridedShard(placement.dim, split_factor=placement.split)
    return Shard(placement.dim)


def wrap_like(parameter: StageParameter, local: torch.Tensor) -> torch.Tensor:
    """`wrap` with the spec of the API's DTensor: `from_local` would check it again every step."""
    api = parameter.api.data
    if not isinstance(api, DTensor):
        return local
    make: Any = DTensor  # its constructor is untyped
    wrapped: torch.Tensor = make(local, api._spec, requires_grad=False)
    return wrapped


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; a plain tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def part_of(parameter: StageParameter, full: torch.Tensor, place: Place) -> torch.Tensor:
    """This rank's part of a whole tensor that is laid out as the stored parameter."""
    holders = place.holders(experts=parameter.experts)
    local = _local(full.detach(), parameter.placement, place, holders)
    shard = parameter.shard_placement
    if shard.sharded:
        local = local_part(local, shard, holders.shard.size, holders.shard.rank)
    return local


def load(parameter: StageParameter, source: torch.Tensor, place: Place) -> None:
    """Copy this rank's part of the whole tensor `source` into the stored parameter."""
    with torch.no_grad():
        parameter.stored.copy_(part_of(parameter, source, place))


def refresh_frozen(parameters: Iterable[StageParameter]) -> None:
    """Copy stored frozen parameters to their leaves of another dtype, as no step gathers or casts
    them: after a load, and before each step, as nothing shows all writes to them."""
    with torch.no_grad():
        for p in parameters:
            if not (p.aliased or p.trainable):
                p.leaf.copy_(p.stored)


def write_weights(parameters: Iterable[StageParameter], graph: Graph) -> None:
    """Run what the forward writes to its own weights, before a step gathers and casts them: element
    by element, so that each shard is written by itself."""
    if not graph.weight_writes:
        return
    stored = {p.value: p.stored for p in parameters}
    with torch.no_grad():
        for op in graph.weight_writes:
            if op.operands[0] in stored:
                overload(op.target)(stored[op.operands[0]], *op.args[1:], **op.kwargs)


def shard_gradients(parameters: Iterable[StageParameter], place: Place) -> None:
    """Keep this rank's ZeRO shard of gradients that were all-reduced whole."""
    for p in parameters:
        if p.gradient is None or p.gradient.shape == p.stored.shape:  # on one rank, or already
            continue
        if p.shard_placement.sharded and not p.scattered:
            shard = place.holders(experts=p.experts).shard
            local = local_part(p.gradient, p.shard_placement, shard.size, shard.rank)
            p.gradient = local.contiguous()


def _to_host(parameters: Iterable[StageParameter], device: torch.device) -> None:
    """Copy gradients of what lies in host memory there, and wait for all of them."""
    moved = False
    for p in parameters:
        there = p.gradient is not None and p.gradient.device == device
        if p.hosted and there:  # `fully_shard` brings those of a GPU itself
            assert p.gradient is not None
            p.gradient = to_host(p.gradient)
            moved = True
    if moved:
        synchronize(device)


def accumulate_grads(parameters: Sequence[StageParameter], device: torch.device) -> None:
    """Add the step's gradients to `.grad` of the API's parameters, where these lie."""
    _to_host(parameters, device)
    for p in parameters:
        local, p.gradient = p.gradient, None
        if local is None:
            continue
        if p.api.grad is None:
            gradient: Any = wrap_like(p, local)
            if p.staged:
                gradient.__class__ = partial_dtensors.StageGradient
            p.api.grad = gradient
        else:
            local_of(p.api.grad).add_(local)
