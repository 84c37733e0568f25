"""Tensors of a checkpoint folder: each rank's chunks written to a file of its own, boxes read back.

A chunk is read once and its checksum made on the way, block by block while they are in the core's
cache: in place where it is what a rank holds, else to a buffer that boxes are copied from. Threads
read chunks side by side: one sums up while another waits for the storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from meshwright.executor.errors import DamagedError, UnwrittenError
from meshwright.executor.files.checksums import Moved, MovedBytes, checksum_of, read_blocks
from meshwright.executor.files.chunks import Box, ChunkRead, LocalChunks, narrowed
from meshwright.executor.files.manifest import SavedFile, StoredChunk, StoredTensor
from meshwright.executor.files.safetensors_file import (
    NAMES_OF_DTYPES,
    Kind,
    SafetensorsFile,
    in_file_order,
)
from meshwright.executor.ranks import gather_object, phase, run_on_all

READERS = 2  # threads
Buffers = SimpleQueue[torch.Tensor]
FILE_OF_RANK = "tensors-{:05}.safetensors"


# --- writing --------------------------------------------------------------------------------------


def write_tensors(
    tensors: Mapping[str, LocalChunks], folder: Path, group: dist.ProcessGroup | None
) -> tuple[dict[str, StoredTensor], dict[str, SavedFile]]:
    """Write every rank's chunks to a folder; on rank 0 the tensors of all ranks, by name, and their
    files. Collective."""
    rank = 0 if group is None else dist.get_rank(group)
    path = folder / FILE_OF_RANK.format(rank)

    def write() -> tuple[dict[str, StoredTensor], int]:
        try:
            return _written(tensors, path)
        except OSError as error:
            raise UnwrittenError(f": {error}", place=f"rank {rank}") from error

    written = run_on_all(group, write)
    stored: dict[str, StoredTensor] = {}
    files: dict[str, SavedFile] = {}
    chunks: dict[str, dict[Box, StoredChunk]] = {}
    for of_rank, size in gather_object(group, written):
        for name, x in of_rank.items():
            stored.setdefault(name, x)
            by_box = chunks.setdefault(name, {})
            for chunk in x.chunks:
                by_box.setdefault(chunk.box, chunk)  # several stages may write a buffer
                files[chunk.file.name] = SavedFile(bytes=size)
    for name, by_box in chunks.items():
        x = stored[name] = replace(stored[name], chunks=tuple(by_box.values()))
        try:
            x.check()
        except ValueError as error:
            raise ValueError(f"{name!r} {error}") from error
    return stored, files


def _written(tensors: Mapping[str, LocalChunks], path: Path) -> tuple[dict[str, StoredTensor], int]:
    """Write a rank's file; what it holds, and its size."""
    chunks = {
        f"{name}{_suffix(x, k)}": (name, k)
        for name, x in tensors.items()
        for k in range(len(x.chunks))
    }
    stored = {
        name: StoredTensor(shape=tuple(x.shape), dtype=x.dtype, chunks=())
        for name, x in tensors.items()
    }
    if not chunks:
        return stored, 0
    kinds = {key: _kind(tensors[name], k) for key, (name, k) in chunks.items()}
    total = sum(x.local.nbytes for x in tensors.values())
    with phase("writing a checkpoint"):
        file = SafetensorsFile(path, kinds, MovedBytes("writing a checkpoint", total))
        try:
            for key in in_file_order(kinds):
                name, k = chunks[key]
                x = tensors[name]
                start, checksum = file.write_summed(x.values(k))
                box = x.chunks[k].offset, x.chunks[k].sizes
                chunk = StoredChunk(box=box, file=path, start=start, xxh3_64=checksum)
                stored[name] = replace(stored[name], chunks=(*stored[name].chunks, chunk))
            file.finish()
        finally:
            file.close()
    return stored, file.bytes


def _suffix(x: LocalChunks, k: int) -> str:
    """Box of a chunk, in its name in the file; empty for a tensor that is stored as one."""
    chunk = x.chunks[k]
    if chunk.sizes == tuple(x.shape):
        return ""
    ends = zip(chunk.offset, chunk.sizes, strict=True)
    return f"[{','.join(f'{start}:{start + size}' for start, size in ends)}]"


