"""Saved activations of blocks in host memory, until their backward.

    forward     of block k all is sent as block k + 1 begins, beside it; by the end of that one the
                device holds none of it any more
    backward    of block k + 1 all that block k saved is fetched, beside it; block k waits for that

So the device holds what two neighbours saved of one micro-batch, and the host the rest. Memory is
sent as a whole, once, whatever windows on it are saved. In place of each tensor autograd holds a
window on its memory (by hooks on what it saves); with the last of these both copies are let go of.
Parameters, what the caller holds, and what is too small to be worth a copy stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.executor.devices import on_device_of, to_host
from meshwright.executor.host_memory import Aside
from meshwright.executor.host_values import window_on

LEAST_BYTES = 2**10  # of memory that is sent


class _Memory:
    """The memory of a saved tensor: on the device, on the host, or on its way."""

    __slots__ = ("__weakref__", "device", "host")

    def __init__(self, t: torch.Tensor) -> None:
        count = t.untyped_storage().nbytes() // t.dtype.itemsize
        self.device: torch.Tensor | None = window_on(t, t.dtype, (0, (count,), (1,)))
        self.host: torch.Tensor | None = None

    def send(self) -> None:
        if self.host is None and self.device is not None:
            self.host = to_host(self.device)

    def fetch(self, device: torch.device) -> None:
        if self.device is None and self.host is not None:
            self.device, self.host = on_device_of(self.host, device), None


class _Block:
    """Saved tensors of one block, fetched together. `before` is the block that was sent before
    it."""

    def __init__(self, side: Aside, device: torch.device, before: _Block | None) -> None:
        self.side = side
        self.device = device
        self.before = before
        self.saved: list[weakref.ref[_Memory]] = []
        self.fetched = self.reached = False
        self.arrival: Any = None

    def send(self) -> list[_Memory]:
        """Send all of it that is still wanted; returns what is on its way."""
        leaving = [memory for memory in (ref() for ref in self.saved) if memory is not None]
        with torch.no_grad(), self.side.entered(waits=False):
            for memory in leaving:
                memory.send()
        return leaving

    def fetch(self) -> None:
        if self.fetched:
            return
        self.fetched = True
        with torch.no_grad(), self.side.entered(waits=False):
            for memory in (ref() for ref in self.saved):
                if memory is not None:
                    memory.fetch(self.device)
        self.arrival = self.side.mark()

    def reach(self) -> None:
        """The block's backward begins."""
        if self.reached:
            return
        self.reached = True
        self.fetch()
        self.side.wait(self.arrival)
        if self.before is not None:
            self.before.fetch()


class Saved:
    """A window on memory that a block's backward reads."""

    __slots__ = ("block", "dtype", "grad", "memory", "window")

    def __init__(self, t: torch.Tensor, memory: _Memory, block: _Block) -> None:
        self.memory = memory
        self.block = block
        self.window = t.storage_offset(), t.shape, t.stride()
        self.dtype, self.grad = t.dtype, t.requires_grad

    def read(self) -> torch.Tensor:
        """The tensor, on the device."""
        self.block.reach()
        assert self.memory.device is not None
        with torch.no_grad():
            window = window_on(self.memory.device, self.dtype, self.window)
        return window.requires_grad_(self.grad)


Held: TypeAlias = torch.Tensor | Saved


class Away:
    """One micro-batch of a stage on its way through the forward; what is saved of some blocks goes
    to the host. `staying` are tensors that the device holds anyway."""

    def __init__(self, side: Aside, device: torch.device, staying: Iterable[torch.Tensor]) -> None:
        self.side = side
        self.device = device
        self.staying = {_address(t) for t in staying}
        self.known: dict[int, tuple[StorageWeakRef, weakref.ref[_Memory]]] = {}
        self.before: _Block | None = None
        self.leaving: list[_Memory] = []  # what the block before saved
        self.departure: Any = None

    @contextmanager
    def saving(self, own: Callable[[], Iterable[torch.Tensor]], *, sends: bool) -> Iterator[None]:
        """Context of one block's forward, which reads its `own` parameters, and `sends` what it
        saves; of the first that doesn't the backward fetches what the last one sent."""
        block = _Block(self.side, self.device, self.before)
        staying: set[int] = set()

        def pack(t: torch.Tensor) -> Held:
            staying.update(_address(x) for x in (own() if not staying else ()))
            if self._stays(t) or _address(t) in staying:
                return t
            memory = self._memory(t) if sends else _Memory(t)
            block.saved.append(weakref.ref(memory))
            return Saved(t, memory, block)

        token = _PACK.set(pack)
        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            _PACK.reset(token)
        self.before = block if sends else None
        self.settle()
        if sends:
            self.leaving = block.send()
            self.departure = self.side.mark()

    def settle(self) -> None:
        """The device lets go of what was sent before."""
        self.side.wait(self.departure)
        for memory in self.leaving:
            memory.device = None
        self.leaving, self.departure = [], None

    def _stays(self, t: torch.Tensor) -> bool:
        plain = t.layout is torch.strided and not is_traceable_wrapper_subclass(t)
        if not plain or t.device.type != self.device.type or _address(t) in self.staying:
            return True
        return t.untyped_storage().nbytes() < LEAST_BYTES

    def _memory(self, t: torch.Tensor) -> _Memory:
        storage, memory = self.known.get(_address(t), (None, None))
        fresh = memory() if storage is not None and memory is not None else None
        if fresh is not None and storage is not None and not storage.expired():
            return fresh
        with torch.no_grad():
            fresh = _Memory(t)
        self.known[_address(t)] = StorageWeakRef(t.untyped_storage()), weakref.ref(fresh)
        return fresh


_PACK: ContextVar[Callable[[torch.Tensor], Held] | None] = ContextVar("what is sent", default=None)


def packer() -> Callable[[torch.Tensor], Held] | None:
    """Hook that packs a saved tensor until the backward; None where nothing goes to host memory."""
    return _PACK.get()


def unpack(held: Held) -> torch.Tensor:
    """The tensor that is held."""
    return held.read() if isinstance(held, Saved) else held


def _address(t: torch.Tensor) -> int:
    address: int = t.untyped_storage()._cdata
    return address
