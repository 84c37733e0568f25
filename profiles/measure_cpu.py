"""Measurement of one CPU core's FLOP/s, memory bandwidth and call overhead, in under a second.

A rank on a CPU runs one thread, so that is what is timed: a square matmul in fp32 and bf16, a copy
too large for the caches, and an operator so small that only its call costs. The best of several
repetitions is kept: noise only ever adds time. The rates are achieved ones, so a device built from
them has efficiency 1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

_BUDGET_S = 0.12
_MATMUL_SIZE = 512
_COPY_BYTES = 64 * 2**20
_TINY_CALLS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRates:
    """Achieved by one thread: FLOP/s of a matmul, bytes/s read plus written, seconds per call."""

    fp32_flops: float
    bf16_flops: float
    copy_bandwidth: float
    launch_overhead_s: float


@cache
def measure_cpu() -> CpuRates:
    """Time this machine with one thread; once per process, so that two clusters made here agree."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return CpuRates(
                fp32_flops=_matmul_flops(torch.float32),
                bf16_flops=_matmul_flops(torch.bfloat16),
                copy_bandwidth=_copy_bandwidth(),
                launch_overhead_s=_launch_overhead_s(),
            )
    finally:
        torch.set_num_threads(threads)


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


def _launch_overhead_s() -> float:
    tiny = torch.ones(1)

    def run() -> None:
        for _ in range(_TINY_CALLS):
            tiny.add_(1.0)

    return _best_time_s(run) / _TINY_CALLS
