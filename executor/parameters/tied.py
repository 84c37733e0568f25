"""Tied parameters: the sum of their gradients over the pipeline stages that hold a copy.

Every rank exchanges its gradient with one rank of each other owner stage, point to point, and adds
the copies up in stage order, so that all copies of the parameter get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.sharding import Placement
from meshwright.costmodel.sharing import Sharing
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks import Place
from meshwright.executor.resharding import all_gather, local_part


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedLayout:
    """A stage's layout of a tied parameter: its placement on the tensor axis, and how the
    stage shares its states out."""

    placement: Placement
    sharing: Sharing


def sum_tied_gradients(
    parameters: Iterable[StageParameter],
    place: Place,
    layouts: Mapping[str, Mapping[int, TiedLayout]],
) -> None:
    """Sum the gradients of parameters that stages on several device groups hold. Collective among
    these.

    `layouts` gives per FQN the layout on each owner stage: equal ones exchange local gradients,
    others are gathered first.
    """
    for p in sorted(parameters, key=lambda p: p.fqn):
        # stages of one device group share one copy, known by the first that holds it
        owners = sorted({_first_holder(k, p, place) for k in p.shared_stages})
        if len(owners) < 2 or p.gradient is None:
            continue
        owner = next(k for k in owners if k in place.stages)
        alike = _alike(owners, layouts[p.fqn], place)
        copy = p.gradient if alike else _gathered(p, place)
        copies = _exchange(copy, owner, owners, place, place.tied_groups[p.shared_stages])
        total = copies[owners[0]].clone()
        for stage in owners[1:]:
            total += copies[stage]
        p.gradient = total if alike else _local(total, p, place)


def _alike(owners: Sequence[int], layouts: Mapping[int, TiedLayout], place: Place) -> bool:
    """Whether ranks at equal coordinates of all owners have the same part of the gradient."""
    parts = set()
    for k in owners:
        layout, mesh = layouts[k], place.meshes[k]
        sharing = layout.sharing
        parted = (sharing.scatters_whole, mesh.dp, mesh.shards) if sharing.divides else None
        parts.add((layout.placement, mesh.tp, parted))
    return len(parts) == 1 and not any(layouts[k].sharing.gathers for k in owners)


def _first_holder(stage: int, p: StageParameter, place: Place) -> int:
    """The first stage on the ranks of `stage` that holds a parameter."""
    ranks = place.meshes[stage].ranks
    return min(k for k in p.shared_stages if place.meshes[k].ranks == ranks)


def _gathered(p: StageParameter, place: Place) -> torch.Tensor:
    """The whole gradient, all-gathered over the shard and tensor axes."""
    x = p.gradient
    assert x is not None
    if p.scattered:
        x = all_gather(x, p.shard_placement, place.shard)
    if not p.placement.sharded:
        return x
    return all_gather(x, p.placement, place.tensor, p.shape[p.placement.dim])


def _local(x: torch.Tensor, p: StageParameter, place: Place) -> torch.Tensor:
    """This rank's shard of a whole gradient: the inverse of `_gathered`."""
    if p.placement.sharded:
        x = local_part(x, p.placement, place.tensor.size, place.tensor.rank)
    if p.scattered:
        x = local_part(x, p.shard_placement, place.shard.size, place.shard.rank)
    return x.contiguous()


def _exchange(
    x: torch.Tensor, stage: int, owners: Sequence[int], place: Place, group: Any
) -> dict[int, torch.Tensor]:
    """Every owner stage's copy of a tensor, of which this rank's `stage` has `x`: each is received
    from the rank at this rank's coordinate, modulo the other mesh's shape."""
    mesh = place.meshes[stage]
    copies = {stage: x.contiguous()}
    transfers = []
    for other in owners:
        if other == stage:
            continue
        other_mesh = place.meshes[other]
        copies[other] = torch.empty_like(copies[stage])
        d, t = mesh.coordinate(place.rank)
        source = other_mesh.rank(d % other_mesh.dp, t % other_mesh.tp)
        for target in other_mesh.ranks:
            td, tt = other_mesh.coordinate(target)
            if mesh.rank(td % mesh.dp, tt % mesh.tp) == place.rank:
                transfers.append(dist.P2POp(dist.isend, copies[stage], target, group=group))
        transfers.append(dist.P2POp(dist.irecv, copies[other], source, group=group))
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return copies
