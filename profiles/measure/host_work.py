"""Timing of what a node's host does: copies to and from a device, the optimizer's step, files.

copies  from pinned memory to a GPU and back, one direction at a time, waited for; on a CPU from
        one part of its memory to another: the two pools that stand for host and device there.
        One rank copies alone: what several ranks of a node share of the way is not seen
step    torch's fused AdamW in host memory, on the cores of all ranks
files   on the node's flash, of all ranks at once
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch

from meshwright.profiles.inputs import UnwritableError
from meshwright.profiles.inputs.errors import MeasuringError
from meshwright.profiles.timings import COPIES, FLASH, HOST_STEP, CollectiveTiming, spread_of

log = logging.getLogger(__name__)

COPY_BYTES = (2**16, 2**20, 2**24, 2**26)
STEP_ELEMENTS = 2**25
STEP_BYTES = 28  # an element: weight, gradient and moments read, all but the gradient written
REPETITIONS = 7


def measure_host(
    device: torch.device,
    *,
    backend: str,
    ranks: int,
    cores: int,
    flash: str | None,
    known: Collection[str] = (),
    deadline_s: float = math.inf,
) -> list[CollectiveTiming]:
    """The timings of a node of so many ranks, but those of `known` kinds: median seconds, as curves
    of a "group" of one rank, or of all that read files of the folder `flash`, if there is one, each
    time; nothing from `deadline_s` of the monotonic clock on. Files that took too long are left
    out, with a warning."""
    taken: list[CollectiveTiming] = []
    if not {*COPIES} <= {*known}:
        for kind, nbytes in ((kind, nbytes) for nbytes in COPY_BYTES for kind in COPIES):
            if time.monotonic() < deadline_s:
                times = _copies(kind, nbytes, device)
                taken.append(_timing(kind, nbytes, times, backend))
    if HOST_STEP not in known and time.monotonic() < deadline_s:
        times = _steps(cores, deadline_s)
        taken.append(_timing(HOST_STEP, STEP_ELEMENTS * STEP_BYTES, times, backend))
    if flash and time.monotonic() < deadline_s:
        try:
            nbytes, phases = measure_flash(flash, ranks=ranks, deadline_s=deadline_s)
        except MeasuringError as error:
            log.warning("files are not timed: %s", error)
            return taken
        for kind, times in phases.items():
            taken.append(_timing(kind, nbytes, times, backend, ranks))
    return taken


def _timing(
    kind: str, nbytes: int, times: list[float], backend: str, ranks: int = 1
) -> CollectiveTiming:
    """The record of repeated measurements: their median, and their interquartile range over it."""
    return CollectiveTiming(
        backend=backend,
        kind=kind,
        ranks=ranks,
        size=ranks,
        per_node=ranks,
        nbytes=nbytes,
        seconds=max(statistics.median(times), 1e-9),
        repetitions=len(times),
        spread=spread_of(times),
    )


def _copies(kind: str, nbytes: int, device: torch.device) -> list[float]:
    gpu = device.type == "cuda"
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=gpu)
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    source, target = (host, there) if kind == "to_device" else (there, host)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if gpu:
            torch.cuda.synchronize(device)

    return [*_repeated(copy)]


def _steps(cores: int, deadline_s: float) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(STEP_ELEMENTS))
    weight.grad = torch.ones(STEP_ELEMENTS)
    optimizer = torch.optim.AdamW([weight], fused=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        return [*_repeated(optimizer.step, deadline_s)]
    finally:
        torch.set_num_threads(threads)


def _repeated(run: Callable[[], object], deadline_s: float = math.inf) -> Iterator[float]:
    """Seconds of each repetition but the first, which pages in; of one at least."""
    run()
    for done in range(REPETITIONS):
        if done and time.monotonic() >= deadline_s:
            return
        started = time.perf_counter()
        run()
        yield time.perf_counter() - started


# --- flash ----------------------------------------------------------------------------------------

# Timing of files on a node's flash, as the executor reads and writes them: mapped.
#
#     to_flash    all of a new file through its mapping, until it is written back
#     from_flash  all of it through a mapping, after the system's cache has let it go
#
# By as many processes at once as the node has ranks, each with a file of its own (`flash_rank.py`).


FILE_BYTES = 2**28  # of a rank
FLASH_REPETITIONS = 3
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
        for done in range(FLASH_REPETITIONS):
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
        raise UnwritableError(
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
