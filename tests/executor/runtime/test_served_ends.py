"""The ends of parameter servers, with messages in queues of this process: what they do with a
worker that leaves, is silent or has other rows; and what a worker says of a server that ends.
"""

import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.ranks import watchdog
from meshwright.executor.runtime import served
from meshwright.executor.runtime.served import BYE, COUNT, DRAIN, PUSH, TELL, ServerEnd, WorkerEnd

LIMIT_S = 0.2


class Done:
    def wait(self, *_: Any) -> None:
        return


class Mailbox:
    """A link whose headers are put by the test, and taken from `answers`."""

    length, peer = 6, 9

    def __init__(self) -> None:
        self.headers: queue.Queue[list[float]] = queue.Queue()
        self.answers: list[list[float]] = []
        self.weights = 0

    def hear(self, tag: int = 1) -> list[float]:
        return self.headers.get()

    def say(self, *numbers: float) -> None:
        self.headers.put([*numbers, *[0.0] * (self.length - len(numbers))])

    def push(self, loss: float, rows: int = 4) -> None:
        self.say(PUSH, loss, True, rows, 1.0)

    def tell(self, numbers: list[float], tag: int = 1) -> Done:
        self.answers.append(list(numbers))
        return Done()

    def send(self, x: torch.Tensor, tag: int) -> Done:
        self.weights += 1
        return Done()

    def receive(self, x: torch.Tensor, tag: int) -> Done:
        x.fill_(1.0)
        return Done()


class Served:
    """A server with two workers, ranks 1 and 2, of one weight."""

    def __init__(self, staleness: int) -> None:
        self.weight = nn.Parameter(torch.zeros(3))
        parameter: Any = SimpleNamespace(stored=self.weight.data, api=self.weight, fqn="w")
        self.links = {1: Mailbox(), 2: Mailbox()}
        links: Any = self.links
        self.end = ServerEnd(links, {}, [served.Part([parameter])], staleness)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)

    def serve(self) -> float:
        return self.end.serve(self.optimizer)

    def gone(self) -> None:
        for link in self.links.values():
            link.say(BYE)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes servers, whose patience is `LIMIT_S`."""
    progress, servers = watchdog.Progress(), list[Served]()
    monkeypatch.setattr(served.ranks, "progress", progress)
    monkeypatch.setattr(served, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "FIRST_STEP_FACTOR", 1)
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", str(LIMIT_S))

    def make(staleness: int) -> Served:
        servers.append(Served(staleness))
        return servers[-1]

    yield make
    for server in servers:
        server.gone()


def test_a_worker_that_leaves_early_ends_those_that_wait_for_it(made: Any) -> None:
    server = made(0)
    server.links[1].push(1.0)
    server.links[2].say(BYE)
    with pytest.raises(StateError, match="rank 2, a worker, has ended: it left after 0 steps"):
        server.serve()


def test_with_staleness_others_go_on_without_a_worker_that_leaves(made: Any) -> None:
    server = made(1)
    for link in server.links.values():
        link.push(1.0)
    server.serve()
    server.links[1].push(2.0)  # clock 2: one ahead of the other at most
    server.links[2].say(BYE)
    assert server.serve() == 2.0
    assert server.end.alive == {1}
    assert not server.end.owed
    server.links[1].push(4.0)
    assert server.serve() == 4.0


def test_all_workers_that_left_are_an_error_in_evaluation_too(made: Any) -> None:
    server = made(1)
    server.gone()
    with pytest.raises(StateError, match="eval_step"):
        server.end.mean()


@pytest.mark.parametrize("asks", [DRAIN, TELL, COUNT])
def test_a_silent_worker_is_given_up_by_those_that_drain_or_evaluate(made: Any, asks: int) -> None:
    server = made(1)
    server.links[1].say(asks, 3.0)
    began = time.monotonic()
    if asks == COUNT:  # of an evaluation, whose loss comes then
        server.links[1].say(TELL, 3.0)
    if asks == DRAIN:
        server.end.drain()
    else:
        assert server.end.mean() == 3.0
    assert time.monotonic() - began >= LIMIT_S * 0.9
    assert server.end.alive == {1}
    assert served.ranks.progress.lost == {2}
    if asks == COUNT:
        assert server.links[1].answers[0][:2] == [COUNT, 3.0]


def test_nobody_joins_the_listener_of_a_worker_that_is_lost(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = made(1)
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", "30")
    served.ranks.progress.lost = frozenset({2})
    server.links[1].say(BYE)
    began = time.monotonic()
    server.end.close()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("staleness", [0, 1])
def test_workers_with_other_rows_are_refused(made: Any, staleness: int) -> None:
    server = made(staleness)
    server.links[1].push(1.0, rows=4)
    server.links[2].push(1.0, rows=3)
    with pytest.raises(BatchError, match=r"has \d rows where another has \d"):
        server.serve()


def test_rows_of_an_evaluation_are_compared(made: Any) -> None:
    server = made(1)
    server.links[1].say(TELL, 1.0, True, 2)
    server.links[2].say(TELL, 1.0, True, 3)
    with pytest.raises(BatchError, match="as many rows on all workers"):
        server.end.mean()


def test_a_round_whose_pushes_came_before_returns_the_last_mean(made: Any) -> None:
    server = made(100)
    for loss in (1.0, 2.0, 3.0, 4.0):
        server.links[1].push(loss)
    while server.end.heard.qsize() < 4:
        time.sleep(0.01)
    server.links[2].push(5.0)
    first = server.serve()  # ends as soon as two pushes have come
    second = server.serve()
    assert (first, second) == (1.5, 3.5)
    server.end.rounds -= 1
    assert server.serve() == 3.5


def test_mean_counts_are_those_of_all_workers(made: Any) -> None:
    server = made(0)
    for worker, count in ((1, 3.0), (2, 5.0)):
        server.links[worker].say(COUNT, count)
        server.links[worker].push(1.0)
    server.serve()
    for link in server.links.values():
        assert link.answers == [[COUNT, 4.0, 0.0, 0.0, 0.0, 0.0]]


def test_a_worker_says_which_server_ended_and_that_all_end(made: Any) -> None:
    class Broken(Mailbox):
        def tell(self, numbers: list[float], tag: int = 1) -> Done:
            raise RuntimeError("Connection closed by peer\nand more")

    served.ranks.progress.dispensable = frozenset({1})
    links: Any = [Broken()]
    with pytest.raises(StateError, match="rank 9, a server, has ended: Connection closed by peer;"):
        WorkerEnd(links, []).mean(1.0)
    assert not served.ranks.progress.dispensable


def test_the_first_rank_leaves_last_and_counts_nobody_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = watchdog.Progress()
    monkeypatch.setattr(watchdog, "progress", progress)
    store = torch.distributed.HashStore()

    def of(rank: int) -> watchdog.Watchdog:
        one = object.__new__(watchdog.Watchdog)  # without its threads
        one.store, one.rank, one.world_size = store, rank, 3
        return one

    of(1).leave()
    progress.lost = frozenset({1})  # its connection ended before the others knew that it left
    first = threading.Thread(target=of(0).leave, daemon=True)
    first.start()
    first.join(0.3)
    assert first.is_alive()
    of(2).leave()
    first.join(5)
    assert not first.is_alive()
