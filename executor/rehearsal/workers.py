"""Several ranks rehearsed at a time, each in a process of its own, where that is worth it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from meshwright.executor.rehearsal.events import RankLog

WORTH_S = 20.0  # of work left, for processes to be started
MOST = 8  # processes: each holds the model's graph, and a log


class CannotForkError(RuntimeError):
    """The process that was forked has run backwards of its own on a device."""


_run: Callable[[int], RankLog] | None = None  # what a worker inherits


def logs_of(ranks: Sequence[int], run: Callable[[int], RankLog]) -> Iterator[tuple[int, RankLog]]:
    """`run` of each rank, as they end. The first is run here; how long it takes decides whether the
    others are shared out."""
    started = time.monotonic()
    for k, rank in enumerate(ranks):
        left = ranks[k:]
        if k and len(left) > 1 and _each_s(started, k) * len(left) > WORTH_S and _workers() > 1:
            done = set()
            try:
                for rank, log in _shared(left, run):
                    done.add(rank)
                    yield rank, log
            except CannotForkError:
                yield from ((rank, run(rank)) for rank in left if rank not in done)
            return
        yield rank, run(rank)


def _each_s(started: float, done: int) -> float:
    return (time.monotonic() - started) / done


def _workers() -> int:
    """Processes that can run here: none but this where processes can't be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, MOST)


def _shared(ranks: Iterable[int], run: Callable[[int], RankLog]) -> Iterator[tuple[int, RankLog]]:
    global _run  # forked processes have it without being sent it
    _run = run
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(_workers(), context, _begin) as pool:
            found = {pool.submit(_log, rank): rank for rank in ranks}
            try:
                for future in as_completed(found):
                    yield found[future], future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    finally:
        _run = None


def _begin() -> None:
    torch.set_num_threads(1)


def _log(rank: int) -> RankLog:
    assert _run is not None
    try:
        return _run(rank)
    except RuntimeError as error:
        if "fork-based multiprocessing" in str(error):
            raise CannotForkError(str(error)) from None
        raise
