"""Activations in host memory train as on one device, and lie where the plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.executor.stages.away_worker import CELLS, RESIDENT, WORLD
from tests.executor.trained_cells import planned
from tests.helpers.launching import Results, results_of
from tests.helpers.memory_pools import HOST, MemoryPools, PoolError
from tests.models.models import CASES
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import store

TOLERANCE = {"fp32": 1e-5, "bf16": 32 * 2**-8, "fp16": 32 * 2**-11}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("away")
    store(folder, [*CELLS, *RESIDENT])
    worker = Path(__file__).with_name("away_worker.py")
    return results_of(worker, folder, ranks=WORLD, timeout_s=400, name="")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_training_equals_one_device(cell: Cell, results: Results) -> None:
    found, tolerance = results[cell.name], TOLERANCE[cell.precision]
    assert found["names"] == []
    assert found["loss"] <= tolerance
    assert found["gradient"][0] <= tolerance, found["gradient"]
    assert found["state"][0] <= tolerance, found["state"]
    assert found["host"] > 0


@pytest.mark.parametrize("cell", RESIDENT, ids=lambda cell: cell.name)
def test_activations_lie_in_host_memory_as_priced_and_come_back(
    cell: Cell, results: Results
) -> None:
    found = results[cell.name]
    assert found["left"] == 0
    assert found["host"] == pytest.approx(found["priced"], rel=0.03)
    with_it, without = found["device"]
    assert without - with_it > 0.4 * found["host"] / WORLD


def _stepped(pools: MemoryPools, cell: Cell) -> None:
    """One step of a plan on one device, in this process."""
    with pools.crossing():
        result = planned(cell)
        result.train_step(CASES[cell.case].batch(cell.rows, 0))


def test_budgets_prove_where_activations_lie() -> None:
    """A step passes a budget of the device that it does not pass without; a host of too small a
    budget is an error."""
    cell, measured = Cell.parse("gpt2_deep dp1 m4 gpipe away100 rows32"), MemoryPools()
    _stepped(measured, cell)
    room = 1.02 * measured.peak["device"]
    _stepped(MemoryPools(device_bytes=room), cell)
    with pytest.raises(PoolError, match="device"):
        _stepped(MemoryPools(device_bytes=room), replace(cell, away=0))
    with pytest.raises(PoolError, match="host"):
        _stepped(MemoryPools(host_bytes=measured.peak[HOST] // 2), cell)
