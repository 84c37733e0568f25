"""Checksums of what is written and read: XXH3 of 64 bits, which finds damage, not forgery."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import xxhash

BLOCK_BYTES = 2**20  # read or summed up at a time; it stays in a core's cache


def checksum(data: bytes | memoryview) -> str:
    """Of bytes in memory."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum_of_part(handle: int, start: int, length: int) -> str:
    """Of bytes `start` to `start + length` of an open file, or as many as it has; the file's
    position is left alone, so that another thread can read meanwhile."""
    state, block = xxhash.xxh3_64(), memoryview(bytearray(min(BLOCK_BYTES, length)))
    while length > 0 and (count := os.preadv(handle, [block[:length]], start)):
        state.update(block[:count])
        start, length = start + count, length - count
    return state.hexdigest()


def checksum_of_file(path: Path) -> str:
    """Of a whole file."""
    with path.open("rb") as file:
        return checksum_of_part(file.fileno(), 0, os.fstat(file.fileno()).st_size)


class ChecksumStream:
    """Passes what is written on to a file, and sums it up."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._state = file, xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        self._state.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Leaves the file open, for what comes after."""
        self.flush()

    def checksum(self) -> str:
        """Of all that was written."""
        return self._state.hexdigest()
