"""Results that the user's functions keep (`functools.lru_cache`): those of a trace are of no use to
a later call."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def emptied_caches() -> Iterator[None]:
    """Context after which no cache holds fake tensors: those that do are emptied."""
    try:
        yield
    finally:
        for found in gc.get_objects():
            if type(found) is functools._lru_cache_wrapper and _holds_fake(gc.get_referents(found)):
                found.cache_clear()


def _holds_fake(value: Any) -> bool:
    if isinstance(value, tuple | list | dict):
        return any(map(_holds_fake, value.values() if isinstance(value, dict) else value))
    return isinstance(value, FakeTensor)
