"""Ranks shared out over processes, where that is worth it and can be."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from meshwright.executor.rehearsal import RankLog, workers

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

    def run(rank: int) -> RankLog:
        if os.getpid() != here:
            raise RuntimeError(
                "Unable to handle autograd's threading in combination with fork-based "
                "multiprocessing."
            )
        return log_of(rank)

    found = shared(run, monkeypatch)
    assert sorted(found) == [*RANKS]
    assert {log.peak_bytes for log in found.values()} == {here}
