"""Ranks of the plan's stages as device meshes, and this rank's place in them.

The data axis is ZeRO's two: rank r·s + i of it is the i-th of s neighbours that share out what ZeRO
divides (`shard`), and the r-th that holds its part (`replicate`).

Where experts are shared out over ep ranks, m neighbours on the data axis hold different ones: m =
ep, each tensor coordinate by itself; or, where tensor ranks have tokens of their own, m = ep / tp
(`folded`). Data ranks d and d + m hold the same experts, and ZeRO divides those among e of such
ranks. So the data axis is cut at all of s, m and m·e, and each cut is a dim of the API's mesh:
a parameter, of experts or not, is laid over some of its dims.
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
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Assignment
from meshwright.executor.lowering.experts import legs
from meshwright.executor.lowering.reshard import Axis
from meshwright.planner.plan.expert_parallel import check_experts_run, folds
from meshwright.planner.plan.plan import Plan

Edge = tuple[int, int]  # stages, in the order of the data
FORWARD, BACKWARD = "forward", "backward"  # ways along an edge


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMesh:
    """The ranks of one stage as a (dp, tp) grid, tp innermost; ZeRO divides among `shards`
    neighbours, and `experts` ranks share the experts out, `folded` over the tensor axis or not."""

    ranks: tuple[int, ...]
    dp: int
    tp: int
    shards: int
    experts: int = 1
    folded: bool = False

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

    def line(self, rank: int, low: int, high: int) -> tuple[tuple[int, ...], int]:
        """The ranks `low`, 2·`low`, ... apart on the data axis that a rank is among, of each
        `high`; and which of them it is."""
        d, t = self.coordinate(rank)
        at = d // low % (high // low)
        first = d - at * low
        return tuple(self.rank(e, t) for e in range(first, first + high, low)), at

    @property
    def divisions(self) -> int:
        """Neighbours on the data axis that hold different experts."""
        return self.experts // self.tp if self.folded else self.experts

    @property
    def expert_shards(self) -> int:
        """Among how many of the data ranks that hold the same experts ZeRO divides them."""
        holders = self.dp // self.divisions
        return holders if self.shards == self.dp else math.gcd(self.shards, holders)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Sizes of the mesh's data dims, multiplied up from the innermost; the last is dp."""
        m = self.divisions
        return tuple(sorted({self.shards, m, m * self.expert_shards, self.dp} - {1})) or (1,)

    def data_dims(self, *, experts: bool) -> list[str]:
        """What each data dim of the mesh, outermost first, does to a weight of `experts`, or to any
        other parameter: `part` divides the experts, ZeRO divides over `shard`, `replicate` does
        not divide."""
        m = self.divisions if experts else 1
        shards = m * self.expert_shards if experts else self.shards
        inside = [(kind, n) for kind, n in (("part", m), ("shard", shards)) if n > 1]
        return [
            next((kind for kind, n in inside if cut <= n), "replicate")
            for cut in reversed(self.cuts)
        ]


