"""Reads of tensors by the host, also where they have no values.

In a rehearsal tensors are torch's fake ones: shapes, dtypes and memory without values. What ranks
agree on, or what decides the course of a step, is read through here, and each place says what a
rehearsal takes it for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def has_values(x: torch.Tensor) -> bool:
    """Whether a tensor has values: it is neither on meta nor fake."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def read(x: torch.Tensor, otherwise: Callable[[], Any]) -> Any:
    """The values of a tensor as numbers; `otherwise()` of one that has none. Waits for a GPU."""
    return x.tolist() if has_values(x) else otherwise()


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors begin at the same place in memory, in which both have elements."""
    if has_values(x) and has_values(y):
        return x.data_ptr() == y.data_ptr()
    same: bool = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return same and x.storage_offset() == y.storage_offset()


def is_sent(work: dist.Work) -> bool:
    """Whether a message has left; in a rehearsal, where nobody takes it: when it is asked."""
    return work.is_completed() or type(work).__name__ == "FakeWork"


def window_on(x: torch.Tensor, dtype: torch.dtype, window: tuple[Any, ...]) -> torch.Tensor:
    """The memory of a tensor, read as `dtype` through a window (offset, shape, strides), with no
    tie to it in autograd."""
    if not has_values(x) and x.dtype == dtype:  # a fake tensor's `set_` takes memory of its own
        offset, shape, strides = window
        return x.detach().as_strided(shape, strides, offset)
    read = torch.empty(0, dtype=dtype, device=x.device)
    read.set_(x.untyped_storage(), *window)
    return read


def with_values() -> AbstractContextManager[Any]:
    """Context in which new tensors have values in a rehearsal, too: ranks of a mesh."""
    context: AbstractContextManager[Any] = unset_fake_temporarily()
    return context


_unrun: ContextVar[dict[str, str] | None] = ContextVar("unrun", default=None)


@contextmanager
def noting_unrun(names: dict[str, str]) -> Iterator[None]:
    """Context in which code of the user's that can't run without values, and is replaced by what it
    was declared to be, is written down: its name, and why."""
    token = _unrun.set(names)
    try:
        yield
    finally:
        _unrun.reset(token)


def note_unrun(name: str, error: Exception) -> None:
    """Write down code that didn't run; raises its error where nobody does so."""
    names = _unrun.get()
    if names is None:
        raise error
    lines = str(error).strip().splitlines()
    names.setdefault(name, f"{type(error).__name__}: {lines[0][:200]}" if lines else str(error))
