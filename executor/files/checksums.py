"""Checksums of blocks that are written and read, XXH3 of 64 bits, which finds damage, not forgery;
and progress of that in bytes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from meshwright.executor.ranks import launch
from meshwright.planner.plan import sized

progress = logging.getLogger("meshwright.progress")  # heard where somebody watches
EVERY_S = 0.1
BLOCK_BYTES = 2**18  # summed up while it is in the core's cache


Moved = Callable[[int], None]  # takes how many more bytes were moved


def read_blocks(handle: int, start: int, into: memoryview, moved: Moved) -> Iterator[memoryview]:
    """Fill memory from an open file, from byte `start` on; yields what was filled, block by block.
    Raises EOFError where the file ends before."""
    count = 0
    while count < len(into):
        more = os.preadv(handle, [into[count : count + BLOCK_BYTES]], start + count)
        if not more:
            raise EOFError("is not there: the file became shorter")
        yield into[count : count + more]
        count += more
        moved(more)


def checksum_of(blocks: Iterable[memoryview]) -> str:
    """Checksum of blocks of memory together."""
    state = xxhash.xxh3_64()
    for block in blocks:
        state.update(block)
    return state.hexdigest()


def checksum_of_file(path: Path) -> str:
    """Checksum of a file."""
    state, block = xxhash.xxh3_64(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            state.update(block[:count])
    return state.hexdigest()


class MovedBytes:
    """Bytes of `total` that this rank has moved. Rank 0 says so of its own, now and then and at the
    end, as `reading a checkpoint: 1.2 GiB of 3.4 GiB`; by `what` it does."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.total, self.clock = what, total, clock
        self.done, self.next_s = 0, clock()
        self._lock = threading.Lock()  # threads read side by side
        self.said = launch.rank() == 0 and progress.isEnabledFor(logging.DEBUG)
        ranks = launch.world_size() if launch.running() else 1
        self.whose = f" (rank 0 of {ranks})" if ranks > 1 else ""

    def __call__(self, count: int) -> None:
        """So many more are moved."""
        with self._lock:
            self._add(count)

    def _add(self, count: int) -> None:
        before, self.done = self.done, self.done + count
        if not self.said or before >= self.total:  # files hold more than their tensors
            return
        now = self.clock()
        if now >= self.next_s or self.done >= self.total:
            self.next_s = now + EVERY_S
            done, share = sized(min(self.done, self.total)), self.done / self.total
            said = (self.what, done, sized(self.total), self.whose)
            progress.debug("%s: %s of %s%s", *said, extra={"share": share})
