"""Writing of a checkpoint's tensors by torch.distributed.checkpoint (DCP), with checksums.

The checksum of a chunk is an attribute beside its place in `.metadata`, which other readers of DCP
pass over. A save is a watchdog phase: waiting for the other ranks, but for the files that a rank
itself writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.executor.files.checksums import ChecksumStream, Moved
from meshwright.executor.files.chunks import LocalChunks
from meshwright.executor.files.moved_bytes import MovedBytes
from meshwright.executor.ranks import WAITING, phase


def write_tensors(
    tensors: Mapping[str, Mapping[str, LocalChunks]], folder: Path, group: dist.ProcessGroup | None
) -> dict[str, int]:
    """Write every rank's chunks, as `<key>.<name>`, to a folder; returns, on rank 0, the bytes of
    each file written. Collective."""
    writer = _Writer(folder)
    with phase(WAITING, waits=True):
        save(
            _state(tensors),
            storage_writer=writer,
            planner=ChunkPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    return writer.bytes_of


def planned_writes(tensors: Mapping[str, Mapping[str, LocalChunks]]) -> list[WriteItem]:
    """What `write_tensors` plans for this rank's chunks, before DCP compares the ranks' plans."""
    own = ChunkPlanner()
    own.set_up_planner(_state(tensors))
    items: list[WriteItem] = own.create_local_plan().items
    return items


def _state(tensors: Mapping[str, Mapping[str, LocalChunks]]) -> dict[str, Any]:
    return {key: dict(named) for key, named in tensors.items()}


class _Checksums(_StorageWriterTransforms):
    """Sums up each item as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[MetadataIndex, ChecksumStream] = {}
        self.moved: Moved = MovedBytes("writing a checkpoint", 0)

    def transform_save_stream(self, item: WriteItem, file: Any) -> tuple[Any, list[str]]:
        self.of[item.index] = ChecksumStream(file, self.moved)
        return self.of[item.index], []


class _Writer(FileSystemWriter):
    """Writes files, in phases of this rank's own, and none where it has nothing to write."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.transforms = self._checksums = _Checksums()
        self.bytes_of: dict[str, int] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not plan.items:
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        self._checksums.moved = MovedBytes("writing a checkpoint", _total(plan))
        with phase("writing a checkpoint"):
            written: Future[list[WriteResult]] = super().write_data(plan, planner)
            for result in written.value():
                result.storage_data.xxh3_64 = self._checksums.of[result.index].checksum()
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with phase("finishing a checkpoint"):
            super().finish(metadata, results)
            for place in (result.storage_data for of_rank in results for result in of_rank):
                end = place.offset + place.length
                before = self.bytes_of.get(place.relative_path, 0)
                self.bytes_of[place.relative_path] = max(before, end)


def _total(plan: SavePlan) -> int:
    """The bytes of a plan's tensors."""
    written = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(x.chunk.sizes.numel() * x.properties.dtype.itemsize for x in written)


class ChunkPlanner(DefaultSavePlanner):
    """Write plans for `LocalChunks`: upstream looks chunks up in tensors only."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        local: LocalChunks = self.state_dict[index.fqn]
        return local.__get_tensor_shard__(index)
