"""Differences between a GPU and the host, each in one place.

A device whose work is queued on streams has a module of torch's (`torch.cuda`; in a rehearsal the
stand-in's) with streams and events. The host has none: its work is done when the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

HOST = torch.device("cpu")


def has_streams(device: torch.device) -> bool:
    """Whether work is queued on streams: on every device but the host."""
    return device.type != HOST.type


def kind_of(device: torch.device) -> str:
    """The kind of a device, as costs are told apart by it: "cpu", or "cuda" for all others."""
    return "cuda" if has_streams(device) else "cpu"


def module_of(device: torch.device) -> Any:
    """The module of torch with a device's streams and events."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if has_streams(device):
        module_of(device).synchronize(device)


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device; to a GPU by pinned memory, without waiting."""
    if has_streams(device):
        x = _pinned(x).copy_(x)
    return x.to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in host memory; from a GPU it is only started, into pinned memory."""
    host = _pinned(x) if has_streams(x.device) else torch.empty_like(x)
    return host.copy_(x, non_blocking=True)


def on_device_of(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the host's (pinned) memory on the device, only started."""
    copy = torch.empty(x.shape, dtype=x.dtype, device=device)
    return copy.copy_(x, non_blocking=True)


def _pinned(x: torch.Tensor) -> torch.Tensor:
    """Pinned memory for a tensor; not by `pin_memory()`, which fake tensors lack."""
    return torch.empty_like(x, device=HOST, pin_memory=True)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Context in which the generators of the host and of the device start at `seed`."""
    if not has_streams(device):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    module = module_of(device)
    with torch.random.fork_rng(devices=[device], device_type=device.type):
        torch.default_generator.manual_seed(seed)  # alone: torch.manual_seed seeds every GPU
        with module.device(device):
            module.manual_seed(seed)
        yield


def random_states(device: torch.device) -> Callable[[], None]:
    """A function that puts the generators of the host and of the device back to their present
    states."""
    host = torch.get_rng_state()
    there = module_of(device).get_rng_state(device) if has_streams(device) else None

    def put_back() -> None:
        torch.set_rng_state(host)
        if there is not None:
            module_of(device).set_rng_state(there, device)

    return put_back


class Clock:
    """Moments of a device's work: of the stream's, where there are streams, else of the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        synchronize(device)
        self.origin = self.now()
        self.origin_s = time.perf_counter()

    def now(self) -> Any:
        """A moment: seconds, or an event on the stream."""
        if not has_streams(self.device):
            return time.perf_counter()
        event = module_of(self.device).Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another, exact after hours too. Waits for the device to reach
        it."""
        if not has_streams(self.device):
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """Moments in seconds of the host's clock. Waits for the device."""
        synchronize(self.device)
        if not has_streams(self.device):
            return list(moments)
        return [self.origin_s + float(self.origin.elapsed_time(m)) / 1e3 for m in moments]
