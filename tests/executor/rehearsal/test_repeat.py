"""Repetitions of micro-batches are what running them would have recorded."""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from meshwright.executor.rehearsal import RankLog, rank_log, repeat
from meshwright.executor.rehearsal.repeat import Repeats
from meshwright.executor.runtime import why_not_evaluable
from meshwright.executor.stages import CheckedPlan, PipelineRun
from tests.models.models import CASES, adamw
from tests.parity.parity_cells import Cell, plan_of

# rows enough for eight or more micro-batches
CELLS = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_tied    pp2xdp2    1f1b m8 zero2",
        "gpt2_tied    dp2xtp2    gpipe m8 mixed sequence",
        "gpt2_untied  dp4        1f1b m4 zero3",
        "gpt2_untied  pp2xtp2    zb_h1 m8",
        "llama        pp2xdp2    1f1b m8 zero3 full",
        "llama        pp2xtp2    interleaved_1f1b m8 v2 full bare",
        "llama        pp2xtp2    zb_v m8",
        "mlp          pp2xdp2    dualpipe_v m8 zero2",
        "t5           pp4        1f1b m16",
    )
)


def log_of(cell: Cell, rank: int, *, repeats: bool) -> RankLog:
    case = CASES[cell.case]
    plan, of = plan_of(cell)
    example = case.batch(cell.rows, 0)
    return rank_log(
        CheckedPlan.of(plan, of.graph, of.table),
        case.model(),
        lambda: pytree.tree_map(torch.empty_like, example),
        adamw,
        rank=rank,
        evaluates=not why_not_evaluable(of.graph),
        repeats=repeats,
    )


# the first or the last rank of each plan
@pytest.mark.parametrize(
    ("cell", "rank"),
    [*zip(CELLS, cycle((0, 3)), strict=False)],
    ids=lambda x: getattr(x, "name", x),
)
def test_repetitions_are_what_would_have_run(
    cell: Cell, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated: list[int] = []
    again = Repeats.again
    monkeypatch.setattr(Repeats, "again", lambda *a: repeated.append(1) or again(*a))
    short = log_of(cell, rank, repeats=True)
    assert repeated
    repeated.clear()
    whole = log_of(cell, rank, repeats=False)
    assert not repeated
    assert short.events == whole.events
    assert short == whole


def test_what_is_not_steady_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that differ are run, all of them; and where it is the backwards alone, the rank
    is rehearsed again without repetitions."""
    cell = CELLS[0]
    whole = log_of(cell, 0, repeats=False)
    monkeypatch.setattr(repeat._Record, "like", lambda *_: False)
    assert log_of(cell, 0, repeats=True) == whole
    forwards = repeat.FORWARD
    monkeypatch.setattr(
        Repeats, "known", lambda self, what: self.first[what] if what[1] in forwards else None
    )
    raised = []
    monkeypatch.setattr(
        repeat,
        "NotSteadyError",
        type("Raised", (repeat.NotSteadyError,), {"__init__": raised.append}),
    )
    assert log_of(cell, 0, repeats=True) == whole
    assert raised


def test_an_evaluation_keeps_no_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PipelineRun] = []

    class Kept(PipelineRun):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(sys.modules[rank_log.__module__], "PipelineRun", Kept)
    for rank in (0, 2):
        log_of(Cell.parse("mlp pp2xdp2 1f1b m4"), rank, repeats=False)
    training, evaluation, *_ = made
    assert len(training.stream) > len(evaluation.stream)
    assert [run.passes for run in made] == [{}] * 4
