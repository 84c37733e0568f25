"""Reading and writing of a checkpoint's tensors by torch.distributed.checkpoint (DCP).

Both are watchdog phases: waiting for the other ranks, but for the files that a rank itself reads or
writes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.executor.checkpoint.chunks import ChunkRead, LocalChunks, narrowed
from meshwright.executor.ranks import WAITING, phase


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The metadata of the tensors in a DCP folder, by name."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: x for name, x in entries.items() if isinstance(x, TensorStorageMetadata)}


def write_tensors(
    tensors: Mapping[str, Mapping[str, LocalChunks]], folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Write every rank's chunks, as `<key>.<name>`, to a folder. Collective."""
    with phase(WAITING, waits=True):
        save(
            _state(tensors),
            storage_writer=_Writer(folder),
            planner=SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


def planned_writes(tensors: Mapping[str, Mapping[str, LocalChunks]]) -> list[WriteItem]:
    """What `write_tensors` plans for this rank's chunks, before DCP compares the ranks' plans."""
    own = SavePlanner()
    own.set_up_planner(_state(tensors))
    items: list[WriteItem] = own.create_local_plan().items
    return items


def _state(tensors: Mapping[str, Mapping[str, LocalChunks]]) -> dict[str, Any]:
    return {key: dict(named) for key, named in tensors.items()}


def read_tensors(reads: Iterable[ChunkRead], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Read this rank's chunks from a folder, in place. Collective."""
    with phase(WAITING, waits=True):
        load(
            {},
            storage_reader=_Reader(folder),
            planner=LoadPlanner(reads),
            process_group=group,
            no_dist=group is None,
        )


def read_tensors_alone(reads: Iterable[ChunkRead], folder: Path) -> None:
    """As `read_tensors`, of one rank by itself."""
    load({}, checkpoint_id=folder, planner=LoadPlanner(reads), no_dist=True)


class _Writer(FileSystemWriter):
    """Writes files, in phases of this rank's own."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with phase("writing a checkpoint"):
            return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        with phase("finishing a checkpoint"):
            super().finish(*args, **kwargs)


class _Reader(FileSystemReader):
    """Reads files, in phases of this rank's own."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with phase("reading a checkpoint's metadata"):
            return super().read_metadata(*args, **kwargs)

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        with phase("reading a checkpoint"):
            return super().read_data(*args, **kwargs)


class SavePlanner(DefaultSavePlanner):
    """Write plans for `LocalChunks`: upstream looks chunks up in tensors only."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        local: LocalChunks = self.state_dict[index.fqn]
        return local.__get_tensor_shard__(index)


class LoadPlanner(planner.LoadPlanner):
    """Read plans for `ChunkRead`s, in place and without a state dict: DCP's own can't describe
    strided shards. A rank plans its reads alone."""

    def __init__(self, reads: Iterable[ChunkRead]) -> None:
        self._reads: dict[str, list[ChunkRead]] = {}
        for read in reads:
            self._reads.setdefault(read.name, []).append(read)

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
        for name, reads in self._reads.items():
            stored = self._stored[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [read.metadata for read in reads]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index.index  # of the read, among those of its name
        assert index is not None
        into = self._reads[read_item.dest_index.fqn][index].into
        return narrowed(into, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the tensor is a view of where it belongs."""
