"""Timing of what a node's host does: copies to and from a device, the optimizer's step, files.

copies  from pinned memory to a GPU and back, one direction at a time, waited for; on a CPU from
        one part of its memory to another: the two pools that stand for host and device there.
        One rank copies alone: what several ranks of a node share of the way is not seen
step    torch's fused AdamW in host memory, on the cores of all ranks
files   on the node's flash, of all ranks at once (`flash.py`)
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator

import torch

from meshwright.profiles.measure.errors import MeasuringError
from meshwright.profiles.measure.flash import measure_flash
from meshwright.profiles.timings import COPIES, HOST_STEP, CollectiveTiming, spread_of

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
