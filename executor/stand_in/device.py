"""The device that stands for a cluster's GPU in a rehearsal: fake tensors of a device of its own.

torch lets Python register one device beside its own (PrivateUse1, torch >= 2.10): operators know it
as another device than the host, autograd runs backward on it, and its module's streams and events
are ours. So what is done otherwise on a GPU than on a CPU is done in a rehearsal, too, down to
`fully_shard`'s streams, and an operator that is given a tensor of the host beside one of the device
raises. (Fake tensors of device "cuda" get no further than the forward in a build of torch without
CUDA: autograd asks for the device's own streams.)

Streams here are names and clocks (`streams.py`); no work is queued on them. The device stays
registered until the process ends, and is not available to anything but a rehearsal. A process that
has a GPU, or another such device, gets none, and ranks are rehearsed as CPU ranks: torch would take
the stand-in for its accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

from meshwright.executor.devices import HOST
from meshwright.executor.stand_in.kernels import HALVES, register_kernels
from meshwright.executor.stand_in.streams import ORDER, Event, MixedDevicesError, Stream

NAME = "rehearsed"
FakeWork: Any = getattr(_distributed_c10d, "FakeWork", dist.Work)  # private
_SET_DATA: Any = getattr(torch.Tensor.data, "__set__")  # noqa: B009  # a slot mypy doesn't know


class Module:
    """`torch.rehearsed`: what `torch.cuda` is for CUDA, as far as training asks for it."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event  # named as in torch.cuda
        self.seeds: list[int] = []
        self.kernels: Sequence[torch.library.Library] = ()  # to live as long

    def is_available(self) -> bool:
        """Not to anything but a rehearsal."""
        return False

    def is_initialized(self) -> bool:
        """Always: there is nothing to initialise."""
        return True

    def device_count(self) -> int:
        """One."""
        return 1

    def current_device(self) -> int:
        """The number of the only one."""
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that operators are queued on."""
        return ORDER.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Context in which operators are queued on a stream."""
        before, ORDER.current = ORDER.current, stream
        try:
            yield
        finally:
            ORDER.current = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Context of a device: there is one."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all streams."""
        ORDER.wait_for_all()

    def manual_seed(self, seed: int) -> None:
        """Takes note: fake tensors draw nothing."""
        self.seeds.append(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Nothing."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return list(HALVES)

    def _is_in_bad_fork(self) -> bool:
        return False


def device_for(backend: str) -> tuple[torch.device, str]:
    """The device for ranks of a cluster with a communication backend; and why it is the host, where
    it should be another."""
    if backend == "gloo":
        return HOST, ""
    why = _why_none()
    if why:
        return HOST, f"{backend} ranks as such, but as CPU ranks: {why}"
    module()
    return torch.device(NAME, 0), ""


def _why_none() -> str:
    if getattr(torch, NAME, None) is not None:
        return ""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} has no devices made in Python"
    if torch.cuda.is_available():
        return "this process has a GPU, which torch would pass over; hide it from the process"
    name = torch._C._get_privateuse1_backend_name()
    return "" if name == "privateuseone" else f"torch's extra device is {name!r} here"


@cache
def module() -> Module:
    """The stand-in's module; registers the device where it is the first call."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    # autograd starts its threads for the devices that it finds at the first backward of a process:
    # with none, a process can still be forked afterwards
    torch.zeros((), requires_grad=True).backward()
    made = Module()
    setup: Any = backend_registration._setup_privateuseone_for_python_backend
    setup(NAME, made, _hook())
    dist.Backend.backend_capability[dist.Backend.FAKE].append(NAME)
    made.kernels = register_kernels(NAME)
    return made


@contextmanager
def standing_in() -> Iterator[None]:
    """Context in which the stand-in runs a rank, from the beginning of its order."""
    ORDER.begin()
    ORDER.followed = True
    # whose streams are made in C++: a device in Python has none
    accelerator: Any = torch.accelerator
    works: Any = FakeWork
    current, wait = accelerator.current_stream, works.wait

    def waited(work: Any, *args: Any) -> Any:
        ORDER.awaited(work)
        return wait(work, *args)

    accelerator.current_stream, works.wait = module().current_stream, waited
    try:
        yield
    finally:
        ORDER.followed = False
        accelerator.current_stream, works.wait = current, wait


def _hook() -> Any:
    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return False

    return Hook()


class MovingData(TorchFunctionMode):
    """Lets `x.data = y` take `x` to the stand-in: torch allows it between its own devices alone.
    For tensors that no graph knows yet."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA and args[0].device != args[1].device:
            x, y = args[0], args[1].detach()
            if isinstance(x, torch.nn.Parameter):
                y = torch.nn.Parameter(y, requires_grad=x.requires_grad)
            torch._C._swap_tensor_impl(x, y)
            x.__dict__, y.__dict__ = y.__dict__, x.__dict__
            return None
        return func(*args, **(kwargs or {}))


def mixes_devices(error: RuntimeError) -> bool:
    """Whether an error is that of an operator given tensors of several devices."""
    names = {type(error).__name__, str(error).split(" for ")[0]}
    return not names.isdisjoint((
        MixedDevicesError.__name__,
        "FakeTensorDeviceMismatchError",
        "Unhandled FakeTensor Device Propagation",  # torch 2.11
    ))  # fmt: skip
