"""One process of a measurement of flash (`host_work.py`), which reads and writes its own file.

Run as a script with a folder and a number of bytes; of the standard library alone, so that it
starts at once. Per line of its input, "write" or "read", it says the seconds that took.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time

CHUNK = 2**22


def main(folder: str, nbytes: int) -> None:
    with tempfile.TemporaryFile(prefix="meshwright-flash-", dir=folder) as file:
        handle = file.fileno()
        os.posix_fallocate(handle, 0, nbytes)
        for line in sys.stdin:
            run = {"write": _write, "read": _read}[line.strip()]
            sys.stdout.write(f"{run(handle, nbytes)}\n")
            sys.stdout.flush()


def _write(handle: int, nbytes: int) -> float:
    """Seconds to write all of the file and back to its disk; what is cached of it is let go."""
    block = bytes([1]) * CHUNK
    with mmap.mmap(handle, nbytes) as mapped:
        started = time.perf_counter()
        for start in range(0, nbytes, CHUNK):
            size = min(CHUNK, nbytes - start)
            mapped[start : start + size] = block[:size]
        mapped.flush()
        os.fsync(handle)
        taken = time.perf_counter() - started
    os.posix_fadvise(handle, 0, nbytes, os.POSIX_FADV_DONTNEED)
    return taken


def _read(handle: int, nbytes: int) -> float:
    """Seconds to read all of the file."""
    with mmap.mmap(handle, nbytes) as mapped:
        started = time.perf_counter()
        for start in range(0, nbytes, CHUNK):
            assert mapped[start : start + CHUNK][-1] == 1, "a file that is not as it was written"
        return time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
