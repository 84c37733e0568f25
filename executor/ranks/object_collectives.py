"""Collectives on Python objects over gloo, which raise on all ranks what one of them raised.

They have a process group of their own: beside NCCL, whose collectives a GPU would have to run, and
beside training's gloo groups. What is saved in the background has another one, as its collectives
come among the main thread's in another order on each rank. The group is None on one device.

A rank that waits in one of them is in the watchdog's phase `WAITING` (`watchdog.py`); its own work
before and after is a phase apart. So the rank that hangs is blamed, and each phase has the whole
timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.executor.errors import DamagedError, StateError
from meshwright.executor.ranks import launch
from meshwright.executor.ranks.background import Background
from meshwright.executor.ranks.watchdog import progress
from meshwright.profiles.inputs import MeshwrightError

WAITING = "waiting for the other ranks"
OBJECTS, BESIDE = "objects", "objects in the background"  # the descriptions of groups
T = TypeVar("T")


@cache
def _gloo(world: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A gloo group of all ranks, made once per world."""
    timeout = timedelta(seconds=launch.timeout_s())
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
    return group


def gloo_group(name: str = OBJECTS) -> dist.ProcessGroup | None:
    """All ranks over the hosts' network, by default that of the main thread; None in a rehearsal,
    where this process speaks for all of them. The first call of a name is collective."""
    if launch.rehearsed():
        return None
    world = dist.group.WORLD
    assert world is not None, "no process group"
    return _gloo(world, name)


@contextmanager
def phase(name: str, *, waits: bool = False) -> Iterator[None]:
    """A watchdog phase inside the main thread's current one, which begins anew after it. Work in
    the background has no phase."""
    around = progress.activity
    if around.phase is None or isinstance(threading.current_thread(), Background):
        yield
        return
    progress.enter(name, waits=waits)
    yield  # an error leaves the phase as it is: it says where the error came from
    progress.enter(around.phase, waits=around.waits)


def run_on_all(group: dist.ProcessGroup | None, run: Callable[[], T]) -> T:
    """`run()` of this rank. Collective; raises on all ranks the error of the first that has one."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(run())
    except Exception as raised:  # noqa: BLE001 - the others wait for this rank, whatever happens
        error = raised
    for failure in all_gather_object(group, error):
        if failure is not None:
            raise failure
    return result[0]


def run_on_first(group: dist.ProcessGroup | None, run: Callable[[], T]) -> T:
    """`run()` of rank 0, or its error, broadcast to all ranks. Collective."""
    if group is None:
        return run()
    outcome: tuple[Any, Exception | None] = None, None
    if dist.get_rank(group) == 0:
        try:
            outcome = run(), None
        except Exception as error:  # noqa: BLE001 - the others wait for it, whatever happens
            outcome = None, error
    result: tuple[T, Exception | None] = broadcast_object(group, 0, outcome)
    if result[1] is not None:
        raise result[1]
    return result[0]


def all_gather_object(group: dist.ProcessGroup | None, x: T) -> list[T]:
    """Every rank's object, on every rank. For small ones: each takes as much room as the largest
    from all."""
    if group is None:
        return [x]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with phase(WAITING, waits=True):
        dist.all_gather_object(gathered, x, group=group)
    return gathered


def gather_object(group: dist.ProcessGroup | None, x: T) -> list[T]:
    """Every rank's object, on rank 0; an empty list on the others."""
    if group is None:
        return [x]
    gathered: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else []
    with phase(WAITING, waits=True):
        dist.gather_object(x, gathered or None, dst=0, group=group)
    return gathered


def broadcast_object(group: dist.ProcessGroup | None, rank: int, x: T) -> T:
    """The object of `rank`, on every rank."""
    if group is None:
        return x
    box = [x]
    with phase(WAITING, waits=True):
        dist.broadcast_object_list(box, src=rank, group=group)
    return box[0]


@contextmanager
def raising_runtime_error(what: str, kind: type[MeshwrightError] = DamagedError) -> Iterator[None]:
    """Turn any error inside into one of that kind: what failed, and why on which rank."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what} ({error})") from error


# --- batches of every rank ------------------------------------------------------------------------

# Batches of an iterable that every rank has for itself: as many on all of them, or an error.


def together(what: str, batches: Iterable[Any], group: dist.ProcessGroup | None) -> Iterator[Any]:
    """The batches, as long as every rank of the group has one. Raises on all ranks where one fails
    or ends before others. Collective."""
    iterator, end = iter(batches), object()
    while True:
        batch, error = end, None
        try:
            batch = next(iterator, end)
        except Exception as raised:  # noqa: BLE001 - the others wait for this rank
            error = raised
        told = all_gather_object(group, (batch is end, error))
        if failure := next((error for _, error in told if error is not None), None):
            raise failure
        ended = [rank for rank, (done, _) in enumerate(told) if done]
        if len(ended) == len(told):
            return
        if ended:
            raise StateError(
                f": the batches ended on ranks {ended} before they did on others",
                place=what,
                legal="as many batches on every rank",
                way_out="give data_loader the whole dataset, or the same batches to all ranks; "
                "use no DistributedSampler",
            )
        yield batch
