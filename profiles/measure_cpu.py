"""Rates of one CPU core: FLOP/s, memory bandwidth, and seconds to issue an operator.

A rank on a CPU runs one thread, so that is what is timed: a linear layer in fp32 and bf16, a copy
too large for the caches, operators of a Transformer's block that pass over memory (on a CPU they
take several times a copy's seconds), all forward and backward, and a chain of blocks so small that
only their calls cost, as a lowered graph runs them. The best of several trials is kept, some time
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

from meshwright.profiles.store import DeviceId, Measurements, Store
from meshwright.profiles.timings import CpuRates

log = logging.getLogger(__name__)

_BUDGET_S = 0.05  # of each timing of a trial
_TRIALS, _APART_S = 3, 0.2
_BUSY = 0.9  # part of a core that a thread gets at least where nothing else runs
_LINEAR = (1024, 256, 1024)  # tokens, features taken and given
_COPY_BYTES = 64 * 2**20
_ROWS, _LAYERS = (1024, 768), 3  # tokens of a small block, features of each; how often
_TINY, _CHAINED = 8, 8
_BLOCK_CALLS = 8 + 11 + 5 * 0.5  # forward, backward (twice of a product), views


@cache
def local_rates(ranks: int, *, again: bool = False) -> CpuRates:
    """The rates of a core while so many ranks run: those of the cache, else measured now, and kept.
    Once per process, so that two clusters made here agree; `again` measures anew."""
    here = DeviceId.here("cpu", min(ranks, os.cpu_count() or 1))
    store, measured = Store(), None
    try:
        known = store.read(here).rates
        if known and not (again or known.busy):
            return known
        measured = measure_cpu()
        if known and known.busy and not again:
            measured = _better(measured, known)
        store.add(Measurements(device=here, rates=measured))
    except OSError as error:
        log.warning("this machine's rates hold in this process alone: %s", error)
    return measured or measure_cpu()


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
    return CpuRates(
        fp32_flops=_matmul_flops(torch.float32),
        bf16_flops=_matmul_flops(torch.bfloat16),
        copy_bandwidth=_copy_bandwidth(),
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
    """FLOP/s of a layer's three products, forward and backward."""
    rows, inner, columns = _LINEAR
    x, weight = (torch.ones(n, inner, dtype=dtype).requires_grad_() for n in (rows, columns))
    operand = torch.ones(rows, columns, dtype=dtype)
    product = torch.nn.functional.linear
    return 6 * math.prod(_LINEAR) / _best_time_s(lambda: product(x, weight).backward(operand))


def _copy_bandwidth() -> float:
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_time_s(lambda: target.copy_(source))


def _stream_bandwidth() -> float:
    """Bandwidth of additions, norms, activations and softmaxes one after the other, each of which
    keeps its result, as in a model: what their prices count, forward and backward."""
    norm, gelu = torch.nn.functional.layer_norm, torch.nn.functional.gelu
    x = torch.linspace(-3.0, 3.0, math.prod(_ROWS)).view(_ROWS).requires_grad_()
    operand = torch.ones_like(x)
    tensors = (3 + 1) + 3 * (2 + 3)  # of a layer that are read and written

    def run() -> None:
        y = x
        for _ in range(_LAYERS):
            y = gelu(norm(y + operand, _ROWS[-1:]), approximate="tanh").softmax(-1)
        y.backward(operand)

    return 4 * x.numel() * tensors * _LAYERS / _best_time_s(run)


def _chain() -> torch.fx.GraphModule:
    """Blocks of a Transformer so small that only their calls cost."""
    nn = torch.nn

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(_TINY)
            self.up, self.down = nn.Linear(_TINY, _TINY), nn.Linear(_TINY, _TINY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(_CHAINED):
                y = self.up(self.norm(x)).view(2, 2, 2, _TINY // 2).transpose(1, 2)
                y = (y @ y.transpose(-1, -2)).softmax(-1) @ y
                x = x + self.down(nn.functional.gelu(y.transpose(1, 2).reshape(2, 2, _TINY)))
            return x

    return torch.fx.symbolic_trace(Chain())


def _issue_s() -> float:
    """Seconds to issue an operator, and half of it a view, as prices count them."""
    chain, tiny = _chain(), torch.ones(2, 2, _TINY, requires_grad=True)
    operand = torch.ones_like(tiny)
    return _best_time_s(lambda: chain(tiny).backward(operand)) / (_CHAINED * _BLOCK_CALLS)
