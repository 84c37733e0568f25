"""The roofline: closed forms, both sides of the ridge, arrays as scalars, monotone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.compute import op_time
from profiles.cluster import Cluster, Device

DEVICE = Device(
    name="toy",
    kind="cuda",
    memory_bytes=2**30,
    peak_flops={"fp32": 100.0, "fp16": 800.0},
    memory_bandwidth=20.0,
    matmul_efficiency=0.5,
    memory_efficiency=0.25,
    launch_overhead_s=0.125,
    reserved_bytes=0,
)
AMOUNTS = st.floats(min_value=0, max_value=1e18)


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "dtype", "matmul", "time_s"),
    [
        (4000.0, 5.0, "fp16", True, 10.125),  # 4000 / (800 * 0.5), above the ridge
        (4000.0, 5.0, "fp32", True, 80.125),  # 4000 / (100 * 0.5)
        (4000.0, 5.0, "bf16", True, 80.125),  # no bf16 units: the fp32 rate
        (400.0, 50.0, "fp16", True, 10.125),  # 50 / (20 * 0.25), below the ridge
        (4000.0, 5.0, "fp16", False, 1.125),  # vector work counts bytes only
        (0.0, 0.0, "fp32", True, 0.125),  # a launch is never free
    ],
)
def test_closed_form(
    flops: float, bytes_moved: float, dtype: str, matmul: bool, time_s: float
) -> None:
    assert op_time(
        DEVICE, flops=flops, bytes_moved=bytes_moved, dtype=dtype, matmul=matmul
    ) == pytest.approx(time_s, rel=1e-12)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown dtype 'float16': .*legal: bf16, fp16, fp32"):
        op_time(DEVICE, flops=1.0, bytes_moved=1.0, dtype="float16", matmul=True)


@pytest.mark.parametrize("matmul", [True, False])
def test_arrays_equal_scalars(matmul: bool) -> None:
    flops = np.array([0.0, 10.0, 1e6])
    bytes_moved = np.array([4.0, 1e5, 3.0])
    times = op_time(DEVICE, flops=flops, bytes_moved=bytes_moved, dtype="fp16", matmul=matmul)
    assert times.tolist() == [
        op_time(DEVICE, flops=f, bytes_moved=b, dtype="fp16", matmul=matmul)
        for f, b in zip(flops.tolist(), bytes_moved.tolist(), strict=True)
    ]


@given(flops=AMOUNTS, bytes_moved=AMOUNTS, more=AMOUNTS, matmul=st.booleans())
def test_more_work_never_takes_less(
    flops: float, bytes_moved: float, more: float, matmul: bool
) -> None:
    def time(flops: float, bytes_moved: float) -> float:
        return op_time(DEVICE, flops=flops, bytes_moved=bytes_moved, dtype="fp16", matmul=matmul)

    assert time(flops + more, bytes_moved) >= time(flops, bytes_moved)
    assert time(flops, bytes_moved + more) >= time(flops, bytes_moved)


def test_large_matmul_on_an_a100_is_near_what_is_published() -> None:
    """A 4096 x 12288 x 4096 fp16 product runs at 235 to 255 TFLOP/s on A100 SXM."""
    m, n, k = 8192, 12288, 4096
    flops, bytes_moved = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
    device = Cluster.from_catalog("a100-80gb").device
    time_s = op_time(device, flops=flops, bytes_moved=bytes_moved, dtype="fp16", matmul=True)
    assert 220e12 < flops / time_s < 260e12
