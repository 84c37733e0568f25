"""Compiled blocks on one rank: the cells train three steps, compared with the single device on
rank 0; every transition compiled against the eager one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.sharding.strategies import RP, P, Placement, R
from meshwright.executor.ranks import launch
from meshwright.executor.resharding.reshard import MOVES, Axis, Reshard
from tests.models.models import CASES
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import compare, load_graph, load_reference, runtime_loop

BACKEND = "aot_eager"  # traces forward and backward as every backend gets them, and runs the result
WORLD = 4
CELLS = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_tied dp2xtp2 m2 sequence selective",
        "llama dp4 m2 zero3 full",
        "resnet dp2xtp2 m2",
        "mlp pp2xtp2 m4 zb_h1",
    )
)
SHAPE = (8, 16)
STATES = {
    "R": (R,), "Rp": (RP,), "P": (P,),
    "S": (Placement("S", 0), Placement("S", 1), Placement("S", 1, 2)),
}  # fmt: skip


def run_cell(folder: Path, cell: Cell) -> dict[str, Any]:
    """Train a cell's compiled plan on all ranks, compare on rank 0."""
    plan, of = plan_of(cell, load_graph(folder, cell))
    found = runtime_loop(CASES[cell.case], plan, of, compile=BACKEND)
    return compare(found, load_reference(folder, cell)) if launch.rank() == 0 else {}


def transitions(folder: Path) -> dict[str, Any]:
    """By transition, whether result and gradient are the eager ones, on every rank."""
    axis = Axis("tensor", WORLD, launch.rank(), dist.group.WORLD)
    found: dict[str, Any] = {}
    for kinds in MOVES:
        for source in STATES[kinds[0]]:
            for target in STATES[kinds[1]]:
                if source != target:
                    found[f"{source} -> {target}"] = _agrees(Reshard(source, target, axis))
    return found


def _agrees(module: Reshard) -> bool:
    torch._dynamo.reset()
    shape = list(SHAPE)
    if module.source.sharded:
        shape[module.source.dim] //= WORLD
    generator = torch.Generator().manual_seed(launch.rank())
    x = torch.randn(shape, generator=generator, requires_grad=True)
    results = []
    for run in (module, torch.compile(module, backend=BACKEND, fullgraph=True)):
        y = run(x)
        seed = torch.linspace(-1, 1, y.numel()).view_as(y) * (launch.rank() + 1)
        results.append((y.detach(), *torch.autograd.grad(y, x, seed)))
    # a sum over ranks may be made in another order
    mine = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, mine)
    return all(every)


def main(folder: Path) -> None:
    work: dict[str, Callable[[], dict[str, Any]]] = {
        cell.name: partial(run_cell, folder, cell) for cell in CELLS
    }
    run_all(work | {"transitions": partial(transitions, folder)}, folder, "-compiled")


if __name__ == "__main__":
    on_ranks(main)
