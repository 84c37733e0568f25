"""Timing of files on a node's flash, as the executor reads and writes them: mapped.

    to_flash    all of a new file through its mapping, until it is written back
    from_flash  all of it through a mapping, after the system's cache has let it go

By as many processes at once as the node has ranks, each with a file of its own (`flash_rank.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.profiles.inputs import MeshwrightError
from meshwright.profiles.measure.errors import MeasuringError
from meshwright.profiles.timings import FLASH

FILE_BYTES = 2**28  # of a rank
REPETITIONS = 3
TIMEOUT_S = 120.0  # of all of it, after which the processes are ended


def measure_flash(
    folder: str | os.PathLike[str],
    *,
    ranks: int = 1,
    nbytes: int | None = None,
    deadline_s: float = math.inf,
) -> tuple[int, dict[str, list[float]]]:
    """The bytes of all ranks' files in a folder, `nbytes` each (`FILE_BYTES`), and by kind of
    `timings.FLASH` the seconds until the last of them had read or written its own, once per
    repetition; one at least, and no more begins from `deadline_s` of the monotonic clock on. Raises
    ValueError for a folder that can't be written, or has no room, and RuntimeError where it takes
    too long."""
    nbytes = nbytes or FILE_BYTES
    check_folder(folder, ranks * nbytes)
    taken: dict[str, list[float]] = {kind: [] for kind in FLASH}
    from_flash, to_flash = taken
    with _processes(folder, ranks, nbytes) as processes:
        for done in range(REPETITIONS):
            if done and time.monotonic() >= deadline_s:
                break
            taken[to_flash].append(_together(processes, "write"))
            taken[from_flash].append(_together(processes, "read"))
    return ranks * nbytes, taken


def check_folder(folder: str | os.PathLike[str], nbytes: int) -> None:
    """Raise ValueError unless so many bytes can be written in a folder."""
    try:
        with tempfile.TemporaryFile(prefix="meshwright-flash-", dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise MeshwrightError(
            f"={os.fspath(folder)!r} ({error.strerror})",
            place="folder of flash (--flash, or MESHWRIGHT_NVME)",
            legal=f"a folder that can be written, with room for {nbytes} bytes",
            way_out="name another, or none",
        ) from error


@contextlib.contextmanager
def _processes(
    folder: str | os.PathLike[str], ranks: int, nbytes: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that wait for a word to read or write. None outlives the block."""
    command = [sys.executable, "-I", str(Path(__file__).with_name("flash_rank.py"))]
    processes: list[subprocess.Popen[str]] = []
    late = threading.Timer(TIMEOUT_S, _end, [processes])
    try:
        for _ in range(ranks):
            process = subprocess.Popen(
                [*command, os.fspath(folder), str(nbytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        late.start()
        yield processes
    finally:
        late.cancel()
        _end(processes)
        for process in processes:
            process.communicate()


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _together(processes: list[subprocess.Popen[str]], word: str) -> float:
    """Seconds until the last process is done."""
    taken = []
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            taken.append(float(process.stdout.readline()))
    except (OSError, ValueError) as error:
        raise MeasuringError(
            f"files were not read and written in {TIMEOUT_S:.0f} s, or a process of it failed",
            place="profile: flash",
            way_out="name another folder, or measure without it",
        ) from error
    return max(taken)
