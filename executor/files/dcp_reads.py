"""Reading of tensors from a folder of torch.distributed.checkpoint (DCP): boxes of them, in place.

DCP stores a chunk as an archive of `torch.save`. It is read whole, once, into memory that serves
all chunks, and copied from there to where its boxes belong; meanwhile another thread takes its
checksum. Chunks without one, of older checkpoints and of other programs, are read as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from meshwright.executor.files.checksums import BLOCK_BYTES, checksum
from meshwright.executor.files.chunks import Box, ChunkRead, narrowed
from meshwright.executor.files.dcp_metadata import StoredChunk, StoredTensor
from meshwright.executor.ranks import phase

Copy = tuple[ChunkRead, Box]  # a read, and the box of it and of the chunk
Place = tuple[int, str, tuple[int, ...]]  # where a chunk starts, of which tensor, and where in it
Chunks = dict[Place, tuple[StoredChunk, list[Copy]]]  # of a file


def read_tensors(reads: Iterable[ChunkRead], stored: Mapping[str, StoredTensor]) -> None:
    """Read boxes of the stored tensors in place. Raises RuntimeError, which names file and tensor,
    for a chunk that is damaged; what was read before stays."""
    by_file: dict[Path, Chunks] = {}
    for read in reads:
        box = tuple(a for a, _ in read.ranges), tuple(b - a for a, b in read.ranges)
        for chunk in stored[read.name].chunks:
            if (both := overlap(chunk.box, box)) is not None:
                chunks = by_file.setdefault(chunk.file, {})
                place = chunk.start, read.name, chunk.box[0]
                chunks.setdefault(place, (chunk, []))[1].append((read, both))
    lengths = [_stored_whole(path, chunks) for path, chunks in by_file.items()]
    buffer = torch.empty(max(lengths, default=0), dtype=torch.uint8)
    with ThreadPoolExecutor(1) as beside, torch.no_grad(), phase("reading a checkpoint"):
        for path, chunks in sorted(by_file.items()):
            with path.open("rb") as file:
                for _, (chunk, copies) in sorted(chunks.items()):
                    name = copies[0][0].name
                    try:
                        data = _bytes(file.fileno(), chunk, buffer)
                        x = _Archive(file=file, chunk=chunk, dtype=stored[name].dtype, data=data)
                        _copy_verified(x, copies, beside)
                    except Exception as error:
                        raise RuntimeError(f"{name!r} in {str(path)!r} {error}") from error


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes share; None without an element."""
    starts = tuple(map(max, one[0], other[0]))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(n <= 0 for n in sizes) else (starts, sizes)


def _stored_whole(path: Path, chunks: Chunks) -> int:
    """The bytes of a file's largest chunk. Raises RuntimeError where the file ends before one."""
    size = path.stat().st_size if path.is_file() else 0
    for chunk, copies in chunks.values():
        if chunk.start + chunk.length > size:
            raise RuntimeError(
                f"{copies[0][0].name!r} in {str(path)!r} is not there: the file has {size} bytes, "
                f"and {chunk.start + chunk.length} were saved"
            )
    return max(chunk.length for chunk, _ in chunks.values())


def _bytes(handle: int, chunk: StoredChunk, buffer: torch.Tensor) -> torch.Tensor:
    """A chunk's archive, in the first bytes of the buffer."""
    data = buffer[: chunk.length]
    view, count = _view(data), 0
    while count < chunk.length:
        more = os.preadv(handle, [view[count:]], chunk.start + count)
        if not more:
            raise ValueError("is not there: the file became shorter")
        count += more
    return data


def _view(data: torch.Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """A chunk's archive, in its file and, read, in memory."""

    file: Any
    chunk: StoredChunk
    dtype: torch.dtype
    data: torch.Tensor

    def tensor(self) -> torch.Tensor:
        """Its tensor, in this memory: loaded without values, it says where they are."""
        chunk = self.chunk
        part: Any = _create_file_view(self.file, chunk.start, chunk.length)
        x = torch.load(part, map_location="meta", weights_only=True)
        if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != (
            chunk.box[1],
            self.dtype,
        ):
            raise ValueError(f"is no tensor of {self.dtype} and shape {chunk.box[1]}")
        start = x.untyped_storage()._checkpoint_offset
        assert start is not None, "torch.load says no more where values are"
        values = self.data[start : start + x.untyped_storage().nbytes()].view(self.dtype)
        return values.as_strided(x.shape, x.stride(), values.storage_offset() + x.storage_offset())


def _copy_verified(x: _Archive, copies: Iterable[Copy], beside: ThreadPoolExecutor) -> None:
    """Copy a chunk's boxes, while `beside` sums up its bytes. Raises ValueError where the sum is
    not that of what was saved."""
    chunk, view = x.chunk, _view(x.data)
    if len(view) <= BLOCK_BYTES or chunk.xxh3_64 is None:
        _verify(chunk, None if chunk.xxh3_64 is None else checksum(view))
        _copy(x.tensor(), chunk, copies)
        return
    found = beside.submit(checksum, view)
    try:
        _copy(x.tensor(), chunk, copies)
    finally:  # which says more than an error of what was damaged
        _verify(chunk, found.result())


def _verify(chunk: StoredChunk, found: str | None) -> None:
    if found != chunk.xxh3_64:
        raise ValueError("is damaged: its checksum is not that of what was saved")


def _copy(x: torch.Tensor, chunk: StoredChunk, copies: Iterable[Copy]) -> None:
    for read, (starts, sizes) in copies:
        into = [start - a for start, (a, _) in zip(starts, read.ranges, strict=True)]
        of = [start - a for start, a in zip(starts, chunk.box[0], strict=True)]
        narrowed(read.into, into, sizes).copy_(narrowed(x, of, sizes))
