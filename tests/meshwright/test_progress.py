"""Lines of progress, on a terminal and elsewhere."""

from __future__ import annotations

import logging
import re

import pytest

from meshwright.shell import progress
from meshwright.shell.progress import BAR, FIRST_S, Progress, bar, progress_shown
from tests.meshwright.commands import Captured, terminal


def lines(text: str) -> list[str]:
    """What was shown, one after another."""
    return [line for line in re.sub(r"\x1b\[K", "", text).split("\r") if line.strip()]


def test_a_bar_shows_the_share_that_is_done() -> None:
    assert bar(None) == "" and bar(0.5) == f"[{'#' * (BAR // 2)}{' ' * (BAR // 2)}] "
    assert bar(-1.0).count("#") == 0 and bar(2.0).count("#") == BAR


def test_records_with_a_share_have_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    watched = logging.getLogger("meshwright.progress")
    with progress_shown():
        watched.debug("reading", extra={"share": 0.25})
        watched.debug("tracing")
    shown = lines(stream.getvalue())
    assert shown == [f"{bar(0.25)}reading", "tracing\n"]


def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setattr(progress, "columns", lambda: 40)
    with Progress() as said:
        said("x" * 100, 1.0)
    (line,) = lines(stream.getvalue())
    assert len(line.rstrip("\n")) == 39


def test_elsewhere_lines_are_few_and_plain(capsys: Captured) -> None:
    now = [0.0]
    with Progress(clock=lambda: now[0]) as said:
        for _ in range(100):
            now[0] += FIRST_S / 10
            said("reading", 0.5)
    err = capsys.readouterr().err
    assert err.splitlines() == [f"reading, after {s:.0f} s" for s in (10, 20, 40, 80)]


def test_on_a_terminal_lines_take_the_place_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with Progress() as said:
        said("one of two")
        said("two")
    shown = stream.getvalue()
    assert (shown.count("\r"), shown.count("\n")) == (2, 1) and shown.endswith("\n")
    monkeypatch.setenv("RANK", "1")
    with Progress() as said:
        said("by another rank")
    assert stream.getvalue() == shown
