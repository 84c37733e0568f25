"""Activations in host memory train as on one device, and lie where the plan says."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.executor.ranks import launch
from tests.executor.trained_cells import cells, planned
from tests.helpers.memory_pools import DEVICE, HOST, MemoryPools
from tests.helpers.ranks import on_ranks
from tests.models.models import CASES
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import assert_equal, compare, reference_of, runtime_loop

WORLD = 2
CELLS = cells(
    """
    llama dp2 m2 zero3 full away100
    gpt2_deep pp2 interleaved_1f1b m4 v2 away100
    gpt2_deep cp2 m2 full away70
    gpt2_deep pp2 zb_h1 m4 mixed away100
    gpt2_deep tp2 m2 sequence regather away100
    llama dp2 m2 zero2 bf16 selective host60 away100
    gpt2_deep dp2 m2 zero2 seg2 away50
    mlp dp2 m2 fp16 away100
    """,
    """
    gpt2_tied pp2 m4 away100
    llama pp2 m4 full away100
    gpt2_deep dp2 m2 zero1 away100
    gpt2_deep dp2 m2 zero3 mixed away60
    llama cp2 m2 away100
    """,
)
RESIDENT = cells(
    """
    gpt2_deep dp2 m4 gpipe away50 rows32
    """,
    """
    gpt2_deep pp2 m4 1f1b away100 rows32
    gpt2_deep dp2 m4 gpipe away100 rows32
    gpt2_deep dp2 m4 gpipe full away100 rows32
    gpt2_deep dp2 m2 pointwise away100 rows32
    """,
)


def apart(cell: Cell) -> dict[str, Any]:
    """Train a cell where both memories are told apart, compare on rank 0."""
    pools, of = MemoryPools(), plan_of(cell)
    with pools.crossing():
        found = runtime_loop(CASES[cell.case], *of)
    assert pools.peak[HOST] > 0
    norm = math.inf if cell.precision == "fp32" else 2
    return {} if launch.rank() else compare(found, reference_of(cell), norm)


@pytest.mark.parametrize("cell", CELLS)
def test_training_equals_one_device(cell: Cell) -> None:
    reference_of(cell)
    assert_equal(on_ranks(WORLD, apart, cell), cell.precision)


def stepped(cell: Cell) -> tuple[MemoryPools, float]:
    """What one step of a given plan has in either memory, and the price of the host's. What its
    planning leaves is let go before: how much of it lives on depends on the collector."""
    result, pools = planned(cell), MemoryPools()
    batch = CASES[cell.case].batch(cell.rows, 0)
    gc.collect()
    with pools.crossing():
        result.train_step(batch)
    return pools, sum(result.prediction.host_memory_bytes)


def resident(cell: Cell) -> None:
    """The most bytes in host memory, of all ranks, are those that are priced; the first rank's
    device has these less than where nothing goes there."""
    pools, priced = stepped(cell)
    without, _ = stepped(replace(cell, away=0))
    held: list[Any] = [0] * WORLD
    dist.all_gather_object(held, pools.peak[HOST])
    assert sum(held) == pytest.approx(priced, rel=0.03)
    less = without.peak[DEVICE] - pools.peak[DEVICE]
    assert launch.rank() or less > 0.4 * sum(held) / WORLD, (less, held)
    assert pools.live[HOST] == 0


@pytest.mark.parametrize("cell", RESIDENT)
def test_activations_lie_in_host_memory_as_priced_and_come_back(cell: Cell) -> None:
    plan_of(cell)
    on_ranks(WORLD, resident, cell)
