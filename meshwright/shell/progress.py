"""Progress on stderr: on a terminal one line that is written over, with a bar where it is known how
much is done; few lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

BAR = 20  # letters
FIRST_S = 10.0  # until the first line where there is no terminal; the next come at doubled times
WATCHED = "meshwright.progress"  # the logger by which what takes long says where it is
USUAL_COLUMNS = 120
CLEAR = "\x1b[K"  # the rest of the line


class Progress:
    """Takes lines of progress inside `with`, and shows them on rank 0's stderr.

    On a terminal each takes the place of the last, after a bar for the `share` that is done, and as
    much of it as the terminal is wide. Elsewhere a line is written after `FIRST_S`
    seconds, and then whenever twice as much time has passed: what is short says nothing, and an
    hour nine lines. Where the environment says that this is another rank, nothing is shown.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = os.environ.get("RANK", "0") == "0"
        self.clock, self.began, self.next_s = clock, clock(), FIRST_S
        self.open = False  # a line on the terminal has no end yet

    def __call__(self, line: str, share: float | None = None) -> None:
        if not self.shown:
            return
        if sys.stderr.isatty():
            shown = (bar(share) + line)[: columns() - 1]
            sys.stderr.write(f"\r{shown}{CLEAR}")
            sys.stderr.flush()
            self.open = True
        elif (passed := self.clock() - self.began) >= self.next_s:
            sys.stderr.write(f"{line}, after {passed:.0f} s\n")
            sys.stderr.flush()
            while self.next_s <= passed:
                self.next_s *= 2

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.open:
            sys.stderr.write("\n")
            self.open = False


def bar(share: float | None) -> str:
    """`[#####               ] `; nothing where the share is not known."""
    if share is None:
        return ""
    done = "#" * round(BAR * min(max(share, 0.0), 1.0))
    return f"[{done:<{BAR}}] "


def columns() -> int:
    """Width of the terminal of stderr."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):  # it has no size, or is no file
        return USUAL_COLUMNS


@contextmanager
def progress_shown(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Inside `with`, show where tracing, searching, and reads and writes of checkpoints and weights
    are: on rank 0's stderr, on a terminal one line, elsewhere few lines of what takes long."""
    watched = logging.getLogger(WATCHED)
    before = watched.level, watched.propagate
    with Progress(clock) as said:
        handler = _Handler(said)
        watched.addHandler(handler)
        watched.setLevel(logging.DEBUG)
        watched.propagate = False
        try:
            yield
        finally:
            watched.removeHandler(handler)
            watched.propagate = before[1]
            watched.setLevel(before[0])


class _Handler(logging.Handler):
    """Hands records to a line of progress."""

    def __init__(self, said: Progress) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said(record.getMessage(), getattr(record, "share", None))
