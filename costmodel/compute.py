"""Seconds of one operator on one device, by the roofline.

    time = max(flops / (peak * matmul_efficiency), bytes / (bandwidth * memory_efficiency)) + launch

The first term is for matrix products, convolutions and attention, which run on the matrix units at
the dtype's peak. Everything else streams its operands: its arithmetic hides under the memory
traffic, so only the bytes count.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from profiles.cluster import Device

FloatOrArray = TypeVar("FloatOrArray", float, NDArray[np.float64])


def op_time(
    device: Device, *, flops: FloatOrArray, bytes_moved: FloatOrArray, dtype: str, matmul: bool
) -> FloatOrArray:
    """Seconds of an operator of `flops` and `bytes_moved` (read plus written); scalars or arrays.

    `dtype` is "fp32", "bf16" or "fp16"; one the device has no rate for (bf16 on a V100) is priced
    at the fp32 rate, because that is how such a device computes it. Raises ValueError for another.
    """
    peak = device.flops(dtype) * device.matmul_efficiency
    memory_s = bytes_moved / (device.memory_bandwidth * device.memory_efficiency)
    busy_s = np.maximum(flops / peak, memory_s) if matmul else memory_s
    return busy_s + device.launch_overhead_s
