"""Products in 8 bits under every kind of plan equal those of the single device, and learn as bf16.

Each rank scales what it has: the numbers are those of one scale for the whole tensor, but far below
its largest (`costmodel/fp8.py`). What differs from the single device is what differs in bf16, where
a sum that is rounded otherwise may fall to the other side of a rounding to 8 bits.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.helpers.launching import Results, results_of
from tests.parity.eight_bit_cells import CELLS
from tests.parity.eight_bits_worker import RANKS, SEEDS
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import store

TOLERANCE = 32 * 2**-8  # of the norm of a tensor, as of bf16
LOSS = 2**-8


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("eight_bits")
    store(folder, CELLS)
    worker = Path(__file__).with_name("eight_bits_worker.py")
    return results_of(worker, folder, ranks=RANKS, timeout_s=300, name="eight")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell_equals_single_device(launched: Results, cell: Cell) -> None:
    found = launched[cell.name]
    assert found["loss"] <= LOSS
    for what in ("gradient", "state"):
        error, where = found[what]
        assert error <= TOLERANCE, f"{what} of {where}: {error:.1e}"
    assert found["names"] == [], "names that only one of the two state dicts has"


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_a_run_learns_as_in_bf16_within_the_noise_of_seeds(
    launched: Results, precision: str
) -> None:
    wide, narrow = (launched[way]["losses"] for way in ("bf16", precision))
    assert len(wide) == len(narrow) == len(SEEDS)
    ends = [[statistics.fmean(losses[-5:]) for losses in runs] for runs in (wide, narrow)]
    assert all(end < losses[0] / 3 for end, losses in zip(ends[0], wide, strict=True))
    noise = max(ends[0]) - min(ends[0])
    assert abs(statistics.fmean(ends[0]) - statistics.fmean(ends[1])) < noise


def test_gradients_are_rounded(launched: Results) -> None:
    """By 3 bits of a mantissa, of gradients by 2 where scales are of tensors."""
    by_tensor, by_row = (launched[way]["gradient"] for way in ("fp8", "fp8_rowwise"))
    assert 0.01 < by_row < by_tensor < 0.2
