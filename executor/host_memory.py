"""Optimizer states in host memory (ZeRO-Offload): the ways to the host and back.

Of an offloaded parameter `stored` lies in host memory (pinned, where the device has streams), and
so does what the optimizer makes of it: a torch optimizer's states lie where its parameters do, and
it steps there. The leaf stays on the device:

    in a backward         the gradient is copied to the host as it is made, or reduced
                          (`executor/parameters/reducer.py`), and added up there
    before a forward      the stored weight is copied to the device on a stream of its own and cast
                          there, block by block in the order of the forward, which waits for its own

A weight that `fully_shard` gathers (ZeRO-3) has no leaf of its own on the device: torch copies its
shard there for each gather, and its gradient back as it is scattered. On a CPU rank both memories
are one, and the copies are real: `memory_pools.py` of the tests counts them apart.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.executor.devices import has_streams, module_of

log = logging.getLogger(__name__)

PIECE = 2**24  # elements that are on the device in two dtypes at once


class Aside:
    """A stream beside the current one, for copies; on a CPU there is none, and all is done at once.

    What is made in it may be read by the current stream until the next time it is entered: by then
    it waits for that, before it takes the memory again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = module_of(device) if has_streams(device) else None
        self.stream: Any = None  # made when it is first entered

    @contextmanager
    def entered(self, *, waits: bool = True) -> Iterator[None]:
        """Context in which work is given to the stream, after all that the current one was given.
        Without gradients (an evaluation) the host `waits` for it: nothing later says that the
        host's memory may be written again."""
        if self.module is None:
            yield
            return
        if self.stream is None:
            self.stream = self.module.Stream(self.device)
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            yield
        if waits and not torch.is_grad_enabled():
            self.stream.synchronize()

    def mark(self) -> Any:
        """Event after all that the stream was given so far, for `wait`."""
        return None if self.module is None else self.stream.record_event()

    def wait(self, mark: Any) -> None:
        """Have the current stream wait for a mark."""
        if self.module is not None and mark is not None:
            self.module.current_stream(self.device).wait_event(mark)


def on_device(stored: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of a host tensor on the device of `like`, in its dtype: sent as it is, as the host
    casts slowly."""
    sent = torch.empty(stored.shape, dtype=stored.dtype, device=like.device)
    return sent.copy_(stored, non_blocking=True).to(like.dtype)


def fill(leaf: torch.Tensor, stored: torch.Tensor) -> None:
    """Copy a host tensor to one of its shape on the device: as it is, or in pieces to be cast."""
    if leaf.dtype == stored.dtype:
        leaf.copy_(stored, non_blocking=True)
        return
    pieces = zip(leaf.view(-1).split(PIECE), stored.view(-1).split(PIECE), strict=True)
    for piece, source in pieces:
        piece.copy_(on_device(source, piece))


def use_cores(device: torch.device) -> None:
    """Let the optimizer's step on the host have this rank's part of the cores: torchrun leaves each
    of several ranks one thread, which is enough for a GPU's host."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = max(1, (os.cpu_count() or 1) // ranks)
    if has_streams(device) and torch.get_num_threads() < cores:
        log.info("the optimizer steps on the host with %d threads", cores)
        torch.set_num_threads(cores)
