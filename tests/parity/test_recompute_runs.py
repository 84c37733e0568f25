"""What is made again in ways that the parity matrix doesn't have equals the single device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import Results, results_of
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import STEPS, store
from tests.parity.recompute_cells import CELLS, DROPOUT
from tests.parity.test_parity import TOLERANCE


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("recompute")
    store(folder, [*CELLS, *DROPOUT])
    worker = Path(__file__).with_name("recompute_worker.py")
    return results_of(worker, folder, ranks=4, timeout_s=300, name="recompute")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell_equals_single_device(launched: Results, cell: Cell) -> None:
    found, tolerance = launched[cell.name], TOLERANCE[cell.precision]
    assert found["loss"] <= tolerance
    error, where = found["gradient"]
    assert error <= tolerance, f"gradient of {where}: {error:.1e}"
    error, where = found["state"]
    assert error <= tolerance, f"{where} after {STEPS} steps: {error:.1e}"
    assert found["names"] == [], "names that only one of the two state dicts has"


def test_segments_draw_the_same_masks(launched: Results) -> None:
    kept, again = (launched["dropout"][cell.name] for cell in DROPOUT)
    assert kept == pytest.approx(again, rel=1e-6)
    assert len(set(kept)) > 1
