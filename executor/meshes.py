"""Ranks of the plan's stages as device meshes, and this rank's place in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from executor.reshard import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMesh:
    """The ranks of one stage as a (dp, tp) grid, tp innermost."""

    ranks: tuple[int, ...]
    dp: int
    tp: int

    def rank(self, d: int, t: int) -> int:
        return self.ranks[d * self.tp + t]

    def row(self, d: int) -> tuple[int, ...]:
        """Ranks of one tensor-parallel group."""
        return self.ranks[d * self.tp : (d + 1) * self.tp]

    def column(self, t: int) -> tuple[int, ...]:
        """Ranks of one data-parallel group."""
        return self.ranks[t :: self.tp]

    def coordinate(self, rank: int) -> tuple[int, int]:
        """(data, tensor) coordinate of a rank of this stage."""
        return divmod(self.ranks.index(rank), self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank: its stage, axes and device. `mesh` is None where no process group exists (one
    device)."""

    stage: int
    meshes: tuple[StageMesh, ...]
    data: Axis
    tensor: Axis
    mesh: Any
    forward_group: Any
    backward_group: Any
    device: torch.device
    rank: int


def alone(device: torch.device, mesh: StageMesh) -> Place:
    """The place of a single process without a process group."""
    return Place(
        stage=0, meshes=(mesh,), data=Axis("data", 1, 0), tensor=Axis("tensor", 1, 0), mesh=None,
        forward_group=None, backward_group=None, device=device, rank=0,
    )  # fmt: skip


@cache
def _group(world: Any, ranks: tuple[int, ...], purpose: str) -> Any:
    """A process group of `ranks`, made once per world: plans of one process share their groups.

    Every rank of the world takes part in making it, whether it is a member or not.
    """
    return dist.new_group(list(ranks))


def join(meshes: Sequence[StageMesh], device: torch.device) -> Place:
    """Make every stage's groups (all ranks take part, in the same order) and find this rank's
    place.

    Activations and gradients travel in groups of their own, so that their orders never depend on
    each other (NCCL matches messages by order, not by tag).
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    for m in meshes:
        for t in range(m.tp):
            _group(world, m.column(t), "dp")
        for d in range(m.dp):
            _group(world, m.row(d), "tp")
    everyone = tuple(range(dist.get_world_size()))
    forward, backward = (_group(world, everyone, way) for way in ("forward", "backward"))
    stage = next(k for k, m in enumerate(meshes) if rank in m.ranks)
    here = meshes[stage]
    d, t = here.coordinate(rank)
    groups = [_group(world, here.column(t), "dp"), _group(world, here.row(d), "tp")]
    mesh = DeviceMesh.from_group(
        groups,
        device.type,
        mesh=torch.tensor(here.ranks).view(here.dp, here.tp),
        mesh_dim_names=("dp", "tp"),
    )
    return Place(
        stage=stage,
        meshes=tuple(meshes),
        data=Axis("data", here.dp, d, groups[0]),
        tensor=Axis("tensor", here.tp, t, groups[1]),
        mesh=mesh,
        forward_group=forward,
        backward_group=backward,
        device=device,
        rank=rank,
    )
