"""Optimizer states in files on one rank: parity, residency, checkpoints, folders that won't do."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.errors import StateError
from meshwright.executor.parameters import local_of
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.states_in_files import FOLDER_VARIABLE, lies_in_file
from meshwright.model import ParallelModel
from tests.executor.trained_cells import compared, far_after_saves
from tests.models.models import CASES
from tests.parity.parity_cells import Cell
from tests.parity.parity_checks import build
from tests.parity.parity_launch import on_ranks, run_all

WORLD = 2
CELLS = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_untied dp2 m2 host100 nvme100",
        "gpt2_tied dp2 m4 zero1 bf16 host80 nvme50",
        "llama dp2 m2 zero2 full host100 nvme60",
        "mlp dp2 m2 zero2 fp16 host100 nvme50",
        "gpt2_tied pp2 m4 zb_h1 front host100 nvme40",
        "gpt2_deep tp2 m2 host100 nvme70",
        "gpt2_deep dp2 m2 bf16 host100 weights100 nvme100",
        "gpt2_deep dp2 m2 full host100 weights60 nvme100",
        "gpt2_tied dp2 m2 zero2 host100 weights100 nvme50",
    )
)
RESIDENT = tuple(Cell.parse(f"gpt2_deep dp2 m2 zero{zero} host100 nvme100") for zero in (0, 1, 2))
SAVED = Cell.parse("gpt2_deep dp2 m2 zero2 host100 nvme60")
BESIDE = Cell.parse("gpt2_deep dp2 m2 zero2")  # the same without


def _mappings() -> dict[int, tuple[int, int]]:
    """Bytes of each mapping of a file of states, and those of them in memory, by its address."""
    found: dict[int, tuple[int, int]] = {}
    start, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start = int(words[0].split("-")[0], 16) if "meshwright-states-" in line else 0
        elif start and words[0] == "Size:":
            size = 1024 * int(words[1])
        elif start and words[0] == "Rss:":
            found[start] = size, 1024 * int(words[1])
    return found


def resident(folder: Path, cell: Cell) -> dict[str, Any]:
    """What lies in files after two steps, and how much of it in memory."""
    runtime, optimizer = _trained(folder, cell)
    own = [p for p in runtime.stage_parameters if p.in_file]
    states = [x for p in own for x in optimizer.state[p.api].values() if x.dim()]
    there = _mappings()
    at = [local_of(x.detach()).data_ptr() for x in (*(p.api for p in own), *states)]
    return {
        "mapped": sum(there[address][0] for address in at),
        "resident": sum(there[address][1] for address in at),
        "numel": sum(p.stored.numel() for p in own),
        "files": 3 * len(own),
        "whole": len(own) == len([p for p in runtime.stage_parameters if p.trainable]),
        "weights": all(lies_in_file(p.api) for p in own),
        "states": [lies_in_file(x) for x in states],
        "gradients": [lies_in_file(p.api.grad) for p in own],
    }


def _trained(folder: Path, cell: Cell) -> tuple[Runtime, torch.optim.Optimizer]:
    case, runtime = CASES[cell.case], build(folder, cell)
    optimizer = torch.optim.AdamW(runtime.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        runtime.train_step(case.batch(cell.rows, step))
        optimizer.step()
    return runtime, optimizer


def others(folder: Path) -> dict[str, Any]:
    """Optimizers that make their states of gradients have them in files after a step."""
    case, found = CASES[SAVED.case], {}
    for make in (
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.AdamW, foreach=True),
    ):
        runtime = build(folder, SAVED)
        optimizer = make(runtime.parameters(), lr=1e-3)
        runtime.train_step(case.batch(SAVED.rows, 0))
        optimizer.step()
        own = [p.api for p in runtime.stage_parameters if p.in_file]
        states = [x for p in own for x in optimizer.state[p].values()]
        found[str(make.keywords)] = [lies_in_file(x) for x in states if x.dim()]
    return found


def checkpoint(folder: Path) -> dict[str, Any]:
    """A run goes on under a plan without files, and back, as it would have without a save."""
    loaded: list[bool] = []

    def look(result: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
        own = [p for p in result.parameters() if lies_in_file(p)]
        moments = [x for p in own for x in optimizer.state[p].values() if x.dim()]
        loaded.extend(map(lies_in_file, moments))

    return {"difference": far_after_saves(folder, SAVED, BESIDE, look), "loaded": loaded}


def refused(folder: Path) -> dict[str, Any]:
    """Folders that are none, aren't there, or are not said."""
    said = []
    for name in (str(folder / "nowhere"), ""):
        given = os.environ[FOLDER_VARIABLE]
        os.environ[FOLDER_VARIABLE] = name
        try:
            build(folder, SAVED)
        except StateError as error:
            said.append(str(error))
        finally:
            os.environ[FOLDER_VARIABLE] = given
    return {"said": said}


def main(folder: Path) -> None:
    flash = folder / "flash"
    flash.mkdir(exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(flash)
    work: dict[str, Callable[[], dict[str, Any]]] = {
        cell.name: partial(compared, folder, cell) for cell in CELLS
    }
    work |= {f"resident_{cell.name}": partial(resident, folder, cell) for cell in RESIDENT}
    work |= {one.__name__: partial(one, folder) for one in (others, checkpoint, refused)}
    run_all(work, folder, "")


if __name__ == "__main__":
    on_ranks(main)
