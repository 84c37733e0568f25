"""Optimizer states in files on the node's flash, behind the same tensors as in host memory.

A file is made of the length of a tensor, reserved on its disk, mapped, and unlinked: it is gone
with the last tensor on its mapping, however the process ends. What is read or written of the tensor
is read from the file, and written back, by the system as memory allows. After each use the pages
that came into memory are written back and let go (`let_go`), so that no more of the states is
resident than what runs.

    weights   of a parameter whose `home` is one, which the optimizer reads and writes
    moments   that the optimizer's first step makes like them, in a file from the start on
              (`_LikeThem`); what it makes otherwise, or is loaded, is moved there around a step

The folder is that of the environment variable `MESHWRIGHT_NVME`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from meshwright.executor.devices import has_streams, to_host
from meshwright.executor.errors import StateError
from meshwright.executor.host_values import has_values
from meshwright.profiles.hardware.host import FOLDER_VARIABLE

_PREFIX = "meshwright-states-"
_MS_SYNC, _MADV_DONTNEED = 4, 4  # of <sys/mman.h> on Linux


def in_file(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in a file, which is there when this returns, and no more of it in memory
    than needed; in host memory without elements or values."""
    if not x.numel() or not has_values(x):
        return to_host(x)
    with torch.no_grad():
        mapped = _empty(x, x.dtype).copy_(x)
    let_go(mapped)
    return mapped


def empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty_like`, in a file where the tensor lies in one."""
    if not lies_in_file(x):
        return torch.empty_like(x, dtype=dtype)
    return _wrapped(_empty(_local(x), dtype), x)


def _staged(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Source of a copy to a device: the tensor, or of one in a file a copy in memory, pinned where
    the device has streams; the file's pages are let go."""
    if not lies_in_file(x):
        return x
    with torch.no_grad():
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=has_streams(device)).copy_(x)
    let_go(x)
    return copy


class Staging:
    """Tensors in files on their way to a device: no more than two blocks of them are in memory."""

    def __init__(self) -> None:
        self.last: Any = None  # what the copies of the latest block wait for

    def bring(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Sources of a block's copies to the device, after those of the block before have arrived;
        the tensors themselves where none lies in a file."""
        if not any(map(lies_in_file, tensors)):
            return [*tensors]
        if self.last is not None:
            self.last.synchronize()
            self.last = None
        return [_staged(x, device) for x in tensors]


def lies_in_file(x: torch.Tensor) -> bool:
    """Whether a tensor, or this rank's part of it, is mapped to one of these files."""
    local = _local(x)
    if local.device.type != "cpu" or not has_values(local):
        return False
    name = local.untyped_storage().filename
    return name is not None and Path(name).name.startswith(_PREFIX)


def let_go(x: torch.Tensor) -> None:
    """Write back what was written of a tensor in a file, and let its pages go; others are left."""
    if not lies_in_file(x):
        return
    storage = _local(x).untyped_storage()
    start = ctypes.c_void_p(storage.data_ptr())
    size = ctypes.c_size_t(storage.nbytes())
    library = _library()
    if library.msync(start, size, _MS_SYNC):
        number = ctypes.get_errno()
        raise StateError(
            f"optimizer states can't be written back: {os.strerror(number)}",
            place=f"{FOLDER_VARIABLE}={os.environ.get(FOLDER_VARIABLE, '')!r}",
            way_out="continue from a checkpoint, with a folder on another disk",
        )
    library.madvise(start, size, _MADV_DONTNEED)


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros of another's shape in a file of its own. Raises `StateError` for a folder
    that can't be written, or has no room."""
    nbytes = like.numel() * dtype.itemsize
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder:
        raise StateError(
            "the plan has optimizer states in files, of which no folder is known",
            place=f"environment variable {FOLDER_VARIABLE}",
            legal="a folder on flash of this node",
            way_out="set it for every rank, or drop nvme from the plan's offload",
        )
    try:
        handle, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        try:
            os.posix_fallocate(handle, 0, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            mapped = torch.from_file(path, shared=True, size=like.numel(), dtype=dtype)
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        raise StateError(
            f"={folder!r}: no file of {nbytes} bytes for optimizer states ({error.strerror})",
            place=f"environment variable {FOLDER_VARIABLE}",
            legal="a folder on flash of this node that can be written, with room for the states",
            way_out="name another, or take less nvme in the plan's offload",
        ) from error
    return mapped.view(like.shape)


@cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class _LikeThem(TorchDispatchMode):
    """Makes in files what is made like a tensor in a file: an optimizer's moments."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = dict(kwargs or {})
        elsewhere = torch.device(arguments.get("device") or "cpu").type != "cpu"
        if func is not torch.ops.aten.zeros_like.default or elsewhere or not lies_in_file(args[0]):
            return func(*args, **arguments)
        return empty_like(args[0], arguments.get("dtype") or args[0].dtype)  # a new file is zeros


class _Steps:
    """Work around the steps of optimizers with parameters in files."""

    def __init__(self) -> None:
        self.mode: Any = None  # that a step runs in which makes states

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave()  # of a step that raised
        held = list(_in_files(optimizer))
        _move(optimizer, held)
        if any(p.grad is not None and not optimizer.state.get(p) for p in held):
            self.mode = _LikeThem()  # type: ignore[no-untyped-call]
            self.mode.__enter__()

    def _leave(self) -> None:
        innermost: Any = _get_current_dispatch_mode()
        if self.mode is not None and self.mode is innermost:
            innermost.__exit__(None, None, None)
        self.mode = None

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave()
        held = list(_in_files(optimizer))
        _move(optimizer, held)
        for p in held:
            for x in (p, *optimizer.state.get(p, {}).values()):
                if isinstance(x, torch.Tensor):
                    let_go(x)


@cache
def keep_states_in_files() -> None:
    """From now on what optimizers keep of parameters in files lies in files."""
    steps = _Steps()
    register_optimizer_step_pre_hook(steps.begin)
    register_optimizer_step_post_hook(steps.end)


def _in_files(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if lies_in_file(p))


def _move(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Put states of these parameters that lie in memory, and have as many elements, into files."""
    for p in parameters:
        state = optimizer.state.get(p, {})
        for name, x in state.items():
            if not isinstance(x, torch.Tensor) or lies_in_file(x):
                continue
            local = _local(x)
            if local.numel() == _local(p).numel() > 1:
                state[name] = _wrapped(in_file(local), x)


def _local(x: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, outside autograd; a plain tensor itself."""
    return x._local_tensor if isinstance(x, DTensor) else x


def _wrapped(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A local tensor as a DTensor where another is one."""
    if not isinstance(like, DTensor):
        return local
    make: Any = DTensor  # its constructor is untyped
    dtensor: torch.Tensor = make(local, like._spec, requires_grad=False)
    return dtensor
