"""Activations in host memory on one rank: parity, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from tests.executor.trained_cells import planned
from tests.helpers.memory_pools import HOST, MemoryPools
from tests.models.models import CASES
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import compare, load_graph, load_reference, runtime_loop

WORLD = 2
CELLS = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_tied pp2 m4 away100",
        "llama pp2 m4 full away100",
        "gpt2_deep dp2 m2 zero1 away100",
        "llama dp2 m2 zero3 full away100",
        "gpt2_deep dp2 m2 zero3 mixed away60",
        "llama cp2 m2 away100",
        "gpt2_deep cp2 m2 full away70",
        "gpt2_deep pp2 zb_h1 m4 mixed away100",
        "gpt2_deep pp2 interleaved_1f1b m4 v2 away100",
        "gpt2_deep tp2 m2 sequence regather away100",
        "gpt2_deep dp2 m2 zero2 seg2 away50",
        "llama dp2 m2 zero2 bf16 selective host60 away100",
        "mlp dp2 m2 fp16 away100",
    )
)

RESIDENT = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_deep dp2 m4 gpipe away100 rows32",
        "gpt2_deep dp2 m4 gpipe away50 rows32",
        "gpt2_deep dp2 m4 gpipe full away100 rows32",
        "gpt2_deep dp2 m2 pointwise away100 rows32",
        "gpt2_deep pp2 m4 1f1b away100 rows32",
    )
)


def run_cell(folder: Path, cell: Cell) -> dict[str, Any]:
    """Train a cell on all ranks, compare on rank 0."""
    plan, of = plan_of(cell, load_graph(folder, cell))
    pools = MemoryPools()
    with pools.crossing():
        found = runtime_loop(CASES[cell.case], plan, of)
    if launch.rank():
        return {}
    norm = math.inf if cell.precision == "fp32" else 2
    compared = compare(found, load_reference(folder, cell), norm)
    return compared | {"host": pools.peak[HOST], "left": pools.live[HOST]}


def _stepped(pools: MemoryPools, folder: Path, cell: Cell) -> ParallelModel:
    """One step of a given plan, counted from its planning on."""
    with pools.crossing():
        result = planned(cell, folder)
        result.train_step(CASES[cell.case].batch(cell.rows, 0))
    return result


def resident(folder: Path, cell: Cell) -> dict[str, Any]:
    """The most bytes in host memory, of all ranks, beside the price of them; on the first rank's
    device, beside what it takes with nothing in host memory."""
    pools, without = MemoryPools(), MemoryPools()
    result = _stepped(pools, folder, cell)
    _stepped(without, folder, replace(cell, away=0))
    held = [0] * WORLD
    dist.all_gather_object(held, pools.peak[HOST])
    (priced,) = result.prediction.host_memory_bytes
    device = pools.peak["device"], without.peak["device"]
    return {"host": sum(held), "priced": priced, "device": device, "left": pools.live[HOST]}


def main(folder: Path) -> None:
    work: dict[str, Callable[[], dict[str, Any]]] = {
        cell.name: partial(run_cell, folder, cell) for cell in CELLS
    }
    work |= {cell.name: partial(resident, folder, cell) for cell in RESIDENT}
    run_all(work, folder, "")


if __name__ == "__main__":
    on_ranks(main)
