"""Gradients of what lies in host memory, on their way there as a backward makes them.

Each is copied on a stream of its own, in fp32, into pinned memory. The first of a step stays where
it arrives; those of later micro-batches are added to it on the host, which waits for them. At most
`UNDER_WAY` are on the device because of that: what one more would hold waits for the oldest.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from meshwright.costmodel.target import SENT_AT_ONCE
from meshwright.executor.devices import to_host
from meshwright.executor.host_memory import Aside


class GradientsToHost:
    """Adds up, by key, what it is given in one step."""

    def __init__(self, device: torch.device) -> None:
        self.aside = Aside(device)
        self.under_way: deque[tuple[int, torch.Tensor, torch.Tensor, Any]] = deque()
        self.there: dict[int, torch.Tensor] = {}

    def send(self, key: int, gradient: torch.Tensor) -> None:
        """Start the way of an fp32 gradient, which nobody writes to any more."""
        with torch.no_grad(), self.aside.entered(waits=False):
            arriving = to_host(gradient)
        self.under_way.append((key, gradient, arriving, self.aside.mark()))
        while len(self.under_way) > SENT_AT_ONCE:
            self._arrive()

    def _arrive(self) -> None:
        """Let the oldest go: the device takes its memory again when it has been read."""
        key, _gradient, arrived, mark = self.under_way.popleft()
        self.aside.wait(mark)
        if key not in self.there:
            self.there[key] = arrived
            return
        if mark is not None:
            mark.synchronize()
        with torch.no_grad():
            self.there[key].add_(arrived)

    def settle(self) -> None:
        """After a backward: wait for what is under way, which would lie on the device until the
        next one."""
        last = self.under_way[-1][3] if self.under_way else None
        while self.under_way:
            self._arrive()
        if last is not None:
            last.synchronize()

    def finish(self) -> dict[int, torch.Tensor]:
        """What arrived, all of it, for the host to read."""
        self.settle()
        there, self.there = self.there, {}
        return there
