"""Process group of a run: rendezvous under torchrun, broadcast of decisions, orderly shutdown.

torchrun's agent may keep one store for all restarts of its ranks, with the keys of the dead in it,
and the number of restarts differs between agents. So the ranks of one start agree on a key prefix
that no other start has: each writes a random word, and rank 0 answers each word with its own.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # dist declares none of them
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from meshwright.executor.ranks import background
from meshwright.executor.ranks.watchdog import FIRST_STEP_FACTOR, Watchdog, progress, say

T = TypeVar("T")

TIMEOUT_S = 300.0  # a rank that makes no progress stops all after this long
TIMEOUT_VARIABLE = "MESHWRIGHT_TIMEOUT_S"  # overrides it
POLL_S = 0.05  # at the start only

_watchdog: Watchdog | None = None  # one per process, as is the process group


def under_torchrun() -> bool:
    """Whether torchrun's environment variables are set."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def running() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def rehearsed() -> bool:
    """Whether this process stands for a rank of a world that is not there (a rehearsal)."""
    return running() and dist.get_backend() == "fake"


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if running() else 1


def rank() -> int:
    """This process' rank; 0 without a process group."""
    return dist.get_rank() if running() else 0


def on_gpus() -> bool:
    """Whether the process group's backend is NCCL."""
    return torch.cuda.is_available() and "nccl" in dist.get_backend_config()


def device_here() -> torch.device:
    """The local GPU under NCCL, else the CPU."""
    if on_gpus() if running() else torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def timeout_s() -> float:
    """Seconds without progress after which the watchdog ends all ranks. Raises ValueError for an
    illegal `MESHWRIGHT_TIMEOUT_S`."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{TIMEOUT_VARIABLE}={text!r}; legal: seconds, more than 0")
    return seconds


def start(backend: str) -> None:
    """Join the process group that torchrun's environment describes, unless it is already joined,
    and start the watchdog.

    Until the first step is done every phase may take `FIRST_STEP_FACTOR` times the timeout. Raises
    RuntimeError where a rank has no GPU for nccl, or where the others don't come.
    """
    global _watchdog
    if running() or not under_torchrun():
        return
    if backend == "nccl":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise RuntimeError(
                f"the cluster's backend is nccl, but local rank {local_rank} finds "
                f"{torch.cuda.device_count()} "
                "GPUs; use Cluster.local(n, 'cpu') to run on CPU processes"
            )
        torch.cuda.set_device(local_rank)
    limit_s = timeout_s()
    longest = timedelta(seconds=FIRST_STEP_FACTOR * limit_s)
    shared, me, world = next(rendezvous("env://", timeout=longest))
    shared.set_timeout(longest)
    prefix = _agreed_prefix(shared, me, world, longest.total_seconds())
    dist.init_process_group(
        backend, store=PrefixStore(prefix, shared), rank=me, world_size=world, timeout=longest
    )
    if world > 1:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        own = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=longest)
        _watchdog = Watchdog(
            PrefixStore(f"{prefix}/watch", own),
            rank=me,
            world_size=world,
            limit_s=limit_s,
            holder=_store_holder(),
            first_step=lambda: _shorten_timeouts(limit_s),
        )
        sys.excepthook = _end_by_hook


def _agreed_prefix(store: Store, me: int, world: int, limit_s: float) -> str:
    """A key prefix that all ranks of this start share, and no other start. Raises RuntimeError
    after `limit_s`."""
    word = uuid.uuid4().hex
    if me != 0:
        store.set(f"meshwright/word/{me}", word)
        try:
            prefix = store.get(f"meshwright/answer/{word}").decode()
        except RuntimeError as error:
            raise RuntimeError(f"start: no answer from rank 0 within {limit_s:g} s") from error
        store.set(f"{prefix}/here/{me}", "")
        return str(prefix)
    prefix, deadline_s = f"meshwright/{word}", time.monotonic() + limit_s
    absent = list(range(1, world))
    while absent:
        for r in absent:  # a word of an earlier start is answered too, and read by nobody
            if store.check([f"meshwright/word/{r}"]):
                theirs = store.get(f"meshwright/word/{r}").decode()
                store.set(f"meshwright/answer/{theirs}", prefix)
        time.sleep(POLL_S)
        absent = [r for r in absent if not store.check([f"{prefix}/here/{r}"])]
        if absent and time.monotonic() > deadline_s:
            raise RuntimeError(f"start: no word from ranks {absent} within {limit_s:g} s")
    return prefix


def _store_holder() -> str:
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "the first node's torchrun, which holds it," if agent else "rank 0, which holds it,"


def _shorten_timeouts(limit_s: float) -> None:
    """Set every process group's timeout to a step's, in place of the first step's."""
    shorten = getattr(c10d, "_set_pg_timeout", None)
    if shorten is None:  # private: without it only the watchdog keeps the limit
        return
    for group in list(c10d._world.pg_map):
        shorten(timedelta(seconds=limit_s), group)


def agree_on(decide: Callable[[], T]) -> T:
    """`decide()` of rank 0, or its error, broadcast to all ranks.

    A plan is solved, and a profile measured, on one rank only: so no two can disagree.
    """
    if world_size() == 1:
        return decide()
    box: list[Any] = [None]
    if rank() == 0:
        try:
            box = [(decide(), None)]
        except Exception as error:  # noqa: BLE001 - the others wait for this rank, whatever happens
            box = [(None, error)]
    dist.broadcast_object_list(box, src=0)
    decided: tuple[T, Exception | None] = box[0]
    if decided[1] is not None:
        raise decided[1]
    return decided[0]


def stop() -> None:
    """Destroy the process group when all ranks are done. The watchdog ends this process where that
    takes longer than the timeout."""
    global _watchdog
    if not running():
        return
    with progress.during("leaving the process group", waits=True):
        background.finish_all()  # it may need the group
        dist.barrier()
    if _watchdog is not None:
        _watchdog.close()
        _watchdog = None
    dist.destroy_process_group()
    gc.collect()
    time.sleep(0.3)  # gloo's threads must be gone before the interpreter is
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def distributed(backend: str = "gloo") -> Iterator[None]:
    """A process group inside; an error of one rank is reported and ends all ranks.

    Without `os._exit` the other ranks would wait for this one until the process group's timeout.
    `sys.exit()` and `sys.exit(0)` leave in order, when the other ranks do.
    """
    start(backend)
    try:
        try:
            yield
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            stop()
            raise
        stop()
    except BaseException as error:
        if not running() or world_size() == 1:
            raise
        _end(error)


def _end_by_hook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """`sys.excepthook` for a script without `distributed`: an error of one rank ends all ranks."""
    if _watchdog is None:
        sys.__excepthook__(kind, error, trace)
    else:
        _end(error)


def _end(error: BaseException) -> NoReturn:
    """Report what this rank raised, and end its process."""
    if _watchdog is not None:
        _watchdog.report(error)
    else:  # the process group is the user's own
        say(f"rank {rank()} failed: {''.join(traceback.format_exception(error))}")
    code = error.code if isinstance(error, SystemExit) else 1
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)
