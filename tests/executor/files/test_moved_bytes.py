"""What is said of bytes that move."""

from __future__ import annotations

import logging

import pytest

from meshwright.executor.files.moved_bytes import EVERY_S, MovedBytes

MIB = 2**20


def test_it_is_said_now_and_then_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with caplog.at_level(logging.DEBUG, "meshwright.progress"):
        moved = MovedBytes("reading", 4 * MIB, clock=lambda: now[0])
        for _ in range(4):
            moved(MIB)
            now[0] += 0.6 * EVERY_S
        now[0] += EVERY_S
        moved(512)  # what a file holds beside its tensors
    assert [record.getMessage() for record in caplog.records] == [
        "reading: 1 MiB of 4 MiB",
        "reading: 3 MiB of 4 MiB",
        "reading: 4 MiB of 4 MiB",
    ]


def test_nothing_is_said_where_nobody_watches(caplog: pytest.LogCaptureFixture) -> None:
    moved = MovedBytes("reading", 4 * MIB)
    with caplog.at_level(logging.INFO, "meshwright.progress"):
        moved(4 * MIB)
    assert not caplog.records
