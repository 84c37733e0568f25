"""Cells of the parity matrix as several folders train them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.runtime.runtime import Runtime
from meshwright.model import ParallelModel
from tests.helpers import tiny
from tests.helpers.tiers import tiered
from tests.models.models import CASES
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import built, difference


def cells(first: str, others: str, reason: str) -> list[Any]:
    """Parameters of a test: cells, one a line; `others` are of the second tier, for a reason."""
    chosen, rest = (list(map(Cell.parse, x.strip().splitlines())) for x in (first, others))
    return tiered([*chosen, *rest], chosen.__contains__, reason, lambda cell: cell.name)


def planned(cell: Cell) -> ParallelModel:
    """A cell's plan through the API, ready to run."""
    case = CASES[cell.case]
    return tiny.planned(
        case.model(), cell.world, example_inputs=case.batch(cell.rows, 0), loss_fn=case.loss_fn,
        global_batch_size=cell.rows, plan=plan_of(cell)[0], profile=False,
    )  # fmt: skip


def goes_on_after_saves(
    folder: Path,
    saved: Cell,
    beside: Cell,
    look: Callable[[Runtime, torch.optim.Optimizer], None] = lambda *_: None,
) -> None:
    """A run that goes on from checkpoints under another plan, and back, ends in the weights of one
    that keeps its plan; `look` at what each checkpoint left."""
    states: list[dict[str, torch.Tensor]] = []
    for run in ((saved, saved, saved), (saved, beside, saved)):
        path: Path | None = None
        for step, cell in enumerate(run):
            runtime = built(cell)
            optimizer = torch.optim.AdamW(runtime.parameters(), lr=1e-2)
            if path is not None:
                checkpoint.load(runtime, path, optimizer)
                look(runtime, optimizer)
            optimizer.zero_grad()
            runtime.train_step(CASES[cell.case].batch(cell.rows, step))
            optimizer.step()
            path = folder / f"saved-{len(states)}-{step}"
            checkpoint.save(runtime, path, optimizer)
        states.append(runtime.full_state_dict())
    assert difference(*states)[0] <= 1e-6
