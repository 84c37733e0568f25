"""Reading of tensors from a folder of torch.distributed.checkpoint (DCP): boxes of them, in place.

DCP stores a chunk as an archive of `torch.save`. Its bytes are read once and summed up on the way,
block by block while they are in the core's cache: to where they belong, if that is the whole chunk
as it is; else to a buffer, which boxes are copied from, and which serves all chunks of a thread.
Threads read chunks side by side: one sums up while another waits for the storage. Chunks without a
checksum, of older checkpoints and of other programs, are read as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Self

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from meshwright.executor.errors import DamagedError
from meshwright.executor.files.checksums import Moved, checksum_of, read_blocks
from meshwright.executor.files.chunks import Box, ChunkRead, narrowed
from meshwright.executor.files.dcp_metadata import StoredChunk, StoredTensor
from meshwright.executor.files.moved_bytes import MovedBytes
from meshwright.executor.ranks import phase

READERS = 2  # threads
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
    total = sum(chunk.length for chunks in by_file.values() for chunk, _ in chunks.values())
    moved = MovedBytes("reading a checkpoint", total)
    with phase("reading a checkpoint"), _Readers(max(lengths, default=0), moved) as readers:
        for path, chunks in sorted(by_file.items()):
            with readers.opened(path) as file:
                for _, (chunk, copies) in sorted(chunks.items()):
                    name = copies[0][0].name
                    where = f"{name!r} in {str(path)!r}"
                    readers.read(where, file, chunk, copies, stored[name].dtype)


class _Readers:
    """Threads that read chunks, few more of which are handed out than are being read. What is
    raised is of the first chunk that is damaged."""

    def __init__(self, largest: int, moved: Moved) -> None:
        self._moved, self._stopped = moved, False
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint")
        self._pending: deque[tuple[str, Future[None]]] = deque()
        self._buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(READERS):  # they take pages where they are written
            self._buffers.put(torch.empty(largest, dtype=torch.uint8))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    @contextmanager
    def opened(self, path: Path) -> Iterator[IO[bytes]]:
        """A file to read from, open until all of it is read; after an error, until nobody reads."""
        with path.open("rb") as file:
            try:
                yield file
                self._finish()
            except BaseException:
                self._stopped = True
                self._threads.shutdown(cancel_futures=True)
                raise

    def read(
        self,
        place: str,
        file: IO[bytes],
        chunk: StoredChunk,
        copies: list[Copy],
        dtype: torch.dtype,
    ) -> None:
        """Have a chunk's boxes read from a file that is `opened`. Raises RuntimeError where this
        chunk or one before is damaged."""
        try:
            described = _described(file, chunk, dtype)
        except Exception as error:
            self._finish()
            with _damage_at(place):
                self._verified(file, chunk)  # its checksum says more
                raise error
        task = self._threads.submit(self._read, file.fileno(), chunk, copies, *described)
        self._pending.append((place, task))
        while len(self._pending) > 2 * READERS:
            self._wait()

    def _finish(self) -> None:
        while self._pending:
            self._wait()

    def _wait(self) -> None:
        place, task = self._pending.popleft()
        with _damage_at(place):
            task.result()

    def _verified(self, file: IO[bytes], chunk: StoredChunk) -> None:
        _fill(file.fileno(), chunk, [torch.empty(chunk.length, dtype=torch.uint8)], self._said)

    def _read(
        self, handle: int, chunk: StoredChunk, copies: list[Copy], x: torch.Tensor, start: int
    ) -> None:
        """Read a chunk's boxes. Raises ValueError where it is damaged."""
        buffer = self._buffers.get()
        try:
            with torch.no_grad():  # a thread has its own
                _read(handle, chunk, copies, x, start, buffer[: chunk.length], self._said)
        finally:
            self._buffers.put(buffer)

    def _said(self, count: int) -> None:
        if self._stopped:
            raise InterruptedError("is read no more")
        self._moved(count)


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


def _stored_whole(path: Path, chunks: Chunks) -> int:
    """The bytes of a file's largest chunk. Raises RuntimeError where the file ends before one."""
    size = path.stat().st_size if path.is_file() else 0
    for chunk, copies in chunks.values():
        if chunk.start + chunk.length > size:
            raise DamagedError(
                f" is not there: the file has {size} bytes, and {chunk.start + chunk.length} were "
                "saved",
                place=f"{copies[0][0].name!r} in {str(path)!r}",
            )
    return max(chunk.length for chunk, _ in chunks.values())


def _read(
    handle: int,
    chunk: StoredChunk,
    copies: list[Copy],
    x: torch.Tensor,
    start: int,
    data: torch.Tensor,
    moved: Moved,
) -> None:
    """Read a chunk, described by `x` and where its values start: in place, or to `data` first."""
    size = x.untyped_storage().nbytes()
    into = _memory(x, chunk, copies)
    if into is not None:
        parts = [data[:start], into, data[start : chunk.length - size]]
        _fill(handle, chunk, parts, moved)
        return
    _fill(handle, chunk, [data], moved)
    values = data[start : start + size].view(x.dtype)
    first = values.storage_offset() + x.storage_offset()
    _copy(values.as_strided(x.shape, x.stride(), first), chunk, copies)


def _described(file: Any, chunk: StoredChunk, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """The tensor of an archive, without values, and the byte where they start."""
    archive: Any = _create_file_view(file, chunk.start, chunk.length)
    x = torch.load(archive, map_location="meta", weights_only=True)
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != (chunk.box[1], dtype):
        raise DamagedError(f"is no tensor of {dtype} and shape {chunk.box[1]}")
    start = x.untyped_storage()._checkpoint_offset
    assert start is not None, "torch.load says no more where values are"
    if start + x.untyped_storage().nbytes() > chunk.length:
        raise DamagedError("is not stored whole")
    return x, start


def _memory(x: torch.Tensor, chunk: StoredChunk, copies: list[Copy]) -> torch.Tensor | None:
    """The bytes that a chunk can be read into as it is; None where it must be copied."""
    ((read, (starts, sizes)), *others) = copies
    into = narrowed(
        read.into, [a - b for a, (b, _) in zip(starts, read.ranges, strict=True)], sizes
    )
    whole = not others and sizes == chunk.box[1] and x.dtype == into.dtype
    plain = into.device.type == "cpu" and into.is_contiguous() and x.is_contiguous()
    if whole and plain and x.untyped_storage().nbytes() == into.nbytes:
        return into.reshape(-1).view(torch.uint8)
    return None


def _fill(handle: int, chunk: StoredChunk, parts: Iterable[torch.Tensor], moved: Moved) -> None:
    """Read a chunk's archive into memory, part by part. Raises ValueError where it is not what was
    saved."""
    arrays: list[Any] = [part.numpy() for part in parts if part.numel()]
    views = [memoryview(array) for array in arrays]
    blocks = read_blocks(handle, chunk.start, views, moved)
    if chunk.xxh3_64 is None:
        deque(blocks, maxlen=0)
    elif checksum_of(blocks) != chunk.xxh3_64:
        raise DamagedError("is damaged: its checksum is not that of what was saved")


def _copy(x: torch.Tensor, chunk: StoredChunk, copies: Iterable[Copy]) -> None:
    for read, (starts, sizes) in copies:
        into = [start - a for start, (a, _) in zip(starts, read.ranges, strict=True)]
        of = [start - a for start, a in zip(starts, chunk.box[0], strict=True)]
        narrowed(read.into, into, sizes).copy_(narrowed(x, of, sizes))
