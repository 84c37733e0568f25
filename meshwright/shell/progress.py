"""Progress on stderr: on a terminal one line that is written over, with a bar where it is known how
much is done; few lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

BAR = 20  # letters
FIRST_S = 10.0  # until the first line where there is no terminal; the next come at doubled times
WATCHED = "meshwright.progress"  # the logger by which what takes long says where it is
USUAL_COLUMNS = 120
CLEAR = "\x1b[K"  # the rest of the line
LOGGED = ("loss", "lr", "grad_norm", "rows_per_s", "tokens_per_s", "mfu")  # of a step's numbers


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


class StepProgress:
    """Progress of a training run on rank 0's stderr: a line for the numbers of a step or an
    evaluation, of which it is a logger; on a terminal also a bar, written over, with the steps that
    are done and the time that is left."""

    REDRAWN_S = 0.1

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.began, self.drawn = clock, clock(), -math.inf
        self.first: int | None = None  # steps before this run
        self.step = 0
        self.total: int | None = None

    def at(self, step: int, total: int | None) -> None:
        """A step is done, of so many (None: as many as there are data)."""
        self.first = step - 1 if self.first is None else self.first
        self.step, self.total, now = step, total, self.clock()
        if sys.stderr.isatty() and (now - self.drawn >= self.REDRAWN_S or step == total):
            self.drawn = now
            sys.stderr.write(f"\r{self._drawn(now)[: columns() - 1]}{CLEAR}")
            sys.stderr.flush()

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """The line of a step or an evaluation."""
        of = f"/{self.total}" if self.total else ""
        known = [(name, metrics[name]) for name in LOGGED if name in metrics]
        known += [(name, x) for name, x in metrics.items() if name.startswith("eval_")]
        numbers = ", ".join(f"{name} {x:.4g}" for name, x in known)
        start, end = ("\r", CLEAR) if sys.stderr.isatty() else ("", "")
        sys.stderr.write(f"{start}step {self.step}{of}: {numbers}{end}\n")
        sys.stderr.flush()

    def _drawn(self, now: float) -> str:
        done_s, steps = now - self.began, self.step - (self.first or 0)
        text = f"{self.step} steps, {_minutes(done_s)}"
        if self.total is None:
            return text
        left_s = done_s / steps * (self.total - self.step)
        share = bar(self.step / self.total)
        return f"{share}{self.step}/{self.total} steps, {_minutes(done_s)}, {_minutes(left_s)} left"

    def end(self) -> None:
        """The bar stays as it is, above what is written next."""
        if self.drawn > -math.inf:
            sys.stderr.write("\n")


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
