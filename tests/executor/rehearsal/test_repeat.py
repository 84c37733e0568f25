"""Work that is saved: repetitions of micro-batches are what running them would have recorded, and
ranks are shared out over processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.executor.rehearsal import RankLog, rank_log, repeat, workers
from meshwright.executor.rehearsal.repeat import Repeats
from meshwright.executor.stages import PipelineRun
from tests.executor.rehearsal.rehearsal_runs import checked
from tests.helpers.tiers import tiered

# rows enough for eight or more micro-batches; the first or the last rank
FIRST = (("mlp pp2xdp2 dualpipe_v m8 zero2", 3), ("mlp pp2xdp2 1f1b m8 zero3 full", 0))
REPEATED = (
    *FIRST,
    ("gpt2_tied dp2xtp2 gpipe m8 mixed sequence", 0),
    ("gpt2_untied pp2xtp2 zb_h1 m8", 3),
    ("gpt2_untied dp4 1f1b m4 zero3", 0),
    ("llama pp2xtp2 interleaved_1f1b m8 v2 full bare", 3),
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
    assert checked(line).rank_log(rank, repeats=False) == short
    assert not repeated


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


# --- processes ------------------------------------------------------------------------------------


RANKS = (0, 1, 4, 5)


def log_of(rank: int) -> RankLog:
    """A log that says which process made it."""
    return RankLog(rank=rank, events=(), peak_bytes=os.getpid())


def shared(run: Callable[[int], RankLog], monkeypatch: pytest.MonkeyPatch) -> dict[int, RankLog]:
    monkeypatch.setattr(workers, "WORTH_S", 0.0)
    monkeypatch.setattr(workers, "_workers", lambda: 2)
    return dict(workers.logs_of(RANKS, run))


def test_small_work_is_done_here() -> None:
    found = dict(workers.logs_of(RANKS, log_of))
    assert [*found] == [*RANKS]
    assert {log.peak_bytes for log in found.values()} == {os.getpid()}


def test_the_first_is_run_here_and_the_others_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shared(log_of, monkeypatch)
    assert sorted(found) == [*RANKS]
    assert found[0].peak_bytes == os.getpid()
    assert os.getpid() not in {found[rank].peak_bytes for rank in RANKS[1:]}


def test_an_error_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> RankLog:
        if rank == 5:
            raise ValueError("rehearse: what is wrong with rank 5")
        return log_of(rank)

    with pytest.raises(ValueError, match="what is wrong with rank 5"):
        shared(run, monkeypatch)


def test_what_cannot_be_forked_is_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    says = "Unable to handle autograd's threading in combination with fork-based multiprocessing."

    def run(rank: int) -> RankLog:
        if os.getpid() != here:
            raise RuntimeError(says)
        return log_of(rank)

    found = shared(run, monkeypatch)
    assert sorted(found) == [*RANKS]
    assert {log.peak_bytes for log in found.values()} == {here}
