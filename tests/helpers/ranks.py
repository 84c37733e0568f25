"""Cases that need several ranks: one launch for each number of ranks, which takes all of them.

    found = on_ranks(4, train_cell, cell)

runs `train_cell(cell)` on four ranks of one process group, after a barrier and with a fresh seed,
and returns what rank 0 returned. The function is one of a module, and what passes is pickled:
traced models and references are made once, by the test, and handed over. The ranks live as long as
this process asks for cases; after a failure the next case gets a new launch.
"""

from __future__ import annotations

import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import Launching, end_servers

RANK_LOOP = Path(__file__).with_name("rank_loop.py")
START_S = 120.0
GRACE_S = 5.0  # for the others to notice a failure by themselves
CASES_OF_A_WORLD = 16  # whose process groups stay, with their threads: then a new launch

_worlds: dict[int, World] = {}


def on_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 180
) -> Any:
    """The result of rank 0 of `function(*arguments)` on `world` ranks.

    The test fails where a rank raises, dies, or takes longer than `timeout_s` (seconds).
    """
    result, failure = attempt(world, function, *arguments, timeout_s=timeout_s)
    if failure is not None:
        name = getattr(function, "__name__", str(function))
        pytest.fail(f"{name}{arguments!r:.500} on {world} ranks: {failure}", pytrace=False)
    return result


def attempt(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 180
) -> tuple[Any, str | None]:
    """The same as a pair: the result of rank 0, and None or what failed."""
    ranks = _worlds.get(world)
    if ranks is None:
        ranks = _worlds[world] = World(world)
    goes_on = False
    try:
        result, failure = ranks.run(function, arguments, timeout_s)
        goes_on = failure is None and ranks.cases < CASES_OF_A_WORLD
    finally:  # also where this process raises in the midst of a case
        if not goes_on:
            _worlds.pop(world).end()
    return result, failure


def end_all() -> None:
    """End the ranks of this process, and what starts them."""
    while _worlds:
        _worlds.popitem()[1].end()
    end_servers()


class World:
    """Ranks of one process group, and a connection to each."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.cases = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        address = str(Path(self._folder.name, "parent"))
        self._launch = Launching(RANK_LOOP, address, ranks=ranks)
        self._of: dict[Connection, int] = {}
        with Listener(address, family="AF_UNIX", backlog=ranks) as listener:
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            try:
                for _ in range(ranks):
                    connection = listener.accept()
                    self._of[connection] = connection.recv()
            except (TimeoutError, EOFError):
                said = self._launch.tail(since=[0] * ranks)
                self.end()
                pytest.fail(f"{ranks} ranks did not start:\n{said}", pytrace=False)

    def run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float
    ) -> tuple[Any, str | None]:
        """Rank 0's result, and what failed."""
        self.cases += 1
        self._launch.send_signal(signal.SIGCONT)
        written = self._launch.written()
        work = pickle.dumps((function, arguments))
        for connection in self._of:
            with suppress(BrokenPipeError):  # it has died, as its answer says
                connection.send_bytes(work)
        waiting, result, failures = set(self._of), None, []
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(waiting, left_s):
                waiting.remove(connection)
                rank = self._of[connection]
                try:
                    done, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    done, value = False, f"died, {self._launch.ended(rank)}"
                if not done:
                    failures.append(f"rank {rank} {value}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                elif rank == 0:
                    result = value
        if not waiting and not failures:
            # the threads of their process groups would go on to look for messages
            self._launch.send_signal(signal.SIGSTOP)
            return result, None
        if waiting:
            late = sorted(self._of[connection] for connection in waiting)
            failures.append(f"ranks {late} still ran after {timeout_s} s, or {GRACE_S} s")
            for rank in late:
                self._launch.ask_where(rank)
        return None, "\n".join([*failures, self._launch.tail(since=written)])

    def end(self) -> None:
        """Kill the ranks: they wait for a case, or one has failed."""
        for connection in self._of:
            connection.close()
        self._launch.kill()
        self._folder.cleanup()
