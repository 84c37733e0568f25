"""Rare collections of Python's garbage while it plans."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (50_000, 20, 20)  # objects of a generation, and collections, before a next one

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []  # the thresholds before the first, for each thread inside


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collections of garbage are rare in here: a search makes millions of small objects that stay
    and are in no cycle, all of which every collection would go over again (a fifth of its time).
    Several threads may be in here; when the last one leaves, the thresholds are as before."""
    with _lock:
        _before.append(_before[0] if _before else gc.get_threshold())
        if _before[0][0]:  # 0: the user switched it off
            gc.set_threshold(*map(max, SELDOM, _before[0]))
    try:
        yield
    finally:
        with _lock:
            first = _before.pop()
            if not _before:
                gc.set_threshold(*first)
