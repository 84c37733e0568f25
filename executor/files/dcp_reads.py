"""Reading of tensors from a folder of torch.distributed.checkpoint (DCP): boxes of them, in place.

DCP stores a chunk as an archive of `torch.save`. A thread reads it whole, once, and compares its
checksum; its boxes are copied from there to where they belong while the next is read. Two buffers
of the largest chunk serve all. Chunks without a checksum, of older checkpoints and of other
programs, are read as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from meshwright.executor.files.checksums import read_and_sum
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
    buffers = [torch.empty(max(lengths, default=0), dtype=torch.uint8) for _ in range(2)]
    with ThreadPoolExecutor(1) as ahead, torch.no_grad(), phase("reading a checkpoint"):
        for path, chunks in sorted(by_file.items()):
            with path.open("rb") as file:
                every = [chunk for _, chunk in sorted(chunks.items())]
                coming = ahead.submit(_verified, file, every[0][0], buffers[0])
                for k, (chunk, copies) in enumerate(every):
                    name = copies[0][0].name
                    try:
                        data = coming.result()
                        if k + 1 < len(every):
                            buffer = buffers[(k + 1) % 2]
                            coming = ahead.submit(_verified, file, every[k + 1][0], buffer)
                        _copy(_tensor(file, chunk, data, stored[name].dtype), chunk, copies)
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


def _verified(file: IO[bytes], chunk: StoredChunk, buffer: torch.Tensor) -> torch.Tensor:
    """A chunk's archive, in the first bytes of the buffer. Raises ValueError where it is not what
    was saved."""
    data = buffer[: chunk.length]
    array: Any = data.numpy()
    if read_and_sum(file.fileno(), chunk.start, memoryview(array)) != chunk.xxh3_64 is not None:
        raise ValueError("is damaged: its checksum is not that of what was saved")
    return data


def _tensor(file: Any, chunk: StoredChunk, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of an archive, in its memory: loaded without values, it says where they are."""
    archive: Any = _create_file_view(file, chunk.start, chunk.length)
    x = torch.load(archive, map_location="meta", weights_only=True)
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != (chunk.box[1], dtype):
        raise ValueError(f"is no tensor of {dtype} and shape {chunk.box[1]}")
    start = x.untyped_storage()._checkpoint_offset
    assert start is not None, "torch.load says no more where values are"
    values = data[start : start + x.untyped_storage().nbytes()].view(dtype)
    return values.as_strided(x.shape, x.stride(), values.storage_offset() + x.storage_offset())


def _copy(x: torch.Tensor, chunk: StoredChunk, copies: Iterable[Copy]) -> None:
    for read, (starts, sizes) in copies:
        into = [start - a for start, (a, _) in zip(starts, read.ranges, strict=True)]
        of = [start - a for start, a in zip(starts, chunk.box[0], strict=True)]
        narrowed(read.into, into, sizes).copy_(narrowed(x, of, sizes))
