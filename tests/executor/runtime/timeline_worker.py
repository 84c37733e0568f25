"""Measured timelines on one rank: each cell trains through the API, one of its steps timed.

The clock of rank 1 is wrong by `CLOCK_S`, as the clocks of two hosts are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from tests.executor.trained_cells import planned
from tests.models.models import CASES
from tests.parity.parity_cells import Cell
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import difference

WORLD = 2
CLOCK_S = 1e4
CELLS = tuple(
    Cell.parse(line) for line in ("mlp pp2 zb_h1 m4", "mlp pp2 zb_v m4", "mlp dp2 m2 zero1")
)


def run_cell(folder: Path, cell: Cell) -> dict[str, Any]:
    """Time a step on the example inputs, after one that is not timed, and repeat it untimed; the
    traces go to files."""
    result = planned(cell, folder)
    batch = CASES[cell.case].batch(cell.rows, 0)
    result.train_step(batch)
    _zero_grad(result)
    timed = result.timeline(folder / f"{cell.name}.measured")
    gradients = result.runtime.full_gradients()
    _zero_grad(result)
    loss = float(result.train_step(batch))
    if launch.rank() == 0:
        result.report.trace(folder / f"{cell.name}.simulated")
    return {
        "losses": [float(timed.loss), loss],
        "gradient": difference(gradients, result.runtime.full_gradients()),
        "steps": result.runtime.steps,
        "step_s": timed.measured.step_s,
        "bubbles": timed.measured.bubbles,
        "predicted": timed.predicted.bubbles,
        "text": str(timed),
    }


def _zero_grad(result: ParallelModel) -> None:
    for parameter in result.parameters():
        parameter.grad = None


def unwritable(folder: Path) -> dict[str, Any]:
    """What every rank is told where the file can't be written, and how many steps were made."""
    result = planned(CELLS[0], folder)
    try:
        result.timeline(folder / "missing" / "trace.json")
    except OSError as error:
        return {"error": str(error), "steps": result.runtime.steps}
    return {}


def main(folder: Path) -> None:
    if launch.rank() == 1:
        right = time.perf_counter
        time.perf_counter = lambda: right() + CLOCK_S
    work: dict[str, Callable[[], dict[str, Any]]] = {
        cell.name: partial(run_cell, folder, cell) for cell in CELLS
    }
    run_all(work | {"unwritable": partial(unwritable, folder)}, folder, "-timeline")


if __name__ == "__main__":
    on_ranks(main)
