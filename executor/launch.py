"""Process group of a run: joining it under torchrun, talking over it, leaving it in order."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 1.0  # how long a failing rank waits for the others to report their failure
TIMEOUT_S = (
    300  # a rank that hangs stops the others after this long; MESHWRIGHT_TIMEOUT_S overrides
)


def under_torchrun() -> bool:
    """Whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def running() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    return dist.get_world_size() if running() else 1


def rank() -> int:
    return dist.get_rank() if running() else 0


def device_here() -> torch.device:
    """The local GPU under NCCL, else the CPU."""
    if (running() and dist.get_backend() == "nccl") or (
        not running() and torch.cuda.is_available()
    ):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def start(backend: str) -> None:
    """Join the process group that torchrun's environment describes, unless it is already joined."""
    if running() or not under_torchrun():
        return
    if backend == "nccl":
        here = int(os.environ.get("LOCAL_RANK", 0))
        if here >= torch.cuda.device_count():
            raise RuntimeError(
                f"the cluster's backend is nccl, but local rank {here} finds "
                f"{torch.cuda.device_count()} "
                "GPUs; use Cluster.local(n, 'cpu') to run on CPU processes"
            )
        torch.cuda.set_device(here)
    limit = float(os.environ.get("MESHWRIGHT_TIMEOUT_S", TIMEOUT_S))
    dist.init_process_group(backend, timeout=timedelta(seconds=limit))


def agree_on(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank; what it raises is raised everywhere.

    What was measured or solved on one rank is used by all, so that they can't disagree.
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
    value, failed = box[0]
    if failed is not None:
        raise failed
    return value


def stop() -> None:
    """Leave the process group after everybody has finished."""
    if not running():
        return
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    time.sleep(0.3)  # gloo's threads must be gone before the interpreter is


@contextmanager
def distributed(backend: str = "gloo") -> Iterator[None]:
    """A process group for the duration; a rank that raises says so and takes the others down with
    it.

    Without `os._exit` the other ranks would wait for this one until the process group's timeout.
    """
    start(backend)
    try:
        yield
    except BaseException as error:
        if world_size() == 1 or isinstance(error, SystemExit):
            raise
        _tell(error)
        os._exit(1)
    stop()


def _tell(error: BaseException) -> None:
    """Say on stderr what happened: the first rank to fail with its traceback, the others in a line,
    naming the ranks that said nothing (killed, or hung)."""
    me, world = rank(), world_size()
    lines = [f"rank {me} failed: {type(error).__name__}: {error}"]
    first = True
    try:
        store = dist.distributed_c10d._get_default_store()
        first = store.add("meshwright/failures", 1) == 1
        store.set(f"meshwright/failed/{me}", "1")
        time.sleep(GRACE_S)
        silent = [r for r in range(world) if not store.check([f"meshwright/failed/{r}"])]
        if silent:
            lines.append(f"rank {me}: no word from rank(s) {silent}: killed, or hung")
    except RuntimeError:  # the store went down with the rank that held it
        pass
    if first:
        lines += traceback.format_exception(error)
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
