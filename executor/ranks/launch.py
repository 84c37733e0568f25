"""Process group of a run: start under torchrun, broadcast of decisions, orderly shutdown."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # dist declares neither
from torch.distributed import distributed_c10d as c10d

from meshwright.executor.errors import StateError
from meshwright.executor.ranks import background, joining
from meshwright.executor.ranks.interrupts import Interrupts
from meshwright.executor.ranks.joining import StartError
from meshwright.executor.ranks.lifelines import Lifelines
from meshwright.executor.ranks.watchdog import FIRST_STEP_FACTOR, Watchdog, progress, say
from meshwright.profiles.inputs import MeshwrightError

T = TypeVar("T")

TIMEOUT_S = 300.0  # a rank that makes no progress stops all after this long
TIMEOUT_VARIABLE = "MESHWRIGHT_TIMEOUT_S"  # overrides it
INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended

_watchdog: Watchdog | None = None  # one per process, as is the process group
_lifelines: Lifelines | None = None
_interrupts: Interrupts | None = None


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
        raise MeshwrightError(
            f"={text!r:.80}",
            place=TIMEOUT_VARIABLE,
            legal="seconds, more than 0",
            way_out="set it so, or leave it out",
        )
    return seconds


def start(backend: str) -> None:
    """Join the process group that torchrun's environment describes, unless it is already joined,
    and start the watchdog.

    Until the first step is done every phase may take `FIRST_STEP_FACTOR` times the timeout; ranks
    have the timeout to come. Raises RuntimeError where a rank has no GPU for nccl, or where the
    others don't come.
    """
    global _watchdog, _lifelines, _interrupts
    if running() or not under_torchrun():
        return
    if backend == "nccl":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise StateError(
                f"the cluster's backend is nccl, but local rank {local_rank} finds "
                f"{torch.cuda.device_count()} GPUs",
                legal="a GPU for each rank of a host",
                way_out="launch as many ranks as there are GPUs, or use Cluster.local(n, 'cpu') to "
                "run on CPU processes",
            )
        torch.cuda.set_device(local_rank)
    limit_s = timeout_s()
    longest = timedelta(seconds=FIRST_STEP_FACTOR * limit_s)
    me, world = joining.place()
    if world > 1:
        sys.excepthook = _end_by_hook
    shared = joining.connected(me, limit_s=limit_s, timeout=longest)
    prefix = joining.agreed_prefix(shared, me, world, limit_s)
    if world > 1:
        host, port = shared.host, shared.port
        own = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=longest)
        _watchdog = Watchdog(
            PrefixStore(f"{prefix}/watch", own),
            rank=me,
            world_size=world,
            limit_s=limit_s,
            holder=f"{joining.holder_of_store()}, which holds it,",
            first_step=lambda: _shorten_timeouts(limit_s),
        )
        watched = PrefixStore(f"{prefix}/lifelines", shared)
        _lifelines = Lifelines(watched, shared.host, me, _watchdog.lose)
        _interrupts = Interrupts(_end_interrupted)
    with progress.during("joining the process group", waits=True):
        dist.init_process_group(
            backend, store=PrefixStore(prefix, shared), rank=me, world_size=world, timeout=longest
        )
    if world > 1:
        sys.excepthook = _end_by_hook  # torch has put its own around it, which prints when it ends


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
    global _watchdog, _lifelines, _interrupts
    if not running():
        return
    with progress.during("leaving the process group", waits=True):
        background.finish_all()  # it may need the group
        dist.barrier()
    if _lifelines is not None:
        _lifelines.close()
        _lifelines = None
    if _watchdog is not None:
        _watchdog.close()
        _watchdog = None
    if _interrupts is not None:
        _interrupts.close()
        _interrupts = None
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
    try:
        start(backend)
        try:
            yield
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            stop()
            raise
        stop()
    except BaseException as error:
        if world_size() == 1 and not _ends_in_a_line(error):
            raise
        _end(error)


def _end_by_hook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """`sys.excepthook` for a script without `distributed`: an error of one rank ends all ranks."""
    if _watchdog is None and not _ends_in_a_line(error):
        sys.__excepthook__(kind, error, trace)
    else:
        _end(error)


def _ends_in_a_line(error: BaseException) -> bool:
    """Whether an error before the process group says all in a line."""
    if _watchdog is not None:
        return True
    among_ranks = under_torchrun() and os.environ["WORLD_SIZE"] != "1"
    return among_ranks and isinstance(error, StartError | KeyboardInterrupt)


def _end(error: BaseException) -> NoReturn:
    """Report what this rank raised, and end its process."""
    name = f"rank {os.environ.get('RANK', rank())}"
    if isinstance(error, KeyboardInterrupt):
        _end_interrupted()
    if _watchdog is not None:
        _watchdog.report(error)
    elif isinstance(error, StartError):
        say(f"{name} failed: {error}")
    else:  # the process group is the user's own
        say(f"{name} failed: {''.join(traceback.format_exception(error))}")
    code = error.code if isinstance(error, SystemExit) else 1
    _leave(code if isinstance(code, int) else 1)


def _end_interrupted() -> NoReturn:
    """End this process after Ctrl-C, with one line of all ranks."""
    if _watchdog is not None:
        _watchdog.interrupt()
    elif os.environ.get("RANK", "0") == "0":
        say("interrupted (Ctrl-C) before the ranks had come together: all end")
    _leave(INTERRUPTED)


def _leave(code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
