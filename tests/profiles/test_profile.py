"""What measurements say: the labels, affine truths met exactly, silence where nothing is known."""

import dataclasses
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.op_signature import OperandIndex, OpSignature
from meshwright.profiles.profile import (
    INTERPOLATED,
    MEASURED,
    Profile,
    is_device_of,
    load_profile,
    profile_of,
)
from meshwright.profiles.store import DeviceId, Measurements, Store
from meshwright.profiles.timings import Timing
from tests.profiles.test_store import HERE, collective

TWO = [OperandIndex(0), OperandIndex(1)]
SIZES = st.integers(1, 50)


def linear(rows: int, inputs: int = 8, outputs: int = 16, dtype: str = "float32") -> str:
    """Rows stand in one operand, the widths in two dims each."""
    operands = [(dtype, (rows, inputs), True), (dtype, (outputs, inputs), True)]
    return OpSignature.of_call("aten.linear.default", operands, TWO, {}).text


def add(rows: int, width: int) -> str:
    operands = [("float32", (rows, width), True)] * 2
    return OpSignature.of_call("aten.add.Tensor", operands, TWO, {}).text


def timing(forward_s: float, backward_s: float | None = None) -> Timing:
    backward_s = 2 * forward_s if backward_s is None else backward_s
    return Timing(forward_s=forward_s, backward_s=backward_s, repetitions=5, spread=0.0)


def knowing(operators: dict[str, Timing], slowdown: float = 1.0) -> Profile:
    found = Measurements(device=HERE, operators=operators, collectives=())
    return Profile(measurements=found, ranks=2, backend="gloo", slowdown=slowdown)


@given(SIZES, SIZES, SIZES, st.floats(1e-6, 1.0), st.floats(0.0, 1e-2))
def test_an_affine_truth_is_met(a: int, b: int, c: int, base: float, slope: float) -> None:
    """Seconds base + slope·rows, at rows between two measured ones, in both operands at once."""
    low, middle, high = a, a + b, a + b + c
    truth = {rows: base + slope * rows for rows in (low, middle, high)}
    profile = knowing({add(rows, 6): timing(truth[rows]) for rows in (low, high)})
    expected = pytest.approx(truth[middle])
    assert profile.op(add(middle, 6)) == (expected, pytest.approx(2 * truth[middle]), INTERPOLATED)


def test_the_nearest_neighbours_answer_slower_on_a_shared_core() -> None:
    profile = knowing({linear(r): timing(float(r * r)) for r in (1, 4, 6, 20)})
    found = profile.op(linear(5))
    assert found is not None
    assert found[0] == pytest.approx((16 + 36) / 2)
    profile = knowing({linear(4): timing(1.0, 3.0)}, slowdown=2.0)
    assert profile.op(linear(4)) == (2.0, 6.0, MEASURED)
    cores = os.cpu_count() or 1
    found = measured(HERE, 1.0)
    assert profile_of(host(cores), found).slowdown == 1.0
    assert profile_of(host(3 * cores), found).slowdown == 3.0


def test_nothing_is_said_of_what_is_not_known() -> None:
    """Beyond what was measured, of another width, dtype or operator."""
    profile = knowing({linear(4): timing(1.0), linear(8): timing(3.0)})
    beyond = (linear(2), linear(16), linear(5, inputs=9), linear(5, dtype="bfloat16"), add(5, 8))
    assert not any(map(profile.op, beyond))
    # twice the rows and four times the width lie on no line through one scaled size
    profile = knowing({linear(2, inputs=2): timing(1.0), linear(16, inputs=32): timing(3.0)})
    assert profile.op(linear(4, inputs=8)) is None

    def scaled(rows: int, factor: float) -> str:
        given = [OperandIndex(0), factor]
        return OpSignature.of_call("aten.mul.Tensor", [("float32", (rows,), True)], given, {}).text

    profile = knowing({scaled(2, 0.5): timing(1.0), scaled(8, 0.5): timing(2.0)})
    assert profile.op(scaled(4, 0.5)) is not None
    assert profile.op(scaled(4, 0.25)) is None


