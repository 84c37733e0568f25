"""Work beside training that needs the process group: a rank leaves the group only when it is done.

Its threads are no daemons, so the interpreter, too, ends after them. They must talk over a group of
their own, since the order of collectives within one is the same on all ranks only within a thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Background(threading.Thread):
    """Does `work`, called `name`, from now on; `wait` for it."""

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
        """Return when the work is done; raises, once, what it raised."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def finish_all() -> None:
    """Return when no work is left in the background of this process; errors stay where they are."""
    for thread in threading.enumerate():
        if isinstance(thread, Background):
            thread.join()
