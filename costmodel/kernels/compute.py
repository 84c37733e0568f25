"""Seconds of one kernel on one device, without its launch; formulas: docs/decides/price.md.

`filling` is tile and wave quantisation: an output of m × n is cut into tiles of the kernel, whole
ones only (NVIDIA, "Matrix Multiplication Background User's Guide"), and the tiles run in waves of
as many as the device has compute units, the last one partly empty. The best of a device's tile
sizes is taken; a smaller tile moves more bytes per FLOP, so that it loses by the square root of the
ratio of their intensities mn/(m + n). An output of few tiles from long sums (the gradient of a
low-rank adapter) is made in 2, 4, 8 ... parts along k, each with tiles of its own, where writing
and adding up their results costs less than it saves.
"""

from __future__ import annotations

import math
from functools import lru_cache

from meshwright.profiles.cluster import Device


def stream_seconds(device: Device, nbytes: float) -> float:
    """Seconds to read and write `nbytes` in all, without the launch."""
    if nbytes <= 0:
        return 0.0
    return nbytes / (device.memory_bandwidth * device.memory_efficiency(nbytes))


LEAST_DEPTH = 256  # of a part along k: a tile's loop over less is not worth its start
SUM_BYTES = 4  # partial sums are kept in fp32


@lru_cache(maxsize=65536)
def matmul_seconds(
    device: Device, dtype: str, m: float, n: float, k: float, batch: float, nbytes: float
) -> float:
    """Seconds of `batch` products (m × k)·(k × n) that move `nbytes`, without the launch.

    `dtype` is "fp32", "bf16", "fp16" or "fp8"; one the device has no rate for (bf16 on a V100) is
    computed, and priced, at the fp32 rate. Raises ValueError for another.
    """
    flops = 2 * m * n * k * batch
    if not flops:
        return stream_seconds(device, nbytes)
    rate = device.product_rate(dtype, flops)
    best_s, parts = math.inf, 1
    while parts == 1 or k >= parts * LEAST_DEPTH:
        busy_s = flops / (rate * filling(device, m, n, batch * parts))
        sums_s = stream_seconds(device, 2 * SUM_BYTES * parts * m * n * batch) if parts > 1 else 0.0
        seconds = max(busy_s, stream_seconds(device, nbytes)) + sums_s
        if seconds >= best_s:
            break
        best_s, parts = seconds, 2 * parts
    return best_s


def attention_seconds(
    device: Device, dtype: str, flops: float, seq_len: float, nbytes: float, *, tuned: bool = False
) -> float:
    """Seconds of fused attention over keys of `seq_len`, maybe `tuned`, without the launch."""
    efficiency = device.attention_efficiency
    if tuned and device.tuned_attention_efficiency is not None:
        efficiency = device.tuned_attention_efficiency
    busy_s = flops / (device.flops(dtype) * efficiency(seq_len))
    return max(busy_s, stream_seconds(device, nbytes))


@lru_cache(maxsize=65536)
def filling(device: Device, m: float, n: float, batch: float) -> float:
    """Part of the device that an m × n output (`batch` of them) keeps busy, in (0, 1]."""
    if not device.tiles:
        return 1.0
    most = _intensity(*device.tiles[0])
    best = 0.0
    for tile in device.tiles:
        worth = math.sqrt(min(1.0, _intensity(*tile) / most))
        for rows, columns in {tile, tile[::-1]}:
            tiles = math.ceil(m / rows) * math.ceil(n / columns) * math.ceil(batch)
            waves = math.ceil(tiles / device.compute_units)
            covered = waves * device.compute_units * rows * columns
            best = max(best, worth * m * n * batch / covered)
    return min(1.0, best)


def _intensity(rows: int, columns: int) -> float:
    return rows * columns / (rows + columns)