def stage_meshes(
    plan: Plan, graph: Graph, table: FactorTable, assignments: Sequence[Mapping[str, Assignment]]
) -> list[StageMesh]:
    """The meshes of a plan's stages. Raises `PlanError`, on all ranks alike, where experts can't be
    shared out so."""
    blocks = {block.name: block for block in graph.blocks}
    found = []
    for k, stage in enumerate(plan.stages):
        together = {
            name: assignment
            for other, chosen in zip(plan.stages, assignments, strict=True)
            if other.ranks == stage.ranks
            for name, assignment in chosen.items()
        }
        folded = folds(stage, graph, together)
        check_experts_run(stage, graph, folded=folded, place=f"plan: stage {k}")
        for block in (blocks[name] for name in stage.blocks if stage.ep > 1):
            legs(block.ops, graph, table, block.outputs)
        found.append(
            StageMesh(
                ranks=stage.ranks,
                dp=stage.dp,
                tp=stage.tp,
                shards=stage.shards,
                experts=stage.ep,
                folded=folded,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The data ranks that hold the same part of a parameter: its gradient is summed over `data`;
    ZeRO divides it over `shard`, and the ranks of `replicate` get the same of it.

    `part` are neighbours that hold other experts, of which dim 0 counts. On the data axis, ZeRO
    divides among ranks `part.size` apart.
    """

    data: Axis
    shard: Axis
    replicate: Axis
    part: Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank: its stages, axes and device.

    `experts` are the holders of its experts, and `exchange` the ranks that copies of tokens are
    exchanged with, where experts are shared out. `mesh` is that of the API's tensors, None where no
    process group exists (one device). `links` gives the group in which tensors travel along an edge
    of the stage graph, per way; `owners` the group of all ranks whose stages hold a tied parameter.
    """

    stages: tuple[int, ...]
    meshes: tuple[StageMesh, ...]
    data: Axis
    shard: Axis
    replicate: Axis
    tensor: Axis
    mesh: Any
    links: Mapping[tuple[Edge, str], Any]
    owners: Mapping[tuple[int, ...], Any]
    device: torch.device
    rank: int
    exchange: Axis | None = None
    experts: Holders | None = None

    def holders(self, *, experts: bool) -> Holders:
        """The ranks that hold the same part of a weight of `experts`, or of any other parameter."""
        if experts and self.experts is not None:
            return self.experts
        whole = Axis("part", 1, 0)
        return Holders(data=self.data, shard=self.shard, replicate=self.replicate, part=whole)

    @property
    def here(self) -> StageMesh:
        """The mesh that this rank's stages share."""
        return self.meshes[self.stages[0]]


def alone(device: torch.device, meshes: Sequence[StageMesh]) -> Place:
    """The place of a single process without a process group."""
    axes: dict[str, Any] = {
        name: Axis(name, 1, 0) for name in ("data", "shard", "replicate", "tensor")
    }
    return Place(
        stages=tuple(range(len(meshes))),
        meshes=tuple(meshes),
        **axes,
        mesh=None,
        links={},
        owners={},
        device=device,
        rank=0,
    )


# --- groups ---------------------------------------------------------------------------------------
#
# Only its members make a group, so that making all of them takes as long as making a rank's own.
# torch names such a group after its ranks and the number of groups the rank has made: every rank
# must always make as many as every other, in one order. So all are made by partitions of the world,
# and kept by what determines all of them: plans of one process share their groups.


def _group(ranks: Sequence[int]) -> Any:
    return dist.new_group(list(ranks), use_local_synchronization=True)


@cache
def _everyone(world: Any, purpose: Any) -> Any:
    """A group of all ranks, which costs nothing until two of them talk."""
    return _group(range(dist.get_world_size()))


@cache
def _among(world: Any, ranks: tuple[int, ...]) -> Any:
    """A group of some ranks; the others make one, too."""
    everyone = range(dist.get_world_size())
    inside = dist.get_rank() in ranks
    found = _group([r for r in everyone if (r in ranks) == inside])
    return found if inside else None


@cache
def _axes(
    world: Any, meshes: tuple[StageMesh, ...], device_type: str
) -> tuple[dict[str, Any], DeviceMesh]:
    """This rank's axes, and the mesh of the API's tensors."""
    rank = dist.get_rank()
    here = next(m for m in meshes if rank in m.ranks)
    d, t = here.coordinate(rank)
    found: dict[str, Any] = {
        "data": _axis("data", here.line(rank, 1, here.dp)),
        "shard": _axis("shard", here.line(rank, 1, here.shards)),
        "replicate": _axis("replicate", here.line(rank, here.shards, here.dp)),
        "tensor": _axis("tensor", (here.row(d), t)),
    }
    if any(mesh.experts > 1 for mesh in meshes):
        shared = _expert_axes(here, rank)  # always made, for the other stages' sake
        found |= shared if here.experts > 1 else {}
        most = max(len(mesh.cuts) for mesh in meshes)
        lines = [here.line(rank, low, high) for low, high in pairwise((1, *here.cuts))]
        dims = [_axis("dim", line) for line in [*lines, *[((rank,), 0)] * (most - len(lines))]]
        groups = [axis.group for axis in reversed(dims[: len(lines)])]
        names = [f"dp_{k}" for k in range(len(groups))]
    elif len(here.cuts) == 1:
        groups, names = [found["data"].group], ["dp"]
    else:
        groups = [found["replicate"].group, found["shard"].group]
        names = ["dp_replicate", "dp_shard"]
    sizes = [high // low for low, high in pairwise((1, *here.cuts))][::-1]
    mesh = DeviceMesh.from_group(
        [*groups, found["tensor"].group],
        device_type,
        mesh=torch.tensor(here.ranks).view(*sizes, here.tp),
        mesh_dim_names=(*names, "tp"),
    )
    return found, mesh


def _axis(name: str, line: tuple[tuple[int, ...], int]) -> Axis:
    ranks, at = line
    return Axis(name, len(ranks), at, _group(ranks))


def _expert_axes(here: StageMesh, rank: int) -> dict[str, Any]:
    m, e = here.divisions, here.expert_shards
    number = here.ranks.index(rank)
    first = number - number % here.experts
    block = here.ranks[first : first + here.experts], number % here.experts
    return {
        "exchange": _axis("exchange", block if here.folded else here.line(rank, 1, m)),
        "experts": Holders(
            part=_axis("part", here.line(rank, 1, m)),
            data=_axis("data", here.line(rank, m, here.dp)),
            shard=_axis("shard", here.line(rank, m, m * e)),
            replicate=_axis("replicate", here.line(rank, m * e, here.dp)),
        ),
    }


def join(
    meshes: Sequence[StageMesh],
    device: torch.device,
    edges: Sequence[Edge],
    owners: Sequence[tuple[int, ...]],
) -> Place:
    """Make this rank's groups and find its place.

    Activations and gradients travel in groups of their own, so that their orders never depend on
    each other; and as NCCL matches messages by order, not by tag, each edge has its own there.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    axes, mesh = _axes(world, tuple(meshes), device.type)
    by_order = device.type == "cuda"
    links = {
        (edge, way): _everyone(world, (way, edge) if by_order else way)
        for edge, way in product(edges, (FORWARD, BACKWARD))
    }
    shared = {
        stages: _among(world, tuple(sorted({r for k in stages for r in meshes[k].ranks})))
        for stages in owners
    }
    return Place(
        stages=tuple(k for k, m in enumerate(meshes) if rank in m.ranks),
        meshes=tuple(meshes),
        **axes,
        mesh=mesh,
        links=links,
        owners=shared,
        device=device,
        rank=rank,
    )
