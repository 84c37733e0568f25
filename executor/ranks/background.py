"""Background threads that use process groups: a rank leaves its groups only when they are done.

They are no daemons, so the interpreter, too, ends after them. They must communicate over a group of
their own, since the order of collectives within one is the same on all ranks only within a thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Background(threading.Thread):
    """A thread that runs `work` from now on, called `name` in the log."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=False)
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - kept for whoever waits, who may never come
            self._error = error
            log.error("%s failed: %s", self.name, error)

    def wait(self) -> None:
        """Return when the work is done. Raises its error, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def finish_all() -> None:
    """Join all background threads of this process; their errors stay for `wait`."""
    for thread in threading.enumerate():
        if isinstance(thread, Background):
            thread.join()
