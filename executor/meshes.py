"""Ranks of the plan's stages as device meshes, and this rank's place in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    def coordinate(self, rank: int) -> tuple[int, int]:
        """(data, tensor) coordinate of a rank of this stage."""
        return divmod(self.ranks.index(rank), self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank: its stage, axes and device. `mesh` is None where no process group exists (one device)."""

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


def join(meshes: Sequence[StageMesh], device: torch.device) -> Place:
    """Create every stage's groups (all ranks take part, in the same order) and find this rank's place.

    Activations and gradients travel in groups of their own, so that their orders never depend on each other
    (NCCL matches messages by order, not by tag).
    """
    rank = dist.get_rank()
    made = [
        DeviceMesh(device.type, torch.tensor(m.ranks).view(m.dp, m.tp), mesh_dim_names=("dp", "tp"))
        for m in meshes
    ]
    forward_group, backward_group = dist.new_group(), dist.new_group()
    stage = next(k for k, m in enumerate(meshes) if rank in m.ranks)
    d, t = meshes[stage].coordinate(rank)
    mesh = made[stage]
    return Place(
        stage=stage,
        meshes=tuple(meshes),
        data=Axis("data", meshes[stage].dp, d, mesh.get_group("dp")),
        tensor=Axis("tensor", meshes[stage].tp, t, mesh.get_group("tp")),
        mesh=mesh,
        forward_group=forward_group,
        backward_group=backward_group,
        device=device,
        rank=rank,
    )
