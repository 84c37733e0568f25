"""Runs tests in forks of a process that has torch, pytest and the like imported, but nothing of the
product: each line of its input is a job, each of its output how that ended.

    python -P server.py MODULE...

A job is a JSON object: `stages`, lists of arguments of pytest that are run one after the other
until a test fails; `options` of pytest; `budget_s`, CPU-seconds after which no stage goes on;
`silent_s`, seconds after which a test hangs; `log`, the file of what pytest writes. The folder it
runs in is the tree that is tested, first on the path of every process (PYTHONPATH).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

POLL_S = 0.3
TICKS = os.sysconf("SC_CLK_TCK")
SUBREAPER = 36  # of prctl: what a fork leaves behind becomes a child of this process


class _Told:
    """Writes which test runs and which fails, as lines of JSON."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.failed = pipe, False

    def say(self, **what: Any) -> None:
        os.write(self.pipe, json.dumps(what).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say(runs=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._end(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._end(report)

    def _end(self, report: Any) -> None:
        if report.failed:
            self.failed = True
            self.say(failed=report.nodeid)


def _test(job: dict[str, Any], pipe: int) -> None:
    os.setsid()
    for handle, path, mode in ((0, os.devnull, os.O_RDONLY), (1, job["log"], os.O_WRONLY)):
        os.dup2(os.open(path, mode | os.O_CREAT | os.O_TRUNC), handle)
    os.dup2(1, 2)
    told = _Told(pipe)
    for stage in job["stages"]:
        pytest.main(["-p", "no:cacheprovider", *job["options"], *stage], plugins=[told])
        if told.failed and "-x" in job["options"]:
            break
    told.say(ended=True)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """`failed`, the tests that did; `why`, where it was ended; `cpu_s` of all processes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            _test(job, writing)
        finally:
            os._exit(0)
    os.close(writing)
    found: dict[str, Any] = {"failed": [], "why": ""}
    runs = ended = ""
    heard_s = time.monotonic()
    for line in _lines(reading):
        if line is None:
            if _cpu_s(pid) > job["budget_s"]:
                found["why"] = "budget"
            elif time.monotonic() - heard_s > job["silent_s"]:
                found["why"] = "silent"
                found["failed"].append(runs)
            if found["why"]:
                break
            continue
        heard_s = time.monotonic()
        runs, ended = line.get("runs", runs), line.get("ended", ended)
        found["failed"] += [line["failed"]] if "failed" in line else []
    if not ended and not found["why"]:
        found["why"] = "died"
        found["failed"].append(runs)
    os.close(reading)
    return {**found, "cpu_s": _reaped()}


def _lines(pipe: int) -> Iterator[dict[str, Any] | None]:
    """What is told, and None now and then while nothing is."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], POLL_S)[0]:
            yield None
            continue
        data = os.read(pipe, 2**16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        told = [json.loads(line) for line in whole]
        yield from told
        if any("ended" in line for line in told):
            return


def _family() -> dict[int, float]:
    """CPU-seconds of each process that came of this one, with those of its children that ended."""
    parent, seconds = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                numbers = (folder / "stat").read_text().rpartition(")")[2].split()
                parent[int(folder.name)] = int(numbers[1])
                seconds[int(folder.name)] = sum(map(int, numbers[11:15])) / TICKS
    ours, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, above in parent.items() if above in ours} - ours
        ours |= more
        grew = bool(more)
    return {pid: seconds[pid] for pid in ours - {os.getpid()}}


def _cpu_s(pid: int) -> float:
    return sum(_family().values())


def _reaped() -> float:
    """End what still runs, and count the seconds of all that ended."""
    total = 0.0
    patience = 20  # for what ends by itself
    while True:
        try:
            pid, _, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return total
        if pid:
            total += used.ru_utime + used.ru_stime
            continue
        patience -= 1
        if patience < 0:
            for each in _family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
