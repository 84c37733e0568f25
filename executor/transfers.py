"""The channels of one rank's stages: per edge of the stage graph and value, both directions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Action
from meshwright.costmodel.sharding import DataLayout, Placement, R
from meshwright.executor.lowering import boundary_placement
from meshwright.executor.ranks import BACKWARD, FORWARD, Edge, Place, StageMesh
from meshwright.executor.resharding import part_of

# --- transfers ------------------------------------------------------------------------------------

# Point-to-point transfers between stages: each rank sends exactly the slices the other needs.
#
# A tensor lies on a stage's mesh replicated, or split by rows and by tokens (of which all stages
# have as many parts, in the same order: it does not matter in which). The slices are the
# intersections of the boxes that source and destination ranks hold; where several source ranks
# hold the same box, the destinations take them in turn (between equal meshes: each its
# counterpart).


Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """`box` (global index ranges per dim) travels from rank `source` to rank `target`."""

    source: int
    target: int
    box: Box


def held(shape: Sequence[int], placements: Sequence[Placement], mesh: StageMesh, d: int) -> Box:
    """The box of a mesh's data rank d; `placements` are by its outer axes."""
    box = [(0, size) for size in shape]
    for placement, n, k in zip(placements, mesh.outer, mesh.outer_coordinate(d), strict=True):
        if placement.sharded:
            first, end = box[placement.dim]
            size = (end - first) // n
            box[placement.dim] = (first + k * size, first + (k + 1) * size)
    return tuple(box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; None if it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


@lru_cache(maxsize=256)  # the values of an edge, and all edges of equal meshes, have the same
def slices(
    shape: tuple[int, ...],
    source: StageMesh,
    source_placements: tuple[Placement, ...],
    target: StageMesh,
    target_placements: tuple[Placement, ...],
    split: Placement = R,
) -> tuple[Slice, ...]:
    """Every slice that moves a tensor of global `shape` from one stage's layout to another's. Where
    it is `split` over the tensor axis, of one size on both, each rank sends of its own part alone,
    in which boxes are."""
    moved: list[Slice] = []
    taken: Counter[tuple[int, Box]] = Counter()
    of_all = range(source.tp)
    holders = [
        _holders(on_tensor_rank(shape, split, target.tp, t), source, source_placements, ranks)
        for t, ranks in enumerate([[t] if split.sharded else of_all for t in range(target.tp)])
    ]
    for d in range(target.dp):
        for t in range(target.tp):
            part = on_tensor_rank(shape, split, target.tp, t)
            wanted = held(part, target_placements, target, d)
            for box, replicas in holders[t].items():
                common = intersect(box, wanted)
                if common is not None:
                    key = (t if split.sharded else 0, box)
                    origin = replicas[taken[key] % len(replicas)]
                    taken[key] += 1
                    moved.append(Slice(source=origin, target=target.rank(d, t), box=common))
    return tuple(moved)


def on_tensor_rank(shape: Sequence[int], split: Placement, tp: int, t: int) -> tuple[int, ...]:
    """The shape of a tensor on rank t of the tensor axis."""
    sizes = [*shape]
    if split.sharded:
        sizes[split.dim] = part_of(sizes[split.dim], tp, t)[1]
    return tuple(sizes)


def _holders(
    shape: Sequence[int],
    mesh: StageMesh,
    placements: Sequence[Placement],
    tensor_ranks: Sequence[int],
) -> dict[Box, list[int]]:
    """The distinct boxes of a tensor on a mesh, and the ranks that hold each, of these of the
    tensor axis."""
    holders: dict[Box, list[int]] = {}
    for d in range(mesh.dp):
        ranks = [mesh.rank(d, t) for t in tensor_ranks]
        holders.setdefault(held(shape, placements, mesh, d), []).extend(ranks)
    return holders


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Index of a box relative to the tensor that holds `outer`."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True))


class Channel:
    """One tensor's sends and receives from one stage to another, as seen from this rank, which
    holds the box `mine`."""

    def __init__(
        self,
        moved: Sequence[Slice],
        rank: int,
        mine: Box,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        tag: int,
    ) -> None:
        self.outgoing = [s for s in moved if s.source == rank]
        self.incoming = [s for s in moved if s.target == rank]
        self.mine = mine
        self.dtype = dtype
        self.device = device
        self.group = group
        self.tag = tag

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sends per micro-batch."""
        return sum(_numel(s.box) for s in self.outgoing) * self.dtype.itemsize

    def send(self, x: torch.Tensor) -> list[tuple[dist.Work, torch.Tensor]]:
        """Start sending; the tensors must live until the work is done."""
        started = []
        for piece in self.outgoing:
            part = x.detach()[within(piece.box, self.mine)].contiguous()
            work = _begun(dist.isend(part, piece.target, group=self.group, tag=self.tag))
            started.append((work, part))
        return started

    def post(self) -> list[tuple[dist.Work, torch.Tensor, Slice]]:
        """Post the receives of one micro-batch."""
        posted = []
        for piece in self.incoming:
            part = torch.empty([b - a for a, b in piece.box], dtype=self.dtype, device=self.device)
            work = _begun(dist.irecv(part, piece.source, group=self.group, tag=self.tag))
            posted.append((work, part, piece))
        return posted

    def finish(self, posted: list[tuple[dist.Work, torch.Tensor, Slice]]) -> torch.Tensor:
        """Wait for posted receives and put the tensor together."""
        for work, _, _ in posted:
            work.wait()
        if len(posted) == 1 and posted[0][2].box == self.mine:
            return posted[0][1]
        assembled = torch.empty([b - a for a, b in self.mine], dtype=self.dtype, device=self.device)
        for _, part, piece in posted:
            assembled[within(piece.box, self.mine)] = part
        return assembled


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank outside the group takes part in no transfer"
    return work


def _numel(box: Box) -> int:
    total = 1
    for start, stop in box:
        total *= stop - start
    return total


# --- channels -------------------------------------------------------------------------------------


Channels = Mapping[tuple[Action, int], Mapping[str, Channel]]  # (instruction, peer stage) -> value


def stage_channels(
    k: int,
    edges: Mapping[Edge, Sequence[str]],
    graph: Graph,
    place: Place,
    outer_of: Callable[[int], Sequence[DataLayout]],
    split: Mapping[str, Placement],
    shape_of: Callable[[str], tuple[int, ...]],
) -> Channels:
    """The channels of stage k to stages of other ranks; `edges` gives the values that travel,
    `outer_of` the layouts of a stage on its outer axes, `split` the states on the tensor axis of
    values that are sent in parts, `shape_of` how large each is. Every value of every edge has its
    own tag."""
    channels: dict[tuple[Action, int], dict[str, Channel]] = {}
    crossings = [(edge, name) for edge, names in edges.items() for name in names]
    for tag, (edge, name) in enumerate(crossings, start=1):
        source, target = (place.meshes[j] for j in edge)
        if k not in edge or source.ranks == target.ranks:
            continue
        meta, shape = graph.values[name], shape_of(name)
        ends = [
            (mesh, tuple(boundary_placement(graph, layout, name) for layout in outer_of(j)))
            for j, mesh in zip(edge, (source, target), strict=True)
        ]
        mesh, placements = ends[edge.index(k)]
        d, t = mesh.coordinate(place.rank)
        state = split.get(name, R)
        mine = held(on_tensor_rank(shape, state, mesh.tp, t), placements, mesh, d)
        sends = k == edge[0]
        peer = edge[1] if sends else edge[0]
        forward = Action.SEND_ACTIVATION if sends else Action.RECV_ACTIVATION
        backward = Action.RECV_GRADIENT if sends else Action.SEND_GRADIENT
        directions = [(forward, FORWARD, ends)]
        channels.setdefault((backward, peer), {})
        if meta.requires_grad:
            directions.append((backward, BACKWARD, ends[::-1]))
        for action, direction, (start, end) in directions:
            moved = slices(shape, *start, *end, state)
            group = place.edge_groups[edge, direction]
            channel = Channel(moved, place.rank, mine, meta.dtype, place.device, group, tag)
            channels.setdefault((action, peer), {})[name] = channel
    return channels


# --- release of sent values -----------------------------------------------------------------------

# Release of sent values: a stage's backward needs the graph behind an output, not its values.
#
# Autograd starts a backward at a tensor of the right shape, whatever its memory holds; so the
# memory of an output is given back once its messages have left, if nobody else has it: its
# operator may have saved it, another operator of the stage, or a stage on the same rank. The stage
# therefore hands out another tensor on the same memory, and whoever else has that memory is seen
# by a count.


ALONE = 2  # uses of a memory that one tensor has: the tensor's, and that of whoever asks


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data  # `detach()` would keep hold of x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def handed(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of x, with its gradient, that may be released once x is gone."""
    handed_on: torch.Tensor = _Handed.apply(x)  # type: ignore[no-untyped-call]
    return handed_on


def release(x: torch.Tensor) -> bool:
    """Give back the memory of a tensor made by `handed`, if no other tensor has it; whether that is
    so. The tensor keeps its shape and its place in autograd's graph."""
    storage = x.untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) > ALONE:
        return False
    storage.resize_(0)
    return True
