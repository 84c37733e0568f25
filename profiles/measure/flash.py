"""Timing of files on a node's flash, as the executor reads and writes them: mapped.

    write   all of a new file through its mapping, until it is written back
    read    all of it through a mapping, after the system's cache has let it go

One process alone: what several ranks of a node reach together is more, up to what the drives do.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from meshwright.profiles.inputs import MeshwrightError

FILE_BYTES = 2**28
REPETITIONS = 3


def measure_flash(
    folder: str | os.PathLike[str], *, nbytes: int = FILE_BYTES
) -> tuple[float, float]:
    """Bytes per second, read and written, of a file of so many bytes in a folder, as one process
    maps it: medians. For `nvme_read_bandwidth` and `nvme_write_bandwidth` of a host. Raises
    ValueError for a folder that can't be written, or has no room."""
    try:
        with tempfile.NamedTemporaryFile(prefix="meshwright-flash-", dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            taken = [_timed(Path(file.name), file.fileno(), nbytes) for _ in range(REPETITIONS)]
    except OSError as error:
        raise MeshwrightError(
            f"={str(folder)!r} ({error.strerror})",
            place="folder",
            legal=f"a folder that can be written, with room for {nbytes} bytes",
            way_out="name another",
        ) from error
    reads, writes = zip(*taken, strict=True)
    return nbytes / statistics.median(reads), nbytes / statistics.median(writes)


def _timed(path: Path, handle: int, nbytes: int) -> tuple[float, float]:
    """Seconds to read and to write all of a file."""
    started = time.perf_counter()
    _mapped(path, nbytes).fill_(1)
    os.fsync(handle)
    written = time.perf_counter()
    os.posix_fadvise(handle, 0, nbytes, os.POSIX_FADV_DONTNEED)
    emptied = time.perf_counter()
    found = int(_mapped(path, nbytes)[:: mmap.PAGESIZE].sum())  # every page comes in
    read = time.perf_counter()
    assert found == -(-nbytes // mmap.PAGESIZE), "a file that is not as it was written"
    return read - emptied, written - started


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
