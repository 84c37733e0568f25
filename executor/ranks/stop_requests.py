"""Signals that ask a run to save: all ranks act on one at the same step.

    SIGTERM    save, and end: sent by torchrun and by schedulers some 30 s before they kill
    SIGUSR1    save, and go on

A rank that gets a signal says so at its next step. What ranks say is gathered while the step after
it runs, so that nobody waits, and in a process group of its own, which nothing else holds up: all
know it one step later.

Where torchrun starts ranks anew, as a host has come, each host's agent sends SIGTERM when it hears
of it. A rank that ends before its own agent has, is done with its work to that agent, and is not
started again: so a rank that others told to end waits for its signal (`await_signal`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import FrameType

import torch
import torch.distributed as dist

from meshwright.executor.ranks import launch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AGENTS_S = 10.0  # after which an agent that has not sent SIGTERM is taken not to


class StopRequests:
    """Signals that a run has received, from its start on, before the ranks have come together."""

    def __init__(self) -> None:
        self._here = torch.zeros(len(SIGNALS), dtype=torch.int32)
        self._said: tuple[torch.Tensor, dist.Work | None] | None = None
        self._told = False  # of SIGTERM, itself

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the hosts, None of one rank; made collectively when it is first asked
        for."""
        return dist.new_group(backend="gloo") if launch.world_size() > 1 else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals inside; not in another thread than the main one, which alone can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
            self._heard()  # nothing is left under way
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._here[SIGNALS.index(number)] = 1
        if number == signal.SIGTERM:
            self._told = True

    def await_signal(self) -> None:
        """Wait, in a run that a signal ends, until this process has got it, too, where its host has
        an agent of its own."""
        if os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            ends_s = time.monotonic() + AGENTS_S
            while not self._told and time.monotonic() < ends_s:
                time.sleep(0.05)

    def agreed(self) -> tuple[bool, bool]:
        """Whether to end, and whether to save: what any rank had been asked when all of them called
        this last. Collective."""
        ends, saves = self._heard()
        said = self._here.clone()
        self._here -= said  # not zeroed: a signal may come between
        work = None
        if self.group is not None:
            work = dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._said = said, work
        return ends, ends or saves

    def _heard(self) -> tuple[bool, bool]:
        if self._said is None:
            return False, False
        said, work = self._said
        if work is not None:
            work.wait()
        ends, saves = map(bool, said.tolist())
        return ends, saves
