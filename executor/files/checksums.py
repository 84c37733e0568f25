"""Checksums of what is written and read: XXH3 of 64 bits, which finds damage, not forgery."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

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
