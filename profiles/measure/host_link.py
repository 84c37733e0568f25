"""Timing of copies between host memory and a device, as the executor makes them.

From pinned memory to a GPU and back, one direction at a time, waited for; on a CPU from one part of
its memory to another: the two pools that stand for host and device there. One rank copies alone:
what several ranks of a node share of the way is not seen.
"""

from __future__ import annotations

import math
import statistics
import time

import torch

from meshwright.profiles.timings import COPIES, CollectiveTiming

COPY_BYTES = (2**16, 2**20, 2**24, 2**26)
REPETITIONS = 7


def measure_host_link(
    device: torch.device, backend: str, deadline_s: float = math.inf
) -> list[CollectiveTiming]:
    """The median seconds of a copy of each of `COPY_BYTES`, in both directions, as curves of a
    "group" of one rank; nothing from `deadline_s` of the monotonic clock on."""
    return [
        _timed(kind, nbytes, device, backend)
        for nbytes in COPY_BYTES
        for kind in COPIES
        if time.monotonic() < deadline_s
    ]


def _timed(kind: str, nbytes: int, device: torch.device, backend: str) -> CollectiveTiming:
    gpu = device.type == "cuda"
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=gpu)
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    source, target = (host, there) if kind == "to_device" else (there, host)
    times = []
    for _ in range(REPETITIONS + 1):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    low, middle, high = statistics.quantiles(times[1:], n=4)  # the first one pages in
    return CollectiveTiming(
        backend=backend,
        kind=kind,
        ranks=1,
        size=1,
        per_node=1,
        nbytes=nbytes,
        seconds=max(middle, 1e-9),
        repetitions=REPETITIONS,
        spread=(high - low) / max(middle, 1e-9),
    )
