"""Ctrl-C in a rank: Python raises KeyboardInterrupt when its main thread runs bytecode again, which
a rank that waits for others inside of a library may never do.

The C handler of a signal writes to a descriptor at once, whatever the main thread does. A thread
reads there, and where the interrupt is not raised within `PATIENCE_S` it ends the rank. Code that
catches KeyboardInterrupt has all the time that it wants.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

PATIENCE_S = 3.0


class Interrupts:
    """Calls `ends` where SIGINT does not become a KeyboardInterrupt; nothing where the process
    handles the signal in a way of its own, or this is not its main thread."""

    def __init__(self, ends: Callable[[], None]) -> None:
        self.ends = ends
        self.raised = threading.Event()
        self.installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if not self.installed:
            return
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # somebody else listens
            signal.set_wakeup_fd(before)
            self.installed = False
            return
        signal.signal(signal.SIGINT, self._raise)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._listen, name="meshwright-interrupts", daemon=True).start()

    def close(self) -> None:
        """Handle the signal as before."""
        if not self.installed:
            return
        self.installed = False
        with suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGINT) == self._raise:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            found = signal.set_wakeup_fd(-1)
            if found not in (-1, self.writer.fileno()):
                signal.set_wakeup_fd(found)
        self.writer.close()  # ends the thread

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.raised.set()
        signal.default_int_handler(number, frame)

    def _listen(self) -> None:
        with self.reader:
            while numbers := self.reader.recv(64):
                if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) != self._raise:
                    continue
                if not self.raised.wait(PATIENCE_S) and self.installed:
                    self.ends()
                self.raised.clear()


def _forget() -> None:
    """In a forked process: its signals are not this one's."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