def _kind(x: LocalChunks, k: int) -> Kind:
    """Dtype and shape of a chunk in its file; bytes where safetensors has no name for the dtype."""
    sizes = x.chunks[k].sizes
    if x.dtype in NAMES_OF_DTYPES:
        return x.dtype, sizes
    return torch.uint8, (torch.Size(sizes).numel() * x.dtype.itemsize,)


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A stored chunk of the tensor `name`, and the boxes of it that are read."""

    name: str
    tensor: StoredTensor
    chunk: StoredChunk
    copies: list[tuple[ChunkRead, Box]]

    @property
    def length(self) -> int:
        return self.tensor.length(self.chunk)


def read_tensors(reads: Iterable[ChunkRead], stored: Mapping[str, StoredTensor]) -> None:
    """Read boxes of the stored tensors in place. Raises RuntimeError, which names file and tensor,
    for a chunk that is damaged; what was read before stays."""
    files: dict[Path, dict[tuple[int, str], _Part]] = {}
    for read in reads:
        x = stored[read.name]
        wanted = tuple(a for a, _ in read.ranges), tuple(b - a for a, b in read.ranges)
        for chunk in x.chunks:
            if (box := overlap(chunk.box, wanted)) is not None:
                part = _Part(name=read.name, tensor=x, chunk=chunk, copies=[])
                parts = files.setdefault(chunk.file, {})
                parts.setdefault((chunk.start, read.name), part).copies.append((read, box))
    by_place = {path: [parts[at] for at in sorted(parts)] for path, parts in sorted(files.items())}
    for path, in_file in by_place.items():
        _check_length(path, in_file)
    total = sum(part.length for in_file in by_place.values() for part in in_file)
    moved = MovedBytes("reading a checkpoint", total)
    largest = max((part.length for in_file in by_place.values() for part in in_file), default=0)
    buffers: Buffers = SimpleQueue()
    for _ in range(READERS):  # they take pages where they are written
        buffers.put(torch.empty(largest, dtype=torch.uint8))
    with phase("reading a checkpoint"):
        for path, in_file in by_place.items():
            _read_file(path, in_file, buffers, moved)


def read_whole(name: str, stored: Mapping[str, StoredTensor]) -> torch.Tensor:
    """A stored tensor, on the host. Raises as `read_tensors` does."""
    x = torch.empty(stored[name].shape, dtype=stored[name].dtype)
    read_tensors(LocalChunks.of(x).reads(name), stored)
    return x


def _check_length(path: Path, parts: Sequence[_Part]) -> None:
    """Raise `DamagedError` where a file ends before one of its parts."""
    size = path.stat().st_size if path.is_file() else 0
    for part in parts:
        end = part.chunk.start + part.length
        if end > size:
            raise DamagedError(
                f" is not there: the file has {size} bytes, and {end} were saved",
                place=f"{part.name!r} in {str(path)!r}",
            )


def _read_file(path: Path, parts: Sequence[_Part], buffers: Buffers, moved: Moved) -> None:
    """Read parts of a file; raises the error of the first that is damaged."""
    threads = ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint")
    with path.open("rb") as file:
        try:
            tasks = [threads.submit(_read, file.fileno(), part, buffers, moved) for part in parts]
            for part, task in zip(parts, tasks, strict=True):
                with _damage_at(f"{part.name!r} in {str(path)!r}"):
                    task.result()
        finally:
            threads.shutdown(cancel_futures=True)


@contextmanager
def _damage_at(place: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DamagedError(f" {error}", place=place) from error


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes share; None without an element."""
    starts = tuple(map(max, one[0], other[0]))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(n <= 0 for n in sizes) else (starts, sizes)


def _read(handle: int, part: _Part, buffers: Buffers, moved: Moved) -> None:
    """Read a part's boxes. Raises ValueError where it is not what was saved."""
    target = _target(part)
    if target is not None:
        _fill(target, handle, part.chunk, moved)
        return
    buffer = buffers.get()
    try:
        data = buffer[: part.length]
        _fill(data, handle, part.chunk, moved)
        offset, shape = part.chunk.box
        values = data.view(part.tensor.dtype).view(shape)
        with torch.no_grad():  # a thread has its own
            for read, (starts, sizes) in part.copies:
                into = [start - a for start, (a, _) in zip(starts, read.ranges, strict=True)]
                of = [start - a for start, a in zip(starts, offset, strict=True)]
                narrowed(read.into, into, sizes).copy_(narrowed(values, of, sizes))
    finally:
        buffers.put(buffer)


def _fill(data: torch.Tensor, handle: int, chunk: StoredChunk, moved: Moved) -> None:
    array: Any = data.numpy()
    blocks = read_blocks(handle, chunk.start, memoryview(array), moved)
    if checksum_of(blocks) != chunk.xxh3_64:
        raise DamagedError("is damaged: its checksum is not that of what was saved")


def _target(part: _Part) -> torch.Tensor | None:
    """The bytes that a chunk can be read into as it is; None where it must be copied."""
    ((read, (starts, sizes)), *others) = part.copies
    into = narrowed(
        read.into, [a - b for a, (b, _) in zip(starts, read.ranges, strict=True)], sizes
    )
    same = not others and sizes == part.chunk.box[1] and part.tensor.dtype == into.dtype
    if same and into.device.type == "cpu" and into.is_contiguous():
        return into.detach().reshape(-1).view(torch.uint8)
    return None
