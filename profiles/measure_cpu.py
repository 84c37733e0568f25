"""What one CPU core achieves: FLOP/s, memory bandwidth, and seconds to issue an operator.

A rank on a CPU runs one thread, so that is what is timed: a square matmul in fp32 and bf16, a copy
too large for the caches, operators of a Transformer's block that pass over memory, forward and
backward (on a CPU they take several times a copy's seconds), and a chain of operators so small that
only their calls cost, as a lowered block runs them. The best of several trials is kept, some time
apart: noise only ever adds time. The rates are achieved ones, so a device built from them has
efficiency 1.

Rates are kept in the cache of measurements (`store.py`) for the processor, as many of its cores as
are busy with ranks, and torch's version, so that the same command says the same tomorrow; those
that were taken while the machine was busy with something else are taken again.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import fx, nn
from torch.nn import functional as F

from meshwright.profiles.store import DeviceId, Measurements, Store
from meshwright.profiles.timings import CpuRates

log = logging.getLogger(__name__)

_BUDGET_S = 0.05  # of each timing of a trial
_TRIALS, _APART_S = 3, 0.2
_BUSY = 0.9  # part of a core that a thread gets at least where nothing else runs
_MATMUL_SIZE = 512
_COPY_BYTES = 64 * 2**20
_ROWS = (512, 768)  # tokens of a small block, features of each
_TINY_CALLS = 100


@cache
def local_rates(ranks: int, *, again: bool = False) -> CpuRates:
    """The rates of a core while so many ranks run: those of the cache, else measured now, and kept.
    Once per process, so that two clusters made here agree; `again` measures anew."""
    here = DeviceId.here("cpu", min(ranks, os.cpu_count() or 1))
    store, found = Store(), None
    try:
        known = store.read(here).rates
        if known and not (again or known.busy):
            return known
        found = measure_cpu()
        if known and known.busy and not again:
            found = _better(found, known)
        store.add(Measurements(device=here, rates=found))
    except OSError as error:
        log.warning("this machine's rates hold in this process alone: %s", error)
    return found or measure_cpu()


def measure_cpu() -> CpuRates:
    """Time this machine with one thread, now."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    got, wall = time.process_time(), 0.0
    trials = []
    try:
        for k in range(_TRIALS):
            time.sleep(_APART_S * bool(k))
            begun = time.perf_counter()
            trials.append(_trial())
            wall += time.perf_counter() - begun
    finally:
        torch.set_num_threads(threads)
    best = trials[0]
    for trial in trials[1:]:
        best = _better(best, trial)
    busy = time.process_time() - got < _BUSY * wall
    return replace(best, busy=busy)


def _better(one: CpuRates, other: CpuRates) -> CpuRates:
    """The better of two in each rate, of the date of the first."""
    return replace(
        one,
        fp32_flops=max(one.fp32_flops, other.fp32_flops),
        bf16_flops=max(one.bf16_flops, other.bf16_flops),
        copy_bandwidth=max(one.copy_bandwidth, other.copy_bandwidth),
        stream_bandwidth=max(one.stream_bandwidth, other.stream_bandwidth),
        launch_overhead_s=min(one.launch_overhead_s, other.launch_overhead_s),
    )


def _trial() -> CpuRates:
    with torch.no_grad():
        fp32, bf16 = (_matmul_flops(dtype) for dtype in (torch.float32, torch.bfloat16))
        copied = _copy_bandwidth()
    return CpuRates(
        fp32_flops=fp32,
        bf16_flops=bf16,
        copy_bandwidth=copied,
        stream_bandwidth=_stream_bandwidth(),
        launch_overhead_s=_issue_s(),
        date=datetime.date.today().isoformat(),
    )


def total_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _best_time_s(run: Callable[[], object]) -> float:
    run()  # the first call allocates, pages in and picks kernels
    best = float("inf")
    deadline = time.perf_counter() + _BUDGET_S
    while best == float("inf") or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _matmul_flops(dtype: torch.dtype) -> float:
    left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    right, out = torch.ones_like(left), torch.empty_like(left)
    return 2 * _MATMUL_SIZE**3 / _best_time_s(lambda: torch.mm(left, right, out=out))


def _copy_bandwidth() -> float:
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_time_s(lambda: target.copy_(source))


def _stream_bandwidth() -> float:
    """Of an addition, a norm, a softmax and an activation, which each pass over as many bytes: what
    their prices count, forward and backward."""
    x = torch.linspace(-3.0, 3.0, math.prod(_ROWS)).view(_ROWS).requires_grad_()
    given = torch.ones_like(x)
    runs = {  # tensors that are read and written
        lambda: (x + given).backward(given): 3 + 1,
        lambda: F.layer_norm(x, _ROWS[-1:]).backward(given): 2 + 3,
        lambda: F.softmax(x, -1).backward(given): 2 + 3,
        lambda: F.gelu(x, approximate="tanh").backward(given): 2 + 3,
    }
    seconds = [_best_time_s(run) / tensors for run, tensors in runs.items()]
    return 4 * x.numel() * len(seconds) / sum(seconds)


class _Chain(nn.Module):
    """Operators that do next to nothing, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_TINY_CALLS):
            x = torch.tanh(x)
        return x


def _issue_s() -> float:
    chain, tiny = fx.symbolic_trace(_Chain()), torch.ones(1, requires_grad=True)
    return _best_time_s(lambda: chain(tiny).backward()) / (2 * _TINY_CALLS)
