"""Activations in host memory train as on one device, and lie where the plan says. The rows that a
rank reads, and totals of micro-batches."""

import gc
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.costmodel.sharding.data_axis import data_layout
from meshwright.executor.ranks import launch
from meshwright.executor.resharding.reshard import Axis
from meshwright.executor.stages.batches import Batches, Given
from meshwright.executor.stages.lowered import TOGETHER
from tests.executor.trained_cells import cells, planned
from tests.helpers.memory_pools import DEVICE, HOST, MemoryPools
from tests.helpers.ranks import on_ranks
from tests.models.models import CASES
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import assert_equal, compare, reference_of, runtime_loop

WORLD = 2
CELLS = cells(
    """
    gpt2_deep pp2 interleaved_1f1b m4 v2 away100
    gpt2_deep pp2 zb_h1 m4 mixed away100
    mlp dp2 m2 fp16 away100
    """,
    """
    llama dp2 m2 zero3 full away100
    gpt2_deep cp2 m2 full away70
    gpt2_deep tp2 m2 sequence regather away100
    llama dp2 m2 zero2 bf16 selective host60 away100
    gpt2_deep dp2 m2 zero2 seg2 away50
    gpt2_tied pp2 m4 away100
    llama pp2 m4 full away100
    gpt2_deep dp2 m2 zero1 away100
    gpt2_deep dp2 m2 zero3 mixed away60
    llama cp2 m2 away100
    """,
    "whole and split backwards of pipelines, recompute and data ranks are kept",
)
RESIDENT = cells(
    "",
    """
    gpt2_deep dp2 m4 gpipe away50 rows32
    gpt2_deep pp2 m4 1f1b away100 rows32
    gpt2_deep dp2 m4 gpipe away100 rows32
    gpt2_deep dp2 m4 gpipe full away100 rows32
    gpt2_deep dp2 m2 pointwise away100 rows32
    """,
    "activations that come back between two memories are kept, not what they weigh",
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


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_every_microbatch(rank: int) -> None:
    """Of sixteen rows in four micro-batches two of four each; a local batch has them already."""
    plan, of = plan_of(Cell.parse("mlp dp2 m4"))
    place: Any = SimpleNamespace(rows=Axis("rows", 2, rank), device=torch.device("cpu"))
    batches = Batches(plan, of.graph, place)
    own = [4 * part + 2 * rank + row for part in range(4) for row in range(2)]
    assert list(batches.share) == own
    assert list(batches.share_of(12)) == own[:6]  # in three micro-batches
    x = torch.arange(16.0)[:, None].expand(16, 32)
    tensors = batches.checked((x, x + 0.5))
    layout = data_layout(of.graph, of.table, 2)
    for given in (Given(tensors, False), Given({n: t[own] for n, t in tensors.items()}, True)):
        assert batches.shape(given) == batches.planned
        parts = batches.rows(given, layout, set(tensors))
        for k, part in enumerate(parts):
            assert [t[:, 0].tolist() for t in part.values()] == [
                [4 * k + 2 * rank + n + extra for n in range(2)] for extra in (0, 0.5)
            ]


def test_totals_of_microbatches_are_put_together() -> None:
    parts = [torch.tensor([1.0, 8.0]), torch.tensor([3.0, 2.0]), torch.tensor([5.0, 5.0])]
    found = {kind: join(parts).tolist() for kind, join in TOGETHER.items()}
    assert found == {"sum": [9, 15], "mean": [3, 5], "max": [5, 8], "min": [1, 2]}
