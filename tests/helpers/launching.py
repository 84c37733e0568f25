"""Starts N ranks of a script as torchrun would, and never leaves one behind.

Every rank is the leader of a process group of its own, so that what it starts dies with it. Unlike
torchrun, nobody kills the survivors of a failure at once: they get `grace_s` to notice by
themselves, because noticing is what some tests are about.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a launch found, by check."""

    found: dict[str, Any]
    run: Launch

    def __getitem__(self, name: str) -> Any:
        if name not in self.found:
            pytest.fail(f"{name}: the launch ended before its result\n{self.run.tail()}")
        result = self.found[name]
        for end in ("refused", "failed"):
            if isinstance(result, dict) and end in result:
                pytest.fail(f"{name} {end}: {result[end]}")
        return result


def results_of(
    script: Path, folder: Path, *, ranks: int, timeout_s: float, name: str = ""
) -> Results:
    """Run `script`, which writes `results{name}.json` into the folder that is its argument."""
    run = launch(script, str(folder), ranks=ranks, timeout_s=timeout_s)
    written = folder / f"results{name}.json"
    return Results(found=json.loads(written.read_text()) if written.exists() else {}, run=run)


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
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{k}.{end}") for k in range(ranks) for end in ("out", "err")]
        handles = [file.open("w") for file in files]
        running: list[subprocess.Popen[str]] = []
        started = time.monotonic()
        try:
            for k in range(ranks):
                running.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *arguments],
                        env=_environment(k, ranks, port),
                        stdout=handles[2 * k],
                        stderr=handles[2 * k + 1],
                        text=True,
                        start_new_session=True,
                    )
                )
            ended = _wait(running, started, timeout_s, grace_s)
        finally:
            left = [_kill_group(process) for process in running]
            for handle in handles:
                handle.close()
        texts = [file.read_text(errors="replace") for file in files]
    return Launch(
        ranks=tuple(
            Outcome(
                returncode=process.returncode,
                stdout=texts[2 * k],
                stderr=texts[2 * k + 1],
                wall_s=ended.get(k, time.monotonic() - started),
                killed=k not in ended,
                children_left=left[k] and k in ended,
            )
            for k, process in enumerate(running)
        )
    )


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": 1, "PYTHONPATH": ROOT,
    }  # fmt: skip
    return {**os.environ, **{key: str(value) for key, value in own.items()}}


def _wait(
    running: list[subprocess.Popen[str]], started: float, timeout_s: float, grace_s: float
) -> dict[int, float]:
    """Seconds until each rank ended by itself; ranks still running at the deadline are absent."""
    ended: dict[int, float] = {}
    deadline = started + timeout_s
    while len(ended) < len(running) and time.monotonic() < deadline:
        for k, process in enumerate(running):
            if k not in ended and process.poll() is not None:
                ended[k] = time.monotonic() - started
                if process.returncode:
                    deadline = min(deadline, time.monotonic() + grace_s)
        time.sleep(0.05)
    return ended


def _kill_group(process: subprocess.Popen[str]) -> bool:
    """Kill what is left of a rank's process group; whether anything was. A rank that still runs is
    asked for its tracebacks first (Python's fault handler prints them on SIGABRT)."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    left = False
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        left = True
    process.wait()
    return left
