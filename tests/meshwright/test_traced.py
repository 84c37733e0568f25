"""A traced model at other numbers of rows: plain numbers made of how many they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.costmodel.graph import Graph
from meshwright.traced import TracedModel
from tests.helpers.tiers import second_tier, tiered

ROWS, BATCH = 2, 8


Function = Callable[[torch.Tensor], torch.Tensor]
COUNTED: dict[str, Function] = {
    "a factor": lambda y: y * (1 / len(y)),
    "a keyword": lambda y: torch.add(y, y, alpha=1 / len(y)),
    "a fill": lambda y: y * torch.full((5,), 1 / len(y)),
    "a constant": lambda y: y * torch.tensor([1 / len(y)] * 5),
    "the same in two": lambda y: y / (1 + len(y) // 8),
    "a branch": lambda y: y * (3 if len(y) > 4 else 2),
}


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x)).tanh()


def traced(function: Function, rows: int) -> TracedModel:
    example = torch.randn(rows, 6), torch.zeros(rows, dtype=torch.int64)
    return TracedModel(Net(function), example, functional.cross_entropy, "fp32")


def numbers(graph: Graph) -> list[object]:
    """Plain numbers of a graph's operators, and its constants."""
    ops = [op for op in (*graph.derived, *graph.ops) if op.short in ("add", "mul", "div", "full")]
    found = [x for op in ops for x in (*op.args, *op.kwargs.values()) if isinstance(x, float | int)]
    return [*found, *(x.tolist() for x in graph.constants.values())]


OTHER = second_tier("a sample of as many rows as the batch stays")


@pytest.mark.parametrize(
    "rows",
    [pytest.param(ROWS, marks=OTHER), BATCH, pytest.param(4, marks=OTHER)],
    ids=lambda rows: f"sample of {rows}",
)
@pytest.mark.parametrize(
    "name",
    tiered(
        COUNTED,
        ("a factor", "a constant", "a branch").__contains__,
        "an argument, a tensor and a branch stay",
    ),
)
def test_a_micro_batch_has_the_number_of_rows_of_the_batch(name: str, rows: int) -> None:
    model = traced(COUNTED[name], rows)
    graph, _ = model.in_microbatches(ROWS, BATCH)
    assert graph.batch_size == ROWS
    assert numbers(graph) == numbers(model.at(BATCH)[0]) != numbers(model.at(ROWS)[0])


def test_other_operators_at_other_rows_are_refused() -> None:
    model = traced(lambda y: 3 * y if len(y) > 4 else y, ROWS)
    with pytest.raises(ValueError, match=r"other operators on 2 rows than on 8.*num_microbatches"):
        model.in_microbatches(ROWS, BATCH)


def test_rows_that_are_counted_are_not_filled_up() -> None:
    assert traced(lambda y: y * 0.5, BATCH).run_use.filling == {"1": -100}
    assert traced(COUNTED["a factor"], BATCH).run_use.filling is None
