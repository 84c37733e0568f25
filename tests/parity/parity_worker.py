"""The parity matrix on one rank: the cells of this world train three steps, compared with the
single device on rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.executor.ranks import launch
from tests.models.models import CASES
from tests.parity.context_cells import context_cells
from tests.parity.copies_cells import copies_cells
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_checks import CHECKS
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_matrix import cells_of
from tests.parity.parity_reference import compare, load_graph, load_reference, runtime_loop


def run_cell(folder: Path, cell: Cell) -> dict[str, Any]:
    """Train a cell on all ranks, compare on rank 0."""
    started = time.monotonic()
    plan, of = plan_of(cell, load_graph(folder, cell))
    found = runtime_loop(CASES[cell.case], plan, of)
    result: dict[str, Any] = {}
    if launch.rank() == 0:
        # in half precision single elements are noise, in fp32 they are not
        norm = math.inf if cell.precision == "fp32" else 2
        result = compare(found, load_reference(folder, cell), norm)
    return result | {"time_s": time.monotonic() - started}


def main(folder: Path, only: str = "") -> None:
    world = launch.world_size()
    work: dict[str, Callable[[], dict[str, Any]]] = {
        cell.name: partial(run_cell, folder, cell)
        for cell in (*cells_of(world), *context_cells(world), *copies_cells(world))
    }
    work |= {check.__name__: partial(check, folder) for check in CHECKS.get(world, ())}
    run_all({name: run for name, run in work.items() if only in name}, folder, f"{world}")


if __name__ == "__main__":
    on_ranks(main)
