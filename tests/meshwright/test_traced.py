"""A traced model at other numbers of rows: plain numbers made of how many they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.traced import TracedModel

ROWS, BATCH = 2, 8


class Net(nn.Module):
    def __init__(self, scale: Callable[[int], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return (y * self.scale(len(x))).tanh()


def traced(scale: Callable[[int], float], rows: int) -> TracedModel:
    example = torch.randn(rows, 6), torch.zeros(rows, dtype=torch.int64)
    return TracedModel(Net(scale), example, functional.cross_entropy, "fp32")


@pytest.mark.parametrize("rows", [ROWS, BATCH, 4], ids=lambda rows: f"sample of {rows}")
def test_a_micro_batch_has_the_number_of_rows_of_the_batch(rows: int) -> None:
    graph, _ = traced(lambda count: 1 / count, rows).in_microbatches(ROWS, BATCH)
    assert graph.batch_size == ROWS
    assert [op.args[1] for op in graph.ops if op.short == "mul"] == [1 / BATCH]


def test_rows_that_are_counted_are_not_filled_up() -> None:
    assert traced(lambda count: 0.5, BATCH).run_use.filling == {"1": -100}
    assert traced(lambda count: 1 / count, BATCH).run_use.filling is None
