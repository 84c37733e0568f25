"""Device meshes of the plan's stages, this rank's coordinates in them, and its process groups.

The data axis consists of ZeRO's two: data rank r·s + i is rank i of s on the `shard` axis and rank
r on the `replicate` axis.

Under expert parallelism over ep ranks, m neighbours on the data axis hold different experts: m =
ep, each tensor coordinate by itself; or, where tensor ranks have tokens of their own, m = ep / tp
(`folded`). Data ranks d and d + m hold the same experts, and ZeRO shards those over e of such
ranks. So the data axis is cut at all of s, m and m·e, and each cut is a dim of the API's mesh: a
parameter, of experts or not, is sharded over some of its dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import Assignment, FactorTable
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.executor.devices import has_streams
from meshwright.executor.host_values import with_values
from meshwright.executor.resharding import Axis
from meshwright.planner.plan import Plan, check_experts_run, folds

Edge = tuple[int, int]  # (source stage, target stage) of an activation
FORWARD, BACKWARD = "forward", "backward"  # directions along an edge


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMesh:
    """The ranks of one stage as a (dp, tp) grid, tp innermost: `dp` counts the ranks that hold the
    same parameters, `cp` neighbours of which share out the tokens of the same rows. ZeRO shards
    over `shards` neighbours, and sends and keeps what `sharing` says, in any of its stages;
    `experts` is the expert-parallel degree, `folded` over the tensor axis or not."""

    ranks: tuple[int, ...]
    dp: int
    tp: int
    shards: int
    sharing: Sharing = UNSHARED
    experts: int = 1
    folded: bool = False
    cp: int = 1

    @property
    def secondary(self) -> int:
        """Neighbours that keep ZeRO-3's weights for the backward; 1: none do."""
        return self.sharing.hpz or 1

    @property
    def outer(self) -> tuple[int, ...]:
        """The sizes of the axes of rows and, where there is one, of context."""
        return (self.dp,) if self.cp == 1 else (self.dp // self.cp, self.cp)

    def outer_coordinate(self, d: int) -> tuple[int, ...]:
        """The coordinates of a data rank on those axes."""
        return (d,) if self.cp == 1 else divmod(d, self.cp)

    def rank(self, d: int, t: int) -> int:
        """The rank at a (data, tensor) coordinate."""
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

    def line(self, rank: int, low: int, high: int) -> tuple[tuple[int, ...], int]:
        """The group of ranks with stride `low` within each run of `high` on the data axis that a
        rank belongs to, and its position there."""
        d, t = self.coordinate(rank)
        position = d // low % (high // low)
        first = d - position * low
        return tuple(self.rank(e, t) for e in range(first, first + high, low)), position

    @property
    def expert_parts(self) -> int:
        """The number m of neighbours on the data axis that hold different experts."""
        return self.experts // self.tp if self.folded else self.experts

    @property
    def expert_shards(self) -> int:
        """The number e of data ranks with the same experts over which ZeRO shards these."""
        holders = self.dp // self.expert_parts
        return holders if self.shards == self.dp else math.gcd(self.shards, holders)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Cumulative products of the mesh's data dims from the innermost; the last is dp."""
        m = self.expert_parts
        return tuple(sorted({self.shards, m, m * self.expert_shards, self.dp} - {1})) or (1,)

    def data_dims(self, *, experts: bool) -> list[str]:
        """Per data dim of the mesh, outermost first, how it holds a weight of `experts`, or any
        other parameter: "part" (expert parallel), "shard" (ZeRO) or "replicate"."""
        m = self.expert_parts if experts else 1
        shards = m * self.expert_shards if experts else self.shards
        inside = [(kind, n) for kind, n in (("part", m), ("shard", shards)) if n > 1]
        return [
            next((kind for kind, n in inside if cut <= n), "replicate")
            for cut in reversed(self.cuts)
        ]


def stage_meshes(
    plan: Plan, graph: Graph, table: FactorTable, assignments: Sequence[Mapping[str, Assignment]]
) -> list[StageMesh]:
    """The meshes of a plan's stages. Raises PlanError, on all ranks alike, for expert parallelism
    that can't run."""
    meshes = []
    for k, stage in enumerate(plan.stages):
        on_same_ranks = {
            name: assignment
            for other, chosen in zip(plan.stages, assignments, strict=True)
            if other.ranks == stage.ranks
            for name, assignment in chosen.items()
        }
        folded = folds(stage, graph, on_same_ranks)
        check_experts_run(stage, graph, table, folded=folded, place=f"plan: stage {k}")
        meshes.append(
            StageMesh(
                ranks=stage.ranks,
                dp=stage.holders,
                tp=stage.tp,
                shards=stage.shards,
                sharing=stage.sharing.of_any_stage,  # plans share their groups
                experts=stage.ep,
                folded=folded,
                cp=stage.cp,
            )
        )
    return meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The axes of the data ranks that hold the same part of a parameter.

    Its gradient is summed over `data`, which ZeRO cuts into `shard` and `replicate`. `part` is the
    expert-parallel axis, along which dim 0 is split (size 1 for other parameters); the other axes
    have stride `part.size` on the stage's data axis.
    """

    data: Axis
    shard: Axis
    replicate: Axis
    part: Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank's stages, mesh axes, process groups and device.

    `data` are all ranks that hold the same parameters; of those, `rows` have other rows of the same
    tokens, and `context`, if the sequence is split, other tokens of the same rows.

    Under expert parallelism, `experts` are the holders of its experts, and `exchange` is the axis
    of the token all-to-all. `mesh` is the DeviceMesh of the API's tensors, None where no process
    group exists (one device). `edge_groups` gives the process group of the sends along an edge of
    the stage graph in a direction, `tied_groups` that of all ranks of the stages that hold a tied
    parameter. `secondary` is the axis of ZeRO-3's secondary shards, and `far` that of the ranks
    with the same part of them; None where no stage of the plan has them.
    """

    stages: tuple[int, ...]
    meshes: tuple[StageMesh, ...]
    data: Axis
    shard: Axis
    replicate: Axis
    tensor: Axis
    mesh: Any
    edge_groups: Mapping[tuple[Edge, str], Any]
    tied_groups: Mapping[tuple[int, ...], Any]
    device: torch.device
    rank: int
    rows: Axis
    context: Axis | None = None
    exchange: Axis | None = None
    experts: Holders | None = None
    secondary: Axis | None = None
    far: Axis | None = None

    @property
    def outer(self) -> tuple[Axis, ...]:
        """The axes of rows and, where there is one, of context."""
        return (self.rows,) if self.context is None else (self.rows, self.context)

    def holders(self, *, experts: bool) -> Holders:
        """The holders of a weight of `experts`, or of any other parameter."""
        if experts and self.experts is not None:
            return self.experts
        undivided = Axis("part", 1, 0)
        return Holders(data=self.data, shard=self.shard, replicate=self.replicate, part=undivided)

    @property
    def here(self) -> StageMesh:
        """The mesh of this rank's stages, which all lie on the same ranks."""
        return self.meshes[self.stages[0]]


def single_process(device: torch.device, meshes: Sequence[StageMesh]) -> Place:
    """The place of a process without a process group, which runs all stages."""
    axes: dict[str, Any] = {
        name: Axis(name, 1, 0) for name in ("data", "shard", "replicate", "tensor")
    }
    return Place(
        stages=tuple(range(len(meshes))),
        meshes=tuple(meshes),
        **axes,
        mesh=None,
        edge_groups={},
        tied_groups={},
        device=device,
        rank=0,
        rows=axes["data"],
    )


# --- process groups -------------------------------------------------------------------------------
#
# Only its members make a group, so that making all of them takes as long as making a rank's own.
# torch names such a group after its ranks and the number of groups the rank has made: every rank
# must always make as many as every other, in one order. So all are made by partitions of the world,
# and cached by what determines all of them: plans of one process share their groups.


def _group(name: str, ranks: Sequence[int]) -> Any:
    """A group whose description is `name`, of which each rank has one group at a time."""
    return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)


