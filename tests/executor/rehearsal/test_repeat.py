"""Repetitions of micro-batches are what running them would have recorded."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from meshwright.executor.rehearsal import rank_log, repeat
from meshwright.executor.rehearsal.repeat import Repeats
from meshwright.executor.stages import PipelineRun
from tests.executor.rehearsal.rehearsal_runs import checked
from tests.helpers.tiers import tiered

# rows enough for eight or more micro-batches; the first or the last rank
FIRST = (("mlp pp2xdp2 dualpipe_v m8 zero2", 3), ("mlp pp2xdp2 1f1b m8 zero3 full", 0))
REPEATED = (
    *FIRST,
    ("llama pp2xdp2 1f1b m8 zero3 full", 0),
    ("gpt2_tied dp2xtp2 gpipe m8 mixed sequence", 0),
    ("gpt2_untied pp2xtp2 zb_h1 m8", 3),
    ("gpt2_tied pp2xdp2 1f1b m8 zero2", 0),
    ("gpt2_untied dp4 1f1b m4 zero3", 0),
    ("llama pp2xtp2 interleaved_1f1b m8 v2 full bare", 3),
    ("llama pp2xtp2 zb_v m8", 0),
    ("t5 pp4 1f1b m16", 0),
)
MORE = "the change tier has schedules of whole and of split backwards, with ZeRO-2 and ZeRO-3"


@pytest.mark.parametrize("of", tiered(REPEATED, FIRST.__contains__, MORE, lambda of: of[0]))
def test_repetitions_are_what_would_have_run(
    of: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, rank = of
    repeated: list[int] = []
    again = Repeats.again
    monkeypatch.setattr(Repeats, "again", lambda *a: repeated.append(1) or again(*a))
    short = checked(line).rank_log(rank)
    assert repeated
    repeated.clear()
    whole = checked(line).rank_log(rank, repeats=False)
    assert not repeated
    assert short.events == whole.events
    assert short == whole


def test_what_is_not_steady_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that differ are run, all of them; and where it is the backwards alone, the rank
    is rehearsed again without repetitions."""
    of = checked(FIRST[0][0])
    whole = of.rank_log(0, repeats=False)
    monkeypatch.setattr(repeat._Record, "like", lambda *_: False)
    assert of.rank_log(0) == whole
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
    assert of.rank_log(0) == whole
    assert raised


def test_an_evaluation_keeps_no_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PipelineRun] = []

    class Kept(PipelineRun):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(sys.modules[rank_log.__module__], "PipelineRun", Kept)
    for rank in (0, 2):
        checked("mlp pp2xdp2 1f1b m4").rank_log(rank, repeats=False)
    training, evaluation, *_ = made
    assert len(training.stream) > len(evaluation.stream)
    assert [run.passes for run in made] == [{}] * 4
