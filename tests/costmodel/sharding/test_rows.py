"""What becomes of rows on the way to the loss: known operator by operator."""

import pytest
import torch
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import analyse
from meshwright.costmodel.sharding.rows import RowUse, row_use, with_numbers_of
from meshwright.planner.tracing.trace import trace
from tests.helpers.row_losses import EXACT, LENGTH, MEET, ROWS, WIDTH, Loss
from tests.helpers.tiers import tiered
from tests.helpers.traced import with_forward


def graph_of(loss: Loss, rows: int = ROWS, **norm: nn.Module) -> Graph:
    """The loss of y[b, s, w], a linear map of the input, of the mask [b, s] and the classes."""
    batch = (
        torch.randn(ROWS, LENGTH, WIDTH),
        torch.ones(ROWS, LENGTH, dtype=torch.bool),
        torch.zeros(ROWS, LENGTH, dtype=torch.int64),
    )
    parts = {"map": nn.Linear(WIDTH, WIDTH), "norm": nn.Identity(), **norm}
    model = with_forward(lambda self, x, *rest: loss(self.norm(self.map(x)), *rest), **parts)
    return trace(model, batch, batch_size=rows)


def use_of(loss: Loss, **norm: nn.Module) -> RowUse:
    graph = graph_of(loss, **norm)
    return row_use(graph, analyse(graph))


APART = (
    "cross-entropy", "masked mean", "several", "row by row", "last token", "attention",
    "renormed rows",
)  # fmt: skip
MEETING = (
    "dice",
    "load balancing",
    "a bit",
    "halves",
    "scan over rows",
    "the first row",
    "variance",
)
FEW = "some of either kind stay, and labels by threshold"


@pytest.mark.parametrize("name", tiered(EXACT, APART.__contains__, FEW))
def test_rows_stay_apart(name: str) -> None:
    assert use_of(EXACT[name]).meetings == ()


@pytest.mark.parametrize("name", tiered(MEET, MEETING.__contains__, FEW))
def test_rows_meet(name: str) -> None:
    loss, short = MEET[name]
    meetings = use_of(loss).meetings
    assert [m.target.split(".")[1] for m in meetings][:1] == [short]
    assert ".py:" in meetings[0].source


def test_rows_that_decide_the_course_meet() -> None:
    """Each part of them might take another one."""
    assert use_of(lambda y, m, t: y.mean() if m.all() else y.sum()).meetings
    assert use_of(lambda y, m, t: y.square().mean()).meetings == ()


def test_sums_totals_and_numbers_of_the_batch() -> None:
    found = use_of(EXACT["masked mean, at least 1"])
    assert len(found.sums) == 1 and list(found.totals.values()) == ["sum"]
    assert use_of(EXACT["mean"]) == RowUse()
    assert use_of(EXACT["cross-entropy"]) == RowUse(filling={"2": -100})
    assert list(use_of(EXACT["scaled by the longest"]).totals.values()) == ["max"]
    assert use_of(EXACT["by the batch's rows"]).numbers

    normed = use_of(lambda y, mask, labels: y.square().mean(), norm=nn.BatchNorm1d(LENGTH))
    assert normed.meetings == ()
    loss = EXACT["by the batch's rows"]
    graph = with_numbers_of(graph_of(loss), graph_of(loss, rows=12))
    assert [op.args[1] for op in graph.ops if op.short == "div"] == [12]
    assert graph.batch_size == ROWS
