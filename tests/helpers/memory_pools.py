"""Two memories on one CPU, each with a counted budget, that tell where every tensor lies.

The executor crosses between device and host by a few functions alone, `to_host` and the ways back;
all else stays where its operands lie. So on a CPU, where both memories are one, they can be told
apart: what `to_host` makes is the host's, what an operator makes is where its tensors are, and made
of no tensor it is the device's. An operator on tensors of both is an error, as on a GPU; only
copies cross. An allocation beyond a budget is an error where it is made.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from meshwright.executor.backward import away
from meshwright.executor.parameters import block_weights, parameters, reducer

DEVICE, HOST = "device", "host"
COPIES = ("copy", "detach", "c10d", "set_", "alias")  # in the names of operators that may cross


class PoolError(RuntimeError):
    """A memory that is full, or an operator on tensors of both."""


class MemoryPools(TorchDispatchMode):
    """Counts bytes of both memories while it is entered; `live` now, `peak` at most."""

    def __init__(self, *, device_bytes: float = math.inf, host_bytes: float = math.inf) -> None:
        super().__init__()
        self.budget = {DEVICE: device_bytes, HOST: host_bytes}
        self.live = {DEVICE: 0, HOST: 0}
        self.peak = {DEVICE: 0, HOST: 0}
        self._known: dict[int, tuple[str, int, Any]] = {}  # by identity of the memory
        self._making = ""

    def pool_of(self, x: torch.Tensor) -> str:
        """Where a tensor lies; what was never seen is the device's."""
        known = self._known.get(x.untyped_storage()._cdata)
        return DEVICE if known is None else known[0]

    def place(self, tensors: Iterable[torch.Tensor], pool: str) -> None:
        """Say where tensors lie that were made by something that knows no pools."""
        for x in tensors:
            self._forget(x.untyped_storage()._cdata)
            self._see(x, pool)

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """Context in which the executor's `to_host` makes tensors of the host, and all is
        counted."""
        with ExitStack() as stack:
            for crossing in (parameters, reducer, block_weights, away):
                stack.enter_context(mock.patch.object(crossing, "to_host", self._to_host))
            stack.enter_context(self._following_resizes())
            stack.enter_context(self)
            yield

    @contextmanager
    def _following_resizes(self) -> Iterator[None]:
        """Context in which memory that is freed and taken again under a tensor is counted: no
        operator passes the dispatcher then."""
        storages: Any = torch.UntypedStorage  # whose method is replaced
        resize = storages.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            known = self._known.get(storage._cdata)
            result = resize(storage, size)
            if known is not None:
                pool, before, released = known
                self._known[storage._cdata] = pool, size, released
                self._count(pool, size - before)
            return result

        with mock.patch.object(storages, "resize_", resized):
            yield

    def _count(self, pool: str, nbytes: int) -> None:
        self.live[pool] += nbytes
        self.peak[pool] = max(self.peak[pool], self.live[pool])
        if self.live[pool] > self.budget[pool]:
            raise PoolError(f"{pool}: {self.live[pool]} bytes of {self.budget[pool]:.0f}")

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        self._making = HOST
        try:
            made = torch.empty_like(x)
        finally:
            self._making = ""
        return made.copy_(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors comes here again
        given = [x for x in tree_leaves((args, kwargs)) if _plain(x)]
        pools = {self.pool_of(x) for x in given if x.dim()}  # numbers are read anywhere
        if len(pools) > 1 and not any(part in str(func) for part in COPIES):
            raise PoolError(f"{func} of tensors of host and device")
        result = func(*args, **(kwargs or {}))
        pool = self._making or next((self.pool_of(x) for x in given if x.dim()), DEVICE)
        for x in tree_leaves(result):
            if _plain(x):
                self._see(x, pool)
        return result

    def _see(self, x: torch.Tensor, pool: str) -> None:
        storage = x.untyped_storage()
        identity = storage._cdata
        if identity in self._known:
            return
        nbytes = storage.nbytes()
        released = weakref.ref(storage, self._released(identity))
        self._known[identity] = pool, nbytes, released
        self._count(pool, nbytes)

    def _released(self, identity: int) -> Callable[[Any], None]:
        return lambda _: self._forget(identity)

    def _forget(self, identity: int) -> None:
        if identity in self._known:
            pool, nbytes, _ = self._known.pop(identity)
            self.live[pool] -= nbytes


def _plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not is_traceable_wrapper_subclass(x)
