"""Values that are made once per key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """Values made once per key, on the object whose lifetime they share; keys name all they depend
    on."""

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made where it is asked for first. What `make` raises is not kept."""
        try:
            return self[key]
        except KeyError:
            pass  # made outside, so that an error of `make` has no KeyError as its context
        value = self[key] = make()
        return value
