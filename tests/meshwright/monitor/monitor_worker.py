"""One rank of a launch: metrics and logs of runs under several plans."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright import data_loader
from meshwright.executor.ranks import all_gather_object, gloo_group, launch
from meshwright.monitor import TensorBoardLogger
from meshwright.monitor.metrics import TELL_AFTER
from meshwright.shell import progress_shown
from tests.meshwright.data.feeding import ROWS, Tokens, batch_of, planned
from tests.parity.parity_launch import on_ranks, run_all

PLANS = ("dp4", "dp2×tp2", "pp4")
STEPS = TELL_AFTER + 1


class Said(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Writer:
    """What a writer of the user is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if name == "meshwright/loss":
            self.steps.append(step)

    def flush(self) -> None:
        pass


def run(plan: str, folder: Path) -> dict[str, Any]:
    """Of every rank its metrics, what it wrote and said; of rank 0 the log."""
    result, board, said = planned(plan), Writer(), Said()
    logging.getLogger("meshwright.monitor").addHandler(said)
    logging.getLogger("meshwright.monitor").setLevel(logging.INFO)
    own = folder / plan / f"{launch.rank()}.jsonl"
    result.log_to(own)
    result.log_to(TensorBoardLogger(board), every=10)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    batch = batch_of(range(ROWS))
    for step in range(STEPS):
        optimizer.zero_grad()
        result.train_step(batch)
        if step == 2 and launch.rank() == 0:
            result.metrics()  # alone
        if step == 3:
            result.metrics(grad_norm=True)
        optimizer.step()
    found = result.metrics()
    result.monitor.close()
    logging.getLogger("meshwright.monitor").removeHandler(said)
    logged = [json.loads(line) for line in own.read_text().splitlines()] if own.exists() else []
    told = result.monitor.told
    seen = {
        "metrics": found,
        "logged": logged,
        "board": board.steps,
        "said": said.lines,
        "told": str(told),
    }
    return {"ranks": all_gather_object(gloo_group(), seen)}


def fed() -> dict[str, Any]:
    """Metrics of steps whose rows a loader of each rank gives."""
    result = planned("dp2×tp2")
    found = []
    for batch in data_loader(Tokens(size=2 * ROWS), result, shuffle=False):
        result.train_step(batch, local=True)
        found.append(result.metrics())
    return {"ranks": all_gather_object(gloo_group(), found)}


def moved(folder: Path) -> dict[str, Any]:
    """Progress, and whose, while a checkpoint is saved and loaded; the step after it."""
    result, said = planned("dp4"), Said()
    progress = logging.getLogger("meshwright.progress")
    progress.addHandler(said)
    progress.setLevel(logging.DEBUG)
    batch = batch_of(range(ROWS))
    for _ in range(3):
        result.train_step(batch)
    result.save_checkpoint(folder / "checkpoint")
    other = planned("pp4")
    other.load_checkpoint(folder / "checkpoint")
    progress.removeHandler(said)
    with progress_shown():
        other.load_weights(folder / "checkpoint")
    other.train_step(batch)
    seen = {"said": said.lines, "step": other.metrics()["step"]}
    return {"ranks": all_gather_object(gloo_group(), seen)}


def main(folder: Path) -> None:
    runs: dict[str, Any] = {plan: partial(run, plan, folder) for plan in PLANS}
    run_all({**runs, "fed": fed, "moved": partial(moved, folder)}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
