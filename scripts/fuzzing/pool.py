"""Runs each case in a process of its own, with limits on its time and memory, and judges it.

A case is accepted, or refused by an error with its three fields; whatever else happens is a fault.
An error of the user's own code passes as it is.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

Make = Callable[[Random, Path], tuple[str, Callable[[], object]]]

FIELDS = ("place", "legal", "way_out")
GOOD = ("accepted", "refused", "user's own")
GIB = 2**30
WALL_FACTOR = 20  # of CPU seconds, on a machine that is shared


class UserBug(Exception):
    """What a user's own function raises in a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Cases of one kind. `refuse_s` are the CPU seconds that a refusal may take, `limit_s` those
    that a case may take at all, `memory` bytes that it may take beyond what is there before."""

    name: str
    make: Make
    share: int  # of all cases
    refuse_s: float = 1.0
    limit_s: float = 2.0
    memory: int = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case; `kind` is one of `GOOD`, or says the fault."""

    family: str
    number: int
    kind: str
    said: str
    cpu_s: float


def rng_of(family: str, number: int, seed: int) -> Random:
    return Random(zlib.crc32(f"{family} {number} {seed}".encode()))


def judge(family: Family, number: int, seed: int, folder: Path) -> Outcome:
    """Run a case in this process."""
    said, run = family.make(rng_of(family.name, number, seed), folder)
    before = time.process_time()
    try:
        run()
        kind = "accepted"
    except MemoryError:
        kind = "memory"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the case shows
        kind, text = _kind_of(error)
        said += f" -> {text}"
    cpu_s = time.process_time() - before
    if kind == "refused" and cpu_s > family.refuse_s:
        kind = "refused late"
    return Outcome(family=family.name, number=number, kind=kind, said=said[:1500], cpu_s=cpu_s)


def _kind_of(error: BaseException) -> tuple[str, str]:
    chain = [error]
    while following := chain[-1].__cause__ or (
        None if chain[-1].__suppress_context__ else chain[-1].__context__
    ):
        chain.append(following)
    bugs = [link for link in chain if isinstance(link, UserBug)]
    text = f"{type(error).__name__}: {error}"
    if bugs and chain[0] is bugs[0]:
        return ("user's own" if len(bugs) == 1 else "user's own, twice"), text
    if bugs and len(bugs) > 1:
        return "user's own, twice", text
    if "the user's own" in text and not any("the user's own" in str(e) for e in chain[1:]):
        return "user's own, without its traceback", text
    lacking = [name for name in FIELDS if not getattr(error, name, "")]
    if isinstance(error, ValueError) and len(lacking) < len(FIELDS):
        return (f"no {' or '.join(lacking)}" if lacking else "refused"), text
    at = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    place = f"{Path(at.filename).name}:{at.name}" if at else "?"
    return f"bare {type(error).__name__} at {place}", text


def run_cases(
    cases: Iterable[tuple[Family, int]], *, seed: int, processes: int
) -> Iterator[Outcome]:
    """The outcomes of cases, each in a fork of this process, as they end."""
    gc.freeze()  # forks share what is loaded
    waiting, running = iter(cases), {}
    more = True
    with tempfile.TemporaryDirectory() as folder:
        while more or running:
            while more and len(running) < processes:
                try:
                    family, number = next(waiting)
                except StopIteration:
                    more = False
                    break
                running[_fork(family, number, seed, Path(folder))] = (
                    family,
                    number,
                    time.monotonic(),
                )
            yield from _ended(running)


def _ended(running: dict[tuple[int, int], tuple[Family, int, float]]) -> Iterator[Outcome]:
    """The outcomes of the processes that have ended, or are ended here for want of an end."""
    ready, _, _ = select.select([pipe for _, pipe in running], [], [], 0.5)
    for (pid, pipe), (family, number, began) in list(running.items()):
        late = time.monotonic() - began > WALL_FACTOR * family.limit_s
        if pipe not in ready and not late:
            continue
        if late and pipe not in ready:
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(pipe, "rb") as file:
            data = file.read()
        _, status = os.waitpid(pid, 0)
        del running[pid, pipe]
        if data:
            yield Outcome(**json.loads(data))
        else:
            sign = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            slow = late or sign == signal.SIGXCPU
            kind = "slow" if slow else f"died of signal {sign}" if sign else "died"
            said = "no answer; its seed makes it again"
            yield Outcome(family=family.name, number=number, kind=kind, said=said, cpu_s=0.0)


def _fork(family: Family, number: int, seed: int, folder: Path) -> tuple[int, int]:
    """Start a case; its process and the pipe that its outcome comes through."""
    out, into = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    own = folder / f"{family.name}-{number}"
    try:
        os.close(out)
        own.mkdir()
        os.chdir(own)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        _limit(family)
        outcome = asdict(judge(family, number, seed, own))
        with os.fdopen(into, "wb") as file:
            file.write(json.dumps(outcome).encode(errors="replace"))
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os._exit(0)


def _limit(family: Family) -> None:
    """Limit this process' CPU seconds and its memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + family.limit_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + family.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