@cache
def _world_group(world: Any, purpose: Any) -> Any:
    """A group of all ranks for one purpose; it costs nothing until two of them communicate."""
    return _group(str(purpose), range(dist.get_world_size()))


@cache
def _subgroup(world: Any, ranks: tuple[int, ...]) -> Any:
    """A group of some ranks, None on the others, which make one of their own meanwhile."""
    inside = dist.get_rank() in ranks
    name = f"tied {ranks}" if inside else "others"
    group = _group(name, [r for r in range(dist.get_world_size()) if (r in ranks) == inside])
    return group if inside else None


def pair_groups(count: int, name: str) -> dict[tuple[int, int], Any]:
    """Gloo groups of two ranks, of each of the first `count` ranks and each rank behind it; those
    of this rank. A peer that dies breaks the groups that it is in, and no others. Collective."""
    me, pairs = dist.get_rank(), dict[tuple[int, int], Any]()
    for first in range(count):
        for other in range(first + 1, dist.get_world_size()):
            pair = (first, other)
            group = dist.new_group(
                list(pair) if me in pair else [me],  # as many groups on all ranks
                use_local_synchronization=True,
                backend="gloo",
                group_desc=f"{name} {pair}" if me in pair else "others",
            )
            if me in pair:
                pairs[pair] = group
    return pairs


def one_way_groups(*names: str) -> tuple[Any, ...]:
    """Groups of all ranks for messages one way each, whose order depends on no other's: under NCCL,
    which matches messages by order."""
    return tuple(_world_group(dist.group.WORLD, name) for name in names)


