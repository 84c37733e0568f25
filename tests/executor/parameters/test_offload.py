"""Optimizer states in host memory train as on one device, and lie where the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executor.parameters.offload_worker import (
    ALONE,
    AWAY,
    BESIDE,
    CELLS,
    LEFT,
    RESIDENT,
    SAVED,
    WORLD,
)
from tests.helpers.launching import Results, results_of
from tests.parity.parity_reference import store

TOLERANCE = {"fp32": 1e-5, "bf16": 32 * 2**-8, "fp16": 32 * 2**-11}
ADAM = 4 + 4 + 8  # bytes of an element in host memory: weight, gradient, moments


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("offload")
    store(folder, [*CELLS, *RESIDENT.values(), ALONE, AWAY, SAVED, BESIDE])
    worker = Path(__file__).with_name("offload_worker.py")
    return results_of(worker, folder, ranks=WORLD, timeout_s=400, name="")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_training_equals_one_device(cell: object, results: Results) -> None:
    found, tolerance = results[cell.name], TOLERANCE[cell.precision]  # type: ignore[attr-defined]
    assert found["names"] == []
    assert found["loss"] <= tolerance
    assert found["gradient"][0] <= tolerance, found["gradient"]
    assert found["state"][0] <= tolerance, found["state"]


@pytest.mark.parametrize("zero", RESIDENT)
def test_states_lie_in_host_memory_and_nothing_else(zero: int, results: Results) -> None:
    found = results[f"resident{zero}"]
    assert found["live"] == ADAM * found["numel"]


def test_zero_divides_what_lies_in_host_memory(results: Results) -> None:
    whole, *parts = (results[f"resident{zero}"]["numel"] for zero in (0, 1, 2, 3))
    assert all(part < 0.52 * whole for part in parts)


@pytest.mark.parametrize("cell", LEFT, ids=lambda cell: cell.name)
def test_gradients_leave_the_device_as_they_are_made(cell: object, results: Results) -> None:
    """But for those on their way."""
    found = results[f"left_{cell.name}"]  # type: ignore[attr-defined]
    assert found["left"] < 0.55 * found["read"]


def test_weights_lie_on_the_device_while_their_block_runs_alone(results: Results) -> None:
    found = results["away"]
    beside, there = found["peaks"]
    assert found["left"] == 0
    assert 0 < found["had"] <= found["two"] < 0.8 * found["weights"]
    assert beside - there > 0.3 * found["weights"]
    assert found["host"] == ADAM * found["numel"]  # in fp32 the optimizer's are what is read


def test_budgets_prove_where_states_lie(results: Results) -> None:
    assert results["budget"]["said"] == ["device", "host"]


def test_checkpoints_go_on_with_and_without_host_memory(results: Results) -> None:
    assert results["checkpoint"]["difference"] <= 1e-6


def test_norms_count_gradients_of_both_memories(results: Results) -> None:
    alone, clipped, ours, ours_clipped = results["clipped"]["norms"]
    assert ours == pytest.approx(alone, rel=1e-5)
    assert ours_clipped == pytest.approx(clipped, rel=1e-5) == pytest.approx(0.1, rel=1e-3)
