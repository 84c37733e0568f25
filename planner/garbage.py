"""How often Python looks for garbage while it plans."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (50_000, 20, 20)  # objects of a generation, and collections, before a next one


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collections of garbage are rare in here: a search makes millions of small objects that stay
    and are in no cycle, all of which every collection would go over again (a fifth of its time)."""
    before = gc.get_threshold()
    if before[0]:  # 0: the user switched it off
        gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
