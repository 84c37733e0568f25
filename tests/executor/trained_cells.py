"""Cells of the parity matrix as several workers train them: by the runtime, and through the API."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright import Cluster, auto_parallelize
from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from tests.models.models import CASES
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import (
    compare,
    difference,
    load_graph,
    load_reference,
    runtime_loop,
)


def compared(folder: Path, cell: Cell) -> dict[str, Any]:
    """Train a cell on all ranks, compare on rank 0."""
    plan, of = plan_of(cell, load_graph(folder, cell))
    found = runtime_loop(CASES[cell.case], plan, of)
    if launch.rank():
        return {}
    norm = math.inf if cell.precision == "fp32" else 2
    return compare(found, load_reference(folder, cell), norm)


def planned(cell: Cell, folder: Path | None = None) -> ParallelModel:
    """A cell's plan, ready to run, of the graph that a folder has."""
    case = CASES[cell.case]
    plan, _ = plan_of(cell, None if folder is None else load_graph(folder, cell))
    return auto_parallelize(
        case.model(),
        Cluster.local(cell.world, measure=False),
        example_inputs=case.batch(cell.rows, 0),
        global_batch_size=cell.rows,
        loss_fn=case.loss_fn,
        precision="fp32",
        plan=plan,
        profile=False,
    )


def far_after_saves(
    folder: Path,
    saved: Cell,
    beside: Cell,
    look: Callable[[ParallelModel, torch.optim.Optimizer], None] = lambda *_: None,
) -> float:
    """How far the weights are of a run that goes on from checkpoints under another plan, and back,
    from those of one that keeps its plan; `look` at what each checkpoint left."""
    states: list[dict[str, torch.Tensor]] = []
    for cells in ((saved, saved, saved), (saved, beside, saved)):
        path: Path | None = None
        for step, cell in enumerate(cells):
            result = planned(cell, folder)
            optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
            if path is not None:
                result.load_checkpoint(path, optimizer)
                look(result, optimizer)
            optimizer.zero_grad()
            result.train_step(CASES[cell.case].batch(cell.rows, step))
            optimizer.step()
            path = folder / f"saved-{len(states)}-{step}"
            result.save_checkpoint(path, optimizer)
        states.append(result.full_state_dict())
    return difference(*states)[0]
