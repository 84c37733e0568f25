"""Seconds of one kernel: the roofline by hand, tiles and waves laid out one by one, monotone."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.kernels.compute import (
    attention_seconds,
    filling,
    matmul_seconds,
    stream_seconds,
)
from meshwright.profiles.cluster import Cluster, Device
from meshwright.profiles.hardware.curve import Curve

PLAIN = Device(
    name="toy", kind="cuda", memory_bytes=2**30, peak_flops={"fp32": 100.0, "fp16": 800.0},
    memory_bandwidth=20.0, matmul_efficiency=0.5, attention_efficiency=0.4, memory_efficiency=0.25,
    launch_overhead_s=0.125, reserved_bytes=0,
)  # fmt: skip
TILED = dataclasses.replace(PLAIN, compute_units=6, tiles=((8, 4), (4, 4), (2, 2)))
SIDES = st.integers(1, 40)
BATCHES = st.integers(1, 5)


@pytest.mark.parametrize(
    ("sides", "nbytes", "dtype", "seconds"),
    [
        ((10, 20, 10), 5.0, "fp16", 10.0),  # 4000 FLOPs / (800 * 0.5), above the ridge
        ((10, 20, 10), 5.0, "fp32", 80.0),  # 4000 / (100 * 0.5)
        ((10, 2, 10), 50.0, "fp16", 10.0),  # 50 / (20 * 0.25), below the ridge
        ((0, 2, 10), 0.0, "fp16", 0.0),
    ],
)
def test_products(sides: tuple[int, int, int], nbytes: float, dtype: str, seconds: float) -> None:
    assert matmul_seconds(PLAIN, dtype, *sides, 1, nbytes) == pytest.approx(seconds, rel=1e-12)
    m, n, k = sides
    assert matmul_seconds(PLAIN, dtype, m, n, k, 3, 3 * nbytes) == pytest.approx(3 * seconds)


def test_attention_takes_the_longer_and_unknown_dtypes_are_refused() -> None:
    assert attention_seconds(PLAIN, "fp16", 3200.0, 64, 1.0) == pytest.approx(3200 / (800 * 0.4))
    assert attention_seconds(PLAIN, "fp16", 3200.0, 64, 500.0) == pytest.approx(500 / (20 * 0.25))
    tuned = dataclasses.replace(PLAIN, tuned_attention_efficiency=Curve.constant(0.8))
    for device, flag, fraction in ((tuned, True, 0.8), (tuned, False, 0.4), (PLAIN, True, 0.4)):
        found = attention_seconds(device, "fp16", 3200.0, 64, 1.0, tuned=flag)
        assert found == pytest.approx(3200 / (800 * fraction))
    with pytest.raises(ValueError, match=r"dtype 'float16' is unknown; legal: bf16, fp16, fp32"):
        matmul_seconds(PLAIN, "float16", 1, 1, 1, 1, 1.0)


def test_efficiencies_are_read_at_the_size_of_the_work() -> None:
    """Products by the FLOPs of all of them, attention by its sequence, traffic by its bytes."""
    curve = Curve(points=((10.0, 0.4), (1000.0, 0.8)))
    device = dataclasses.replace(
        PLAIN, matmul_efficiency=curve, attention_efficiency=curve, memory_efficiency=curve
    )
    for size, fraction in ((10, 0.4), (1000, 0.8)):
        expected = pytest.approx(size / (800 * fraction))
        assert matmul_seconds(device, "fp16", size / 2, 1, 1, 1, 0.0) == expected
        assert matmul_seconds(device, "fp16", size / 10, 1, 1, 5, 0.0) == expected
        attended = attention_seconds(device, "fp16", 1e6, size, 0.0)
        assert attended == pytest.approx(1e6 / (800 * fraction))
        assert stream_seconds(device, size) == pytest.approx(size / (20 * fraction))
    assert stream_seconds(device, 0.0) == 0.0


def laid_out(device: Device, m: int, n: int, batch: int, tile: tuple[int, int]) -> float:
    """Part of the units' tile area in all waves that is output: tiles handed out one by one."""
    rows, columns = tile
    tiles = [*itertools.product(range(0, m, rows), range(0, n, columns), range(batch))]
    waves = math.ceil(len(tiles) / device.compute_units)
    return m * n * batch / (waves * device.compute_units * rows * columns)


@given(SIDES, SIDES, BATCHES)
def test_filling_is_that_of_the_best_tile(m: int, n: int, batch: int) -> None:
    """A tile of a × b reads a + b and computes ab for each step of k; less of that per byte costs
    by its root."""
    options = []
    for a, b in TILED.tiles:
        worth = math.sqrt(a * b / (a + b) / (8 * 4 / (8 + 4)))
        options += [worth * laid_out(TILED, m, n, batch, tile) for tile in ((a, b), (b, a))]
    assert filling(TILED, m, n, batch) == pytest.approx(max(options), rel=1e-12)
    assert filling(PLAIN, m, n, batch) == 1


def test_large_products_on_an_a100_are_near_what_is_published() -> None:
    """An 8192 x 12288 x 4096 fp16 product runs at 235 to 255 TFLOP/s on A100 SXM."""
    m, n, k = 8192, 12288, 4096
    device = Cluster.from_catalog("a100-80gb").device
    seconds = matmul_seconds(device, "fp16", m, n, k, 1, 2.0 * (m * k + k * n + m * n))
    assert 220e12 < 2.0 * m * n * k / seconds < 260e12


@pytest.mark.parametrize(
    ("k", "seconds"),
    [
        (1024, 65536 / (400 * 4 / 6) + 8 * 4 * 32 / 5),  # four parts of 256, on as many units
        (1023, 65472 / (400 * 2 / 6) + 8 * 2 * 32 / 5),  # a part less deep is not worth its start
        (511, 32704 / (400 / 6)),
    ],
)
def test_a_long_sum_is_cut_and_its_parts_added(k: int, seconds: float) -> None:
    """One tile of 8 x 4 for six units; sums of 32 elements are written and read in 4 bytes."""
    one = dataclasses.replace(TILED, tiles=((8, 4),))
    assert matmul_seconds(one, "fp16", 8, 4, k, 1, 0.0) == pytest.approx(seconds)
    # where adding costs more than the units gain nothing is cut
    slow = dataclasses.replace(one, memory_bandwidth=1e-3)
    assert matmul_seconds(slow, "fp16", 8, 4, k, 1, 0.0) == pytest.approx(64 * k / (400 / 6))
