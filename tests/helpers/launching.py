"""Starts N ranks of a script as torchrun would, and never leaves one behind.

Every rank is the leader of a process group of its own, so that what it starts dies with it. Unlike
torchrun, nobody kills the survivors of a failure at once: they get `grace_s` to notice by
themselves, because noticing is what some tests are about.

Ranks are forked by two servers (`rank_server.py`): even and odd ranks hash strings by different
seeds, so that what depends on the order of a set differs between ranks, as it does in life.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANK_SERVER = str(Path(__file__).with_name("rank_server.py"))
SERVERS = 2
IN_EVERY_RANK = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended: `killed` if it had to be, `children_left` if its process group outlived
    it."""

    returncode: int
    stdout: str
    stderr: str
    wall_s: float
    killed: bool
    children_left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How all ranks ended."""

    ranks: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        return all(rank.returncode == 0 for rank in self.ranks)

    @property
    def wall_s(self) -> float:
        return max(rank.wall_s for rank in self.ranks)

    def tail(self, characters: int = 3000) -> str:
        """The end of every rank's stderr, failed ranks only if any failed."""
        shown = [k for k, rank in enumerate(self.ranks) if rank.returncode] or range(
            len(self.ranks)
        )
        return "\n".join(
            f"--- rank {k}: exit {self.ranks[k].returncode}, killed {self.ranks[k].killed}\n"
            f"{self.ranks[k].stderr[-characters:]}"
            for k in shown
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    script: Path, *arguments: str, ranks: int, timeout_s: float, grace_s: float = 10.0
) -> Launch:
    """Run `script` on `ranks` CPU ranks of one thread each; returns when all have ended.

    After `timeout_s`, or `grace_s` after the first failure, ranks that still run are killed and
    marked so.
    """
    with _alone():
        return Launching(script, *arguments, ranks=ranks).end(timeout_s, grace_s)


class Launching:
    """Ranks of a script that run: `end` must be called."""

    def __init__(self, script: Path, *arguments: str, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="launch-")
        names = [f"{k}.{end}" for k in range(ranks) for end in ("out", "err")]
        self._files = [Path(self._folder.name, name) for name in names]
        self._running: list[_Rank] = []
        self._started = time.monotonic()
        port = free_port()
        for k in range(ranks):
            request = (str(script), arguments, _environment(k, ranks, port), os.getcwd())
            files = self._files[2 * k : 2 * k + 2]
            self._running.append(_Rank(_server(k % SERVERS), request, files))

    def written(self) -> list[int]:
        """Bytes of every rank's stderr so far."""
        return [file.stat().st_size for file in self._files[1::2]]

    def tail(self, since: list[int], characters: int = 3000) -> str:
        """The end of what every rank has written to stderr `since` then."""
        texts = [
            file.read_bytes()[start:].decode(errors="replace")[-characters:]
            for file, start in zip(self._files[1::2], since, strict=True)
        ]
        return "\n".join(f"--- rank {k}\n{text}" for k, text in enumerate(texts) if text)

    def ended(self, rank: int) -> str:
        """How a rank ended that is about to."""
        code = self._running[rank].poll(timeout_s=5)
        return "and has not ended" if code is None else f"exit {code}"

    def ask_where(self, rank: int) -> None:
        """Have a rank print where its threads are, and end it."""
        _ask_where(self._running[rank])

    def send_signal(self, number: signal.Signals) -> None:
        for rank in self._running:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, number)

    def kill(self) -> None:
        """End all, whatever they do."""
        self.send_signal(signal.SIGKILL)
        for rank in self._running:
            rank.poll(timeout_s=None)
        self._folder.cleanup()

    def end(self, timeout_s: float, grace_s: float = 10.0) -> Launch:
        """Wait until all have ended, kill those that don't, and say how each did."""
        try:
            ended = _wait(self._running, self._started, timeout_s, grace_s)
        finally:
            left = [_kill_group(rank) for rank in self._running]
        texts = [file.read_text(errors="replace") for file in self._files]
        self._folder.cleanup()
        return Launch(
            ranks=tuple(
                Outcome(
                    returncode=rank.returncode,
                    stdout=texts[2 * k],
                    stderr=texts[2 * k + 1],
                    wall_s=ended.get(k, time.monotonic() - self._started),
                    killed=k not in ended,
                    children_left=left[k] and k in ended,
                )
                for k, rank in enumerate(self._running)
            )
        )


@contextmanager
def _alone() -> Iterator[None]:
    """One launch at a time in this checkout: beside another, ranks would miss their deadlines."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_servers: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}


def _server(number: int) -> socket.socket:
    """The socket of a rank server, which ends when this process closes it."""
    if number not in _servers:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            process = subprocess.Popen(
                [sys.executable, "-P", RANK_SERVER, str(other.fileno())],
                env={**os.environ, **IN_EVERY_RANK},
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        _servers[number] = own, process
    return _servers[number][0]


def end_servers() -> None:
    while _servers:
        own, process = _servers.popitem()[1]
        own.close()
        process.wait()


class _Rank:
    """A forked rank, and the pipe that tells its pid and how it ended."""

    def __init__(self, server: socket.socket, request: object, outputs: list[Path]) -> None:
        read, write = os.pipe()
        self.returncode: int | None = None
        self._pipe = os.fdopen(read, "rb", buffering=0)
        with ExitStack() as stack:
            files = [stack.enter_context(file.open("w")) for file in outputs]
            stack.callback(os.close, write)
            descriptors = [*(file.fileno() for file in files), write]
            socket.send_fds(server, [json.dumps(request).encode()], descriptors)

    @cached_property
    def pid(self) -> int:
        return int(self._pipe.readline())

    def poll(self, timeout_s: float | None = 0.0) -> int | None:
        """The exit code, or minus the signal; None where it runs on for `timeout_s`."""
        running = self.pid and self.returncode is None
        if running and select.select([self._pipe], [], [], timeout_s)[0]:
            self.returncode = int(self._pipe.readline())
            self._pipe.close()
        return self.returncode


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    return {**os.environ, **IN_EVERY_RANK, **{key: str(value) for key, value in own.items()}}


def _wait(
    running: list[_Rank], started: float, timeout_s: float, grace_s: float
) -> dict[int, float]:
    """Seconds until each rank ended by itself; ranks still running at the deadline are absent."""
    ended: dict[int, float] = {}
    deadline = time.monotonic() + timeout_s
    while len(ended) < len(running) and time.monotonic() < deadline:
        for k, rank in enumerate(running):
            if k not in ended and rank.poll() is not None:
                ended[k] = time.monotonic() - started
                if rank.returncode:
                    deadline = min(deadline, time.monotonic() + grace_s)
        time.sleep(0.02)
    return ended


def _ask_where(rank: _Rank) -> None:
    """Have a rank print its tracebacks, and end it (Python's fault handler does, on SIGABRT)."""
    with suppress(ProcessLookupError):
        os.kill(rank.pid, signal.SIGABRT)
    rank.poll(timeout_s=5)


def _kill_group(rank: _Rank) -> bool:
    """Kill what is left of a rank's process group; whether anything was. A rank that still runs is
    asked first where it is."""
    if rank.poll() is None:
        _ask_where(rank)
    left = False
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
        left = True
    rank.poll(timeout_s=None)
    return left
