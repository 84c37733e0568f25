"""Which boxes of a tensor a rank holds, and how torch.distributed.checkpoint (DCP) sees them.

DCP stores a tensor as boxes: an offset in the global tensor, sizes, and the data. A plain shard is
one box. A strided one is several: of a fused projection [q; k; v], split over the tensor axis, each
rank holds three runs of rows. DCP describes a DTensor by one box, which a strided shard is not; so
tensors are saved as `Parts`, which list every box and give views of the local tensor to write from,
and loaded as `Piece`s, each a box of what is stored and the memory it is read into. Nothing is
gathered or re-laid, and as boxes are global, a reader of any other layout finds what it needs.

Along a dim of n elements, with placements applied from the outermost mesh axis inwards to the
indices I = (0, …, n-1), `Shard` of m ranks keeps the rank's one of m chunks of I, and a strided
shard of split factor f chunks rank, rank + m, … of the f·m chunks of I. The boxes are the product,
over dims, of the runs of consecutive indices that are left.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a global tensor: where it begins there, where in the local tensor, and its sizes."""

    offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[Box, ...]:
    """What the rank at `coordinate` of a mesh holds of a tensor of `shape`."""
    axes = list(zip(placements, mesh_shape, coordinate, strict=True))
    runs = []
    for dim, size in enumerate(shape):
        indices = torch.arange(size)
        for placement, ranks, rank in axes:
            if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
                chunks = indices.chunk(ranks * getattr(placement, "split_factor", 1))[rank::ranks]
                indices = torch.cat(chunks) if chunks else indices[:0]
        runs.append(_runs(indices))
    return tuple(
        Box(
            offset=tuple(start for start, _, _ in chosen),
            local_offset=tuple(at for _, at, _ in chosen),
            sizes=tuple(length for _, _, length in chosen),
        )
        for chosen in product(*runs)
    )


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first index, its position, length) of every run of consecutive indices."""
    breaks = ((indices.diff() != 1).nonzero().flatten() + 1).tolist()
    ends = sorted({0, *breaks, len(indices)})
    return [(int(indices[a]), a, b - a) for a, b in pairwise(ends)]


def _narrowed(x: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of a box of a tensor."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The box `ranges` ((start, stop) per dim) of the stored tensor `name`, to be copied to `into`,
    whose dtype and device it takes."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    into: torch.Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(*ends) for ends in self.ranges)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size(start for start, _ in self.ranges),
            sizes=torch.Size(stop - start for start, stop in self.ranges),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """This rank's boxes of one tensor, by the methods that DCP calls on what it saves."""

    shape: torch.Size
    local: torch.Tensor
    boxes: tuple[Box, ...]

    @staticmethod
    def of(x: torch.Tensor) -> Parts:
        """The parts of a DTensor without partial placements, or of a plain tensor, which is whole;
        they share its memory."""
        x = x.detach()
        if not isinstance(x, DTensor):
            return Parts(shape=x.shape, local=x, boxes=boxes(x.shape, (), (), ()))
        mesh = x.device_mesh
        held = boxes(x.shape, x.placements, mesh.shape, mesh.get_coordinate() or ())
        return Parts(shape=x.shape, local=x.to_local(), boxes=held)

    def copied(self) -> Parts:
        """The same on the host, in memory of its own. From a GPU the copy is only started."""
        host = torch.empty_like(self.local, device="cpu", pin_memory=self.local.is_cuda)
        return replace(self, local=host.copy_(self.local, non_blocking=True))

    def pieces(self, stored: str) -> Iterator[Piece]:
        """What this rank needs of the stored tensor of that name, and where it goes."""
        for box in self.boxes:
            ranges = tuple((a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
            yield Piece(name=stored, ranges=ranges, into=self._view(box))

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._view(next(box for box in self.boxes if box.offset == tuple(index.offset)))

    def _view(self, box: Box) -> torch.Tensor:
        return _narrowed(self.local, box.local_offset, box.sizes)


class Writers:
    """Which of the ranks that hold the same part of a tensor writes it: the one that has the fewest
    bytes to write so far. Every rank of a mesh comes to the same answers, if all ask about the same
    tensors in the same order."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[int, ...], list[int]] = {}

    def is_mine(self, x: torch.Tensor, mesh: DeviceMesh | None) -> bool:
        """Whether this rank writes its part of `x`; a plain tensor is the same on all of `mesh`."""
        if mesh is None:
            return True
        placements = x.placements if isinstance(x, DTensor) else (Replicate(),) * mesh.ndim
        axes = tuple(k for k, p in enumerate(placements) if isinstance(p, Replicate))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        me = 0
        for k in axes:
            me = me * mesh.shape[k] + coordinate[k]
        loads = self._bytes.setdefault(axes, [0] * math.prod(mesh.shape[k] for k in axes))
        chosen = loads.index(min(loads))
        loads[chosen] += x.numel() * x.element_size()
        return chosen == me


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's plan of who writes what, for `Parts`: upstream looks boxes up in tensors only."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(dcp.LoadPlanner):
    """DCP's plan of what this rank reads: pieces, in place, and no state dict. DCP has no word for
    strided shards, and a rank's pieces need no other rank."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, pieces in self._pieces.items():
            stored = self._stored[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [piece.chunk for piece in pieces]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index.index  # the piece, among those of its name
        assert index is not None
        into = self._pieces[read_item.dest_index.fqn][index].into
        return _narrowed(into, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The view that was read into is the tensor itself."""
