"""The cells of `test_recompute_runs.py` on one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.models.models import CASES, parallelize
from tests.parity.parity_cells import plan_of
from tests.parity.parity_checks import DROPOUT_SEED, train
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import load_graph
from tests.parity.parity_worker import run_cell
from tests.parity.recompute_cells import CELLS, DROPOUT


def dropout(folder: Path) -> dict[str, Any]:
    """Losses of a model that drops, kept and made again by segments."""
    found = {}
    for cell in DROPOUT:
        plan, of = plan_of(cell, load_graph(folder, cell))
        torch.manual_seed(0)
        model = CASES[cell.case].model()
        torch.manual_seed(DROPOUT_SEED)
        found[cell.name] = train(parallelize(model, plan, of), cell.case)
    return found


def main(folder: Path) -> None:
    work: dict[str, Any] = {cell.name: partial(run_cell, folder, cell) for cell in CELLS}
    run_all(work | {"dropout": partial(dropout, folder)}, folder, "recompute")


if __name__ == "__main__":
    on_ranks(main)
