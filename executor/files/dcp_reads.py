"""Reading of tensors from a folder of torch.distributed.checkpoint (DCP): boxes of them, in place.

DCP stores a chunk as an archive of `torch.save`, which is read whole, once. Its checksum is taken
meanwhile, by another thread, and compared before anything is copied from it. Chunks without one,
of older checkpoints and of other programs, are read as they are.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from meshwright.executor.files.checksums import BLOCK_BYTES, checksum, checksum_of_part
from meshwright.executor.files.chunks import Box, ChunkRead, narrowed
from meshwright.executor.files.dcp_metadata import StoredChunk, StoredTensor

Copy = tuple[ChunkRead, Box]  # a read, and the box of it and of the chunk


def read_tensors(reads: Iterable[ChunkRead], stored: Mapping[str, StoredTensor]) -> None:
    """Read boxes of the stored tensors in place. Raises RuntimeError, which names file and tensor,
    for a chunk that is damaged."""
    by_file: dict[Path, dict[int, tuple[StoredChunk, list[Copy]]]] = {}
    for read in reads:
        box = tuple(a for a, _ in read.ranges), tuple(b - a for a, b in read.ranges)
        for chunk in stored[read.name].chunks:
            if (both := overlap(chunk.box, box)) is not None:
                chunks = by_file.setdefault(chunk.file, {})
                chunks.setdefault(chunk.start, (chunk, []))[1].append((read, both))
    with ThreadPoolExecutor(1) as beside, torch.no_grad():
        for path, chunks in sorted(by_file.items()):
            with path.open("rb") as file:
                for _, (chunk, copies) in sorted(chunks.items()):
                    name = copies[0][0].name
                    try:
                        x = _chunk(file, chunk, stored[name].dtype, beside)
                    except Exception as error:
                        raise RuntimeError(f"{name!r} in {str(path)!r}: {error}") from error
                    _copy(x, chunk, copies)


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes share; None without an element."""
    starts = tuple(map(max, one[0], other[0]))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(n <= 0 for n in sizes) else (starts, sizes)


def _chunk(
    file: IO[bytes], chunk: StoredChunk, dtype: torch.dtype, beside: ThreadPoolExecutor
) -> torch.Tensor:
    """The tensor of a chunk, verified. Small ones are read at once; of large ones the checksum is
    taken beside."""
    handle, start, length = file.fileno(), chunk.start, chunk.length
    if os.fstat(handle).st_size < start + length:
        raise ValueError("the file is shorter than what was saved")
    wrong = ValueError("is damaged: its checksum is not that of what was saved")
    if length <= BLOCK_BYTES:
        data = os.pread(handle, length, start)
        if chunk.xxh3_64 is not None and checksum(data) != chunk.xxh3_64:
            raise wrong
        x = _loaded(io.BytesIO(data))
    elif chunk.xxh3_64 is None:
        x = _loaded(_view(file, start, length))
    else:
        found = beside.submit(checksum_of_part, handle, start, length)
        try:
            x = _loaded(_view(file, start, length))
        finally:
            if found.result() != chunk.xxh3_64:
                raise wrong
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != (chunk.box[1], dtype):
        raise ValueError(f"is no tensor of {dtype} and shape {chunk.box[1]}")
    return x


def _view(file: Any, start: int, length: int) -> Any:
    return _create_file_view(file, start, length)


def _loaded(archive: IO[bytes]) -> torch.Tensor:
    x: torch.Tensor = torch.load(archive, map_location="cpu", weights_only=True)
    return x


def _copy(x: torch.Tensor, chunk: StoredChunk, copies: Iterable[Copy]) -> None:
    for read, (starts, sizes) in copies:
        into = [start - a for start, (a, _) in zip(starts, read.ranges, strict=True)]
        of = [start - a for start, a in zip(starts, chunk.box[0], strict=True)]
        narrowed(read.into, into, sizes).copy_(narrowed(x, of, sizes))
