"""The chunks of a tensor that a rank holds, and is saved and read by.

A chunk is a box of a tensor: an offset in the global tensor, sizes, and the data. A plain shard is
one chunk. A strided one is several: of a fused projection [q; k; v], split over the tensor axis,
each rank holds three runs of rows. Nothing is gathered or re-laid to be saved, and as offsets are
global, a reader of any other layout finds what it needs.

Along a dim of n elements, with placements applied from the outermost mesh axis inwards to the
indices I = (0, …, n-1), `Shard` of m ranks keeps the rank's one of m parts of I, and a strided
shard of split factor f parts rank, rank + m, … of the f·m parts of I. The chunks are the product,
over dims, of the runs of consecutive indices that are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise, product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from meshwright.executor.devices import to_host
from meshwright.executor.host_values import with_values

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the whole tensor, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor: its offset in the global and in the local tensor, and its sizes, per
    dim."""

    offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    sizes: tuple[int, ...]


def local_chunks(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[Chunk, ...]:
    """The chunks of a tensor of `shape` on the rank at `coordinate` of a mesh of `mesh_shape`."""
    axes = list(zip(placements, mesh_shape, coordinate, strict=True))
    runs = []
    for dim, size in enumerate(shape):
        split = tuple(
            (getattr(p, "split_factor", 1), ranks, rank)
            for p, ranks, rank in axes
            if isinstance(p, (Shard, _StridedShard)) and p.dim == dim
        )
        runs.append(_runs_of(size, split))
    return tuple(
        Chunk(
            offset=tuple(start for start, _, _ in chosen),
            local_offset=tuple(position for _, position, _ in chosen),
            sizes=tuple(length for _, _, length in chosen),
        )
        for chosen in product(*runs)
    )


@lru_cache(maxsize=4096)  # layers of a model have the same
def _runs_of(
    size: int, split: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    """(first index, its position, length) of every run of consecutive indices that a rank keeps of
    a dim; `split` is (split factor, ranks, rank) of each axis that divides it."""
    with with_values():
        indices = torch.arange(size)
        for factor, ranks, rank in split:
            parts = indices.chunk(ranks * factor)[rank::ranks]
            indices = torch.cat(parts) if parts else indices[:0]
        breaks = ((indices.diff() != 1).nonzero().flatten() + 1).tolist()
        ends = sorted({0, *breaks, len(indices)})
        return tuple((int(indices[a]), a, b - a) for a, b in pairwise(ends))


def narrowed(x: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of a box of a tensor, by its starts and sizes per dim."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """The box `ranges`, (start, stop) per dim, of the stored tensor `name`, to be read into `into`,
    whose dtype and device it takes."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    into: torch.Tensor

    @property
    def index(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(slice(*ends) for ends in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChunks:
    """This rank's chunks of one tensor of global `shape`, as views of its `local` part."""

    shape: torch.Size
    local: torch.Tensor
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(x: torch.Tensor) -> LocalChunks:
        """The chunks of a DTensor without partial placements, or of a plain tensor, which is whole.
        They share its memory."""
        x = x.detach()
        if not isinstance(x, DTensor):
            return LocalChunks(shape=x.shape, local=x, chunks=local_chunks(x.shape, (), (), ()))
        mesh = x.device_mesh
        chunks = local_chunks(x.shape, x.placements, mesh.shape, mesh.get_coordinate() or ())
        return LocalChunks(shape=x.shape, local=x.to_local(), chunks=chunks)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def copied(self) -> LocalChunks:
        """A copy in host memory. From a GPU it is only started."""
        return replace(self, local=to_host(self.local))

    def reads(self, stored: str) -> Iterator[ChunkRead]:
        """The reads that fill this rank's chunks from the stored tensor of that name."""
        for chunk in self.chunks:
            ranges = tuple((a, a + n) for a, n in zip(chunk.offset, chunk.sizes, strict=True))
            yield ChunkRead(name=stored, ranges=ranges, into=self._view(chunk))

    def values(self, k: int) -> torch.Tensor:
        """The values of the k-th chunk, of `dtype`."""
        return self._view(self.chunks[k])

    def _view(self, chunk: Chunk) -> torch.Tensor:
        return narrowed(self.local, chunk.local_offset, chunk.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The replica of a tensor that is written: number `chosen` of those along the mesh's `axes`;
    whether it is `mine`."""

    axes: tuple[int, ...]
    chosen: int
    mine: bool

    def ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """The ranks that hold it, each its part."""
        with with_values():
            grid = mesh.mesh
            chosen, where = self.chosen, [slice(None)] * grid.ndim
            for axis in reversed(self.axes):
                chosen, at = divmod(chosen, grid.shape[axis])
                where[axis] = slice(at, at + 1)
            return tuple(grid[tuple(where)].flatten().tolist())


class ReplicaWriters:
    """Chooses the one of a tensor's replicas on a mesh that is written: that of the rank with the
    fewest bytes to write so far. Every rank comes to the same choice, if all ask about the same
    tensors in the same order."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[int, ...], list[int]] = {}

    def choose(self, x: torch.Tensor, mesh: DeviceMesh | None) -> Replica:
        """The replica of `x` that is written; a plain tensor is the same on all of `mesh`."""
        if mesh is None:
            return Replica(axes=(), chosen=0, mine=True)
        placements = placements_on(x, mesh)
        axes = tuple(k for k, p in enumerate(placements) if isinstance(p, Replicate))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        me = 0
        for k in axes:
            me = me * mesh.shape[k] + coordinate[k]
        loads = self._bytes.setdefault(axes, [0] * math.prod(mesh.shape[k] for k in axes))
        chosen = loads.index(min(loads))
        loads[chosen] += x.numel() * x.element_size()
        return Replica(axes=axes, chosen=chosen, mine=chosen == me)


def placements_on(x: torch.Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """A DTensor's placements; a plain tensor is on all of a mesh alike."""
    return tuple(x.placements) if isinstance(x, DTensor) else (Replicate(),) * mesh.ndim


@cache
def untiled(size: int, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> str:
    """Elements of a dim of this size that the parts of all ranks, along the axes that split it,
    miss or have twice; empty where they tile it. `placements` shard dim 0."""
    runs: list[tuple[int, int]] = []
    for coordinate in product(*map(range, mesh_shape)):
        parts = local_chunks((size,), placements, mesh_shape, coordinate)
        runs += [(c.offset[0], c.offset[0] + c.sizes[0]) for c in parts if c.sizes[0]]
    end = 0
    for start, stop in sorted(runs):
        if start != end:
            what = "written by nobody" if start > end else "written twice"
            return f"elements {min(start, end)} to {max(start, end)} are {what}"
        end = stop
    return "" if end == size else f"elements {end} to {size} are written by nobody"
