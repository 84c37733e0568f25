"""The rows of a batch that a rank reads, and totals of micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.costmodel.sharding.data_axis import data_layout
from meshwright.executor.resharding.reshard import Axis
from meshwright.executor.stages.batches import Batches, Given
from meshwright.executor.stages.totals import TOGETHER
from tests.parity.parity_cells import Cell, plan_of


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