def curve(points: Iterable[tuple[int, float]], **changes: object) -> Measurements:
    made = [collective(n, s) for n, s in points]
    found = tuple(dataclasses.replace(each, **changes) for each in made)
    return Measurements(device=HERE, operators={}, collectives=found)


def asking(found: Measurements, **changes: object) -> Profile:
    return Profile(**{"measurements": found, "ranks": 2, "backend": "gloo", **changes})


POINTS = [(4096, 5.0), (1024, 2.0), (2048, 3.0)]


def test_a_message_between_two_measured_ones_and_beyond() -> None:
    """Latency below them, 2 s for each 2048 bytes more above."""
    ask = partial(asking(curve(POINTS)).collective, "all_reduce", size=2, per_node=2)
    for nbytes, seconds in ((1024, 2.0), (4096, 5.0)):
        assert ask(nbytes) == (seconds, MEASURED)
    for nbytes, seconds in ((1536, 2.5), (3072, 4.0), (0, 2.0), (1, 2.0), (8192, 9.0)):
        assert ask(nbytes) == (pytest.approx(seconds), INTERPOLATED)
    # A noisy one does not run backwards; a single point is latency below and bandwidth above
    for points, nbytes, seconds in (
        ([(1024, 2.0), (2048, 1.5)], 10**6, 1.5),
        ([(1024, 2.0)], 512, 2.0),
        ([(1024, 2.0)], 4096, 8.0),
    ):
        found = asking(curve(points)).collective("all_reduce", nbytes, 2, 2)
        assert found == (seconds, INTERPOLATED)


def test_other_groups_backends_and_worlds_are_not_known() -> None:
    for group in (("all_gather", 1024, 2, 2), ("all_reduce", 1024, 4, 4), ("all_reduce", 1, 2, 1)):
        assert asking(curve(POINTS)).collective(*group) is None
    for changes in ({"backend": "nccl"}, {"ranks": 4}):
        assert asking(curve(POINTS), **changes).collective("all_reduce", 1024, 2, 2) is None
        known = asking(curve(POINTS, **changes), **changes)
        assert known.collective("all_reduce", 1024, 2, 2) == (2.0, MEASURED)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def host(ranks: int) -> Cluster:
    return Cluster.local(ranks, "cpu", measure=False)


def measured(device: DeviceId, seconds: float) -> Measurements:
    return Measurements(device=device, operators={linear(4): timing(seconds)}, collectives=())


def test_a_cpus_profile_is_this_machines_own(store: Store) -> None:
    assert load_profile(host(2), store) is None
    assert not [*store.path.iterdir()]
    here = DeviceId.here("cpu")
    store.add(measured(dataclasses.replace(here, name="another"), 9.0))
    store.add(measured(dataclasses.replace(here, torch="1.0"), 9.0))
    assert load_profile(host(1), store) is None
    store.add(measured(here, 1.0))
    found = load_profile(host(1), store)
    assert found is not None and found.op(linear(4)) == (1.0, 2.0, MEASURED)


def test_a_cache_that_cannot_be_replaced_is_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.file_of(DeviceId.here("cpu")).write_bytes(b"no measurements, and somebody else's folder")

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    assert load_profile(host(2), store) is None
    assert "left alone" in caplog.text and str(store.path) in caplog.text


def test_a_gpus_profile_is_the_latest_of_that_gpu(store: Store) -> None:
    cluster = Cluster.from_catalog("h100-sxm")
    h100 = DeviceId(name="NVIDIA H100 80GB HBM3", driver="550", torch="2.11.0")
    store.add(measured(h100, 1.0))
    store.add(measured(dataclasses.replace(h100, torch="2.13.0"), 2.0))
    store.add(measured(dataclasses.replace(h100, name="NVIDIA A100-SXM4-80GB"), 3.0))
    found = load_profile(cluster, store)
    assert found is not None and found.op(linear(4)) == (2.0, 4.0, MEASURED)
    assert load_profile(Cluster.from_catalog("v100-32gb"), store) is None
    assert is_device_of(Cluster.from_catalog("h100-sxm"), "NVIDIA H100 80GB HBM3")
    assert not is_device_of(Cluster.from_catalog("a100-80gb"), "NVIDIA H100 80GB HBM3")
    assert not is_device_of(host(1), "NVIDIA H100 80GB HBM3")
