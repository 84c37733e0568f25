"""Optimizer states in files train as on one device, and lie there and not in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executor.parameters.files_worker import BESIDE, CELLS, RESIDENT, SAVED, WORLD
from tests.helpers.launching import Results, results_of
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import store

TOLERANCE = {"fp32": 1e-5, "bf16": 32 * 2**-8, "fp16": 32 * 2**-11}
ADAM = 4 + 8  # bytes of an element in files: weight and moments
PAGE = 4096


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("files")
    store(folder, [*CELLS, *RESIDENT, SAVED, BESIDE])
    worker = Path(__file__).with_name("files_worker.py")
    return results_of(worker, folder, ranks=WORLD, timeout_s=300, name="")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_training_equals_one_device(cell: Cell, results: Results) -> None:
    found, tolerance = results[cell.name], TOLERANCE[cell.precision]
    assert found["names"] == []
    assert found["loss"] <= tolerance
    assert found["gradient"][0] <= tolerance, found["gradient"]
    assert found["state"][0] <= tolerance, found["state"]


@pytest.mark.parametrize("cell", RESIDENT, ids=lambda cell: cell.name)
def test_weights_and_moments_lie_in_files_and_not_in_memory(cell: Cell, results: Results) -> None:
    found = results[f"resident_{cell.name}"]
    assert found["whole"] and found["weights"] and all(found["states"])
    assert not any(found["gradients"])
    nbytes = ADAM * found["numel"]
    assert nbytes <= found["mapped"] <= nbytes + PAGE * found["files"]
    assert found["resident"] == 0


def test_states_of_other_optimizers_lie_there_too(results: Results) -> None:
    for states in results["others"].values():
        assert states and all(states)


def test_checkpoints_go_on_with_and_without_files(results: Results) -> None:
    found = results["checkpoint"]
    assert found["difference"] <= 1e-6
    assert found["loaded"] and all(found["loaded"])


def test_folders_that_will_not_do_are_named(results: Results) -> None:
    missing, unsaid = results["refused"]["said"]
    assert "MESHWRIGHT_NVME" in missing and "No such file" in missing
    assert "of which no folder is known" in unsaid
