"""The cells of `test_recompute_runs.py` on one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_worker import run_cell
from tests.parity.recompute_cells import CELLS


def main(folder: Path) -> None:
    run_all({cell.name: partial(run_cell, folder, cell) for cell in CELLS}, folder, "recompute")


if __name__ == "__main__":
    on_ranks(main)
