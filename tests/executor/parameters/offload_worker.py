"""Optimizer states in host memory on one rank: parity, residency, checkpoints, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from meshwright.executor.parameters import BlockWeights, clip_, reducer
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from tests.executor.trained_cells import compared, far_after_saves
from tests.helpers.memory_pools import DEVICE, HOST, MemoryPools, PoolError
from tests.models.models import CASES
from tests.parity.parity_cells import Cell
from tests.parity.parity_checks import build
from tests.parity.parity_launch import on_ranks, run_all

WORLD = 2
CELLS = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_untied dp2 m2 host100",
        "gpt2_tied dp2 m4 zero1 bf16 host50",
        "llama dp2 m2 zero2 full host60",
        "gpt2_deep dp2 m4 zero3 host50",
        "llama dp2 m2 zero3 bf16 host100",
        "mlp dp2 m2 zero2 fp16 host30",
        "gpt2_tied pp2 m4 zb_h1 front host100",
        "gpt2_deep tp2 m2 host40",
        "gpt2_deep pp2 interleaved_1f1b m4 v2 host70",
        "llama dp2 m1 zero1 bf16 host60",
        "gpt2_untied pp2 m4 bf16 mixed host100",
        "gpt2_deep dp2 m2 host100 weights100",
        "llama dp2 m2 zero2 bf16 mixed host100 weights60",
        "gpt2_tied pp2 m4 bf16 host80 weights80",
        "llama tp2 m2 zb_h1 full host100 weights100",
        "gpt2_deep pp2 interleaved_1f1b m4 v2 regather host100 weights70",
    )
)
ALONE = Cell.parse("gpt2_deep pp2 m2 host100")  # no rank adds to another's gradients
RESIDENT = {zero: Cell.parse(f"gpt2_deep dp2 m2 zero{zero} host100") for zero in (0, 1, 2, 3)}
AWAY = Cell.parse("gpt2_deep pp2 m2 host100 weights100")
LEFT = (ALONE, RESIDENT[2])
BESIDE = Cell.parse("gpt2_deep dp2 m2 zero2")  # the same without
SAVED = Cell.parse("gpt2_deep dp2 m2 zero2 host60")


def trained_in(
    pools: MemoryPools, folder: Path, cell: Cell
) -> tuple[Runtime, torch.optim.Optimizer]:
    """Two steps, counted from the building of the runtime on."""
    case = CASES[cell.case]
    with pools.crossing():
        runtime = build(folder, cell)
        own = [p for p in runtime.stage_parameters if p.offload]
        pools.place([p.stored for p in own if p.gathered], HOST)
        optimizer = torch.optim.AdamW(runtime.parameters(), lr=1e-3)
        for step in range(2):
            optimizer.zero_grad()
            runtime.train_step(case.batch(cell.rows, step))
            optimizer.step()
        for p in runtime.stage_parameters:
            states = [x for x in optimizer.state[p.api].values() if x.dim()]
            local = [getattr(x, "_local_tensor", x) for x in (*states, p.api.grad, p.stored)]
            wanted = {HOST} if p.offload else {"device"}
            assert {pools.pool_of(x) for x in local} == wanted, p.fqn
            assert p.gathered or pools.pool_of(p.leaf) == "device"
    return runtime, optimizer


def resident(folder: Path, zero: int) -> dict[str, Any]:
    """Bytes in host memory after a step, beside those of the states by their number."""
    pools = MemoryPools()
    runtime, _optimizer = trained_in(pools, folder, RESIDENT[zero])
    numel = sum(p.stored.numel() for p in runtime.stage_parameters if p.offload)
    return {"live": pools.live[HOST], "numel": numel, "device": pools.peak["device"]}


def left(folder: Path, cell: Cell) -> dict[str, Any]:
    """Bytes that a step's backwards leave on the device, beside those of what the optimizer reads;
    in buckets that are no larger than the model's."""
    case, pools = CASES[cell.case], MemoryPools()
    found: list[int] = []
    with (
        pools.crossing(),
        mock.patch.object(reducer, "BUCKET_BYTES", 2**14),
        mock.patch.object(reducer, "ALONE_BYTES", 2**14),
    ):
        runtime = build(folder, cell)
        finish = runtime._finish_gradients

        def counted() -> None:
            found.append(pools.live[DEVICE])
            finish()

        with mock.patch.object(runtime, "_finish_gradients", counted):
            batch = case.batch(cell.rows, 0)
            before = pools.live[DEVICE]
            runtime.train_step(batch)
    numel = sum(p.stored.numel() for p in runtime.stage_parameters if p.reached)
    return {"left": found[0] - before, "read": 4 * numel}


