"""What all ranks of a checkpoint do together: what goes wrong on one is raised on all.

They talk over a gloo group of their own: beside NCCL, whose collectives a GPU would have to run,
and beside training's gloo groups, whose order of collectives a save in the background would
disturb.

A save or a load is several phases for the watch (`executor.ranks.watch`): what a rank does by
itself, and between, what it waits for. So who hangs is blamed, and each part has the timeout to
itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from meshwright.executor.ranks import launch
from meshwright.executor.ranks.background import Background
from meshwright.executor.ranks.watch import progress

WAITING = "waiting for the other ranks' checkpoint"
T = TypeVar("T")


@cache
def _gloo(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """All ranks on the host's network; made once per world, by all of them together."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=launch.timeout_s()))


def gloo_group() -> dist.ProcessGroup:
    """All ranks, over the hosts' network; the first call is collective."""
    return _gloo(dist.group.WORLD)


@contextmanager
def part(phase: str, *, waits: bool = False) -> Iterator[None]:
    """A phase inside the one that the main thread is in, which begins anew after it. What goes on
    in the background is none."""
    around = progress.where
    if around.phase is None or isinstance(threading.current_thread(), Background):
        yield
        return
    progress.enter(phase, waits=waits)
    yield  # an error leaves the phase as it is: it says where the error came from
    progress.enter(around.phase, waits=around.waits)


def together(group: dist.ProcessGroup | None, prepare: Callable[[], T]) -> T:
    """What `prepare` makes here. What it raises on a rank is raised on all, that of the first
    rank."""
    made: T | None = None
    failed: Exception | None = None
    try:
        made = prepare()
    except Exception as error:  # noqa: BLE001 - the others wait for this rank, whatever happens
        failed = error
    for raised in told_by_all(group, failed):
        if raised is not None:
            raise raised
    return made  # type: ignore[return-value]


def told_by_all(group: dist.ProcessGroup | None, told: T) -> list[T]:
    """What every rank tells, on every rank. For little: each gets as much as the longest from
    all."""
    if group is None:
        return [told]
    heard: list[Any] = [None] * dist.get_world_size(group)
    with part(WAITING, waits=True):
        dist.all_gather_object(heard, told, group=group)
    return heard


def told_to_first(group: dist.ProcessGroup | None, told: T) -> list[T]:
    """What every rank tells, on rank 0; nothing on the others."""
    if group is None:
        return [told]
    heard: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else []
    with part(WAITING, waits=True):
        dist.gather_object(told, heard or None, dst=0, group=group)
    return heard


def told_by(group: dist.ProcessGroup, rank: int, told: T) -> T:
    """What one rank tells, on every rank."""
    box = [told]
    with part(WAITING, waits=True):
        dist.broadcast_object_list(box, src=rank, group=group)
    return box[0]


def on_first(group: dist.ProcessGroup | None, decide: Callable[[], T]) -> T:
    """What `decide` returns, or raises, on rank 0, on every rank."""
    if group is None:
        return decide()
    decided: tuple[Any, Exception | None] = None, None
    if dist.get_rank(group) == 0:
        try:
            decided = decide(), None
        except Exception as error:  # noqa: BLE001 - the others wait for it, whatever happens
            decided = None, error
    made, failed = told_by(group, 0, decided)
    if failed is not None:
        raise failed
    return made


@contextmanager
def failing(what: str) -> Iterator[None]:
    """RuntimeError saying `what` failed, and why on which rank, for any error inside."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one device: known
            yield
    except CheckpointException as error:
        each = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
        raise RuntimeError(f"{what} ({each})") from error
    except Exception as error:
        raise RuntimeError(f"{what} ({error})") from error
