"""Gradients of a step: taken off the leaves, summed over axes and stages, handed to the optimizer's
tensors.

Everything is summed once per step, in fp32, in buckets. Over the data axis a bucket is all-reduced,
or under ZeRO-1 reduce-scattered, so that each rank gets just the part its optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from costmodel.strategies import Placement
from costmodel.target import BUCKET_BYTES
from executor.meshes import Place
from executor.parameters import StageParameter, wrap
from executor.reshard import Axis, all_gather, local_part, reduce_scatter_flat, split_parts


def collect(parameters: Iterable[StageParameter]) -> None:
    """Take the step's local gradients off the leaves."""
    for p in parameters:
        if p.trainable and p.gradient is None:
            p.gradient = p.leaf.grad if p.leaf.grad is not None else torch.zeros_like(p.leaf)
            p.gradient = p.gradient.float()
        p.leaf.grad = None


def reduce_gradients(parameters: Sequence[StageParameter], place: Place) -> None:
    """Sum gradients over the axes on which they are partial."""
    trained = [p for p in reversed(parameters) if p.trainable]  # late layers are ready first
    _bucketed([p for p in trained if p.sum_tensor], place.tensor, _all_reduce)
    summed = [p for p in trained if p.sum_data]
    _bucketed([p for p in summed if not p.scattered], place.data, _all_reduce)
    _bucketed([p for p in summed if p.scattered], place.data, _reduce_scatter)


def _bucketed(
    parameters: Sequence[StageParameter],
    axis: Axis,
    start: Callable[[Sequence[StageParameter], Axis], Callable[[], None]],
) -> None:
    """One reduction per bucket, two in flight: the next is copied while the last one travels."""
    if axis.size == 1:
        return
    buckets: list[list[StageParameter]] = []
    filled = BUCKET_BYTES
    for p in parameters:
        nbytes = _gradient(p).numel() * 4
        if filled + nbytes > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(p)
        filled += nbytes
    finish: Callable[[], None] | None = None
    for bucket in buckets:
        following = start(bucket, axis)
        if finish is not None:
            finish()
        finish = following
    if finish is not None:
        finish()


def _gradient(p: StageParameter) -> torch.Tensor:
    assert p.gradient is not None
    return p.gradient


def _all_reduce(bucket: Sequence[StageParameter], axis: Axis) -> Callable[[], None]:
    flat = torch.cat([_gradient(p).reshape(-1) for p in bucket])
    work = dist.all_reduce(flat, group=axis.group, async_op=True)

    def finish() -> None:
        work.wait()
        sizes = [_gradient(p).numel() for p in bucket]
        for p, part in zip(bucket, flat.split(sizes), strict=True):
            p.gradient = part.view_as(_gradient(p))

    return finish


def _reduce_scatter(bucket: Sequence[StageParameter], axis: Axis) -> Callable[[], None]:
    shards = [split_parts(_gradient(p), p.zero, axis.size) for p in bucket]
    flat = torch.cat([s.reshape(axis.size, -1) for s in shards], dim=1)
    shapes = [s.shape[1:] for s in shards]
    del shards
    out, work = reduce_scatter_flat(flat, axis)

    def finish() -> None:
        work.wait()
        parts = out.split([shape.numel() for shape in shapes])
        for p, shape, part in zip(bucket, shapes, parts, strict=True):
            p.gradient = part.view(shape)

    return finish


def exchange_tied(
    parameters: Sequence[StageParameter],
    place: Place,
    layouts: Mapping[str, Mapping[int, Placement]],
) -> None:
    """Sum the gradients of parameters that several stages hold, in stage order, so that every copy
    gets the same bits. `layouts` gives per FQN the tensor-axis placement on each owning stage."""
    for p in sorted(parameters, key=lambda p: p.fqn):
        owners = p.shared_stages
        if len(owners) < 2 or not p.trainable:
            continue
        placements = layouts[p.fqn]
        alike = len({(placements[s], place.meshes[s].tp) for s in owners}) == 1
        mine = _gradient(p) if alike else _whole(_gradient(p), p.placement, place.tensor)
        parts = _swap(mine, owners, place)
        total = parts[owners[0]].clone()
        for stage in owners[1:]:
            total += parts[stage]
        if not alike and p.placement.sharded:
            total = local_part(
                total, p.placement, place.tensor.size, place.tensor.rank
            ).contiguous()
        p.gradient = total


def _whole(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    return all_gather(x, placement, axis) if placement.sharded and axis.size > 1 else x


def _swap(mine: torch.Tensor, owners: Sequence[int], place: Place) -> dict[int, torch.Tensor]:
    """Every owner's copy of a tensor: each rank gets it from the rank at its own coordinates."""
    here = place.meshes[place.stage]
    parts = {place.stage: mine.contiguous()}
    works = []
    for other in owners:
        if other == place.stage:
            continue
        there = place.meshes[other]
        parts[other] = torch.empty_like(parts[place.stage])
        d, t = here.coordinate(place.rank)
        source = there.rank(d % there.dp, t % there.tp)
        for target in there.ranks:
            td, tt = there.coordinate(target)
            if here.rank(td % here.dp, tt % here.tp) == place.rank:
                works.append(
                    dist.P2POp(dist.isend, parts[place.stage], target, group=place.forward_group)
                )
        works.append(dist.P2POp(dist.irecv, parts[other], source, group=place.forward_group))
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return parts


def deliver(parameters: Iterable[StageParameter], place: Place) -> None:
    """Add the step's gradients to `.grad` of the API parameters."""
    for p in parameters:
        if not p.trainable:
            continue
        local = _gradient(p)
        if p.zero.sharded and not p.scattered:
            local = local_part(local, p.zero, place.data.size, place.data.rank).contiguous()
        p.gradient = None
        if p.api.grad is None:
            p.api.grad = wrap(p, local, place)
        else:
            held = p.api.grad
            (held.to_local() if isinstance(held, DTensor) else held).add_(local)