def away(folder: Path) -> dict[str, Any]:
    """Bytes of a device at the most with weights on it and in host memory, those of the weights, of
    two blocks of them, and which of them had memory in the steps, and after them."""
    peaks, had = [], []
    fetch = BlockWeights._fetch

    def counted(own: BlockWeights, block: str, *, waits: bool) -> None:
        fetch(own, block, waits=waits)
        members = (p.leaf for block in own.away.values() for p in block)
        had.append(sum(leaf.untyped_storage().nbytes() for leaf in members))

    for cell in (ALONE, AWAY):
        pools = MemoryPools()
        with mock.patch.object(BlockWeights, "_fetch", counted):
            runtime, _optimizer = trained_in(pools, folder, cell)
        peaks.append(pools.peak[DEVICE])
    (own,) = (gather.away for gather in runtime.gathers.values())
    assert own is not None
    sizes = sorted(4 * sum(p.leaf.numel() for p in block) for block in own.away.values())
    leaves = [p.leaf for p in runtime.stage_parameters if p.away]
    return {
        "peaks": peaks,
        "weights": sum(sizes),
        "two": sum(sizes[-2:]),
        "had": max(had),
        "left": sum(leaf.untyped_storage().nbytes() for leaf in leaves),
        "host": pools.live[HOST],
        "numel": sum(p.stored.numel() for p in runtime.stage_parameters if p.offload),
    }


def budget(folder: Path) -> dict[str, Any]:
    """With the states in host memory a step passes a budget of the device that it does not pass
    with them on the device; a host of too small a budget is an error."""
    measured = MemoryPools()
    trained_in(measured, folder, RESIDENT[2])
    room = measured.peak["device"] * 1.02
    trained_in(MemoryPools(device_bytes=room), folder, RESIDENT[2])
    refused = []
    for pools, cell in (
        (MemoryPools(device_bytes=room), BESIDE),
        (MemoryPools(host_bytes=measured.peak[HOST] // 2), RESIDENT[2]),
    ):
        try:
            trained_in(pools, folder, cell)
        except PoolError as error:
            refused.append(str(error).split(":")[0])
        launch.agree_on(lambda: None)
    return {"said": refused}


def checkpoint(folder: Path) -> dict[str, Any]:
    """A run goes on under a plan without host memory, and back, as it would have without a save."""
    return {"difference": far_after_saves(folder, SAVED, BESIDE)}


def clipped(folder: Path) -> dict[str, Any]:
    """The norm of all gradients, where some of them lie in host memory."""
    norms = []
    for cell in (BESIDE, SAVED):
        runtime = build(folder, cell)
        runtime.train_step(CASES[cell.case].batch(cell.rows, 0))
        norms.append(float(clip_(runtime.stage_parameters, runtime.place, 0.1)))
        norms.append(float(clip_(runtime.stage_parameters, runtime.place, math.inf)))
    return {"norms": norms}


def main(folder: Path) -> None:
    work: dict[str, Callable[[], dict[str, Any]]] = {
        cell.name: partial(compared, folder, cell) for cell in CELLS
    }
    work |= {f"resident{zero}": partial(resident, folder, zero) for zero in RESIDENT}
    work |= {f"left_{cell.name}": partial(left, folder, cell) for cell in LEFT}
    work |= {one.__name__: partial(one, folder) for one in (away, budget, checkpoint, clipped)}
    run_all(work, folder, "")


if __name__ == "__main__":
    on_ranks(main)