@cache
def _axes(
    world: Any, meshes: tuple[StageMesh, ...], device_type: str
) -> tuple[dict[str, Any], DeviceMesh]:
    """This rank's axes, and the mesh of the API's tensors."""
    rank = dist.get_rank()
    here = next(m for m in meshes if rank in m.ranks)
    d, t = here.coordinate(rank)
    axes: dict[str, Any] = {
        "data": _axis("data", here.line(rank, 1, here.dp)),
        "shard": _axis("shard", here.line(rank, 1, here.shards)),
        "replicate": _axis("replicate", here.line(rank, here.shards, here.dp)),
        "tensor": _axis("tensor", (here.row(d), t)),
    }
    if any(mesh.secondary > 1 for mesh in meshes):
        axes["secondary"] = _axis("secondary", here.line(rank, 1, here.secondary))
        axes["far"] = _axis("far", here.line(rank, here.secondary, here.shards))
    axes["rows"] = axes["data"]
    if any(mesh.cp > 1 for mesh in meshes):
        axes["rows"] = _axis("rows", here.line(rank, here.cp, here.dp))
        axes["context"] = _axis("context", here.line(rank, 1, here.cp))
    if any(mesh.experts > 1 for mesh in meshes):
        expert_axes = _expert_axes(here, rank)  # always made, for the other stages' sake
        axes |= expert_axes if here.experts > 1 else {}
        most = max(len(mesh.cuts) for mesh in meshes)
        lines = [here.line(rank, low, high) for low, high in pairwise((1, *here.cuts))]
        lines += [((rank,), 0)] * (most - len(lines))
        dims = [_axis(f"dim {k}", line) for k, line in enumerate(lines)]
        groups = [axis.group for axis in reversed(dims[: len(here.cuts)])]
        names = [f"dp_{k}" for k in range(len(groups))]
    elif len(here.cuts) == 1:
        groups, names = [axes["data"].group], ["dp"]
    else:
        groups = [axes["replicate"].group, axes["shard"].group]
        names = ["dp_replicate", "dp_shard"]
    sizes = [high // low for low, high in pairwise((1, *here.cuts))][::-1]
    groups.append(axes["tensor"].group)
    return axes, device_mesh(groups, device_type, here.ranks, (*sizes, here.tp), (*names, "tp"))


def device_mesh(
    groups: Sequence[Any],
    device_type: str,
    ranks: Sequence[int],
    sizes: Sequence[int],
    names: Sequence[str],
) -> DeviceMesh:
    """The mesh of ranks, outermost dim first, over groups that exist."""
    with with_values():
        return DeviceMesh.from_group(
            list(groups),
            device_type,
            mesh=torch.tensor(ranks).view(*sizes),
            mesh_dim_names=tuple(names),
        )


def _axis(name: str, line: tuple[tuple[int, ...], int]) -> Axis:
    ranks, position = line
    return Axis(name, len(ranks), position, _group(name, ranks))


def _expert_axes(here: StageMesh, rank: int) -> dict[str, Any]:
    """The token all-to-all's axis, and the holders of this rank's experts."""
    m, e = here.expert_parts, here.expert_shards
    number = here.ranks.index(rank)
    first = number - number % here.experts
    block = here.ranks[first : first + here.experts], number % here.experts
    return {
        "exchange": _axis("exchange", block if here.folded else here.line(rank, 1, m)),
        "experts": Holders(
            part=_axis("part", here.line(rank, 1, m)),
            data=_axis("experts' data", here.line(rank, m, here.dp)),
            shard=_axis("experts' shard", here.line(rank, m, m * e)),
            replicate=_axis("experts' replicate", here.line(rank, m * e, here.dp)),
        ),
    }


def join_groups(
    meshes: Sequence[StageMesh],
    device: torch.device,
    edges: Sequence[Edge],
    tied: Sequence[tuple[int, ...]],
) -> Place:
    """Make this rank's process groups. Collective.

    `tied` are the stages of each tied parameter. Activations and gradients are sent in groups of
    their own, so that their orders never depend on each other; and as NCCL matches messages by
    order, not by tag, each edge has its own there.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    axes, mesh = _axes(world, tuple(meshes), device.type)
    by_order = has_streams(device)
    edge_groups = {
        (edge, direction): _world_group(world, (direction, edge) if by_order else direction)
        for edge, direction in product(edges, (FORWARD, BACKWARD))
    }
    tied_groups = {
        stages: _subgroup(world, tuple(sorted({r for k in stages for r in meshes[k].ranks})))
        for stages in tied
    }
    return Place(
        stages=tuple(k for k, m in enumerate(meshes) if rank in m.ranks),
        meshes=tuple(meshes),
        **axes,
        mesh=mesh,
        edge_groups=edge_groups,
        tied_groups=tied_groups,
        device=device,
        rank=rank,
    )
