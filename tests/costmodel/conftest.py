"""What all tests of the cost model share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def heap_of_others_aside() -> Iterator[None]:
    """A trace looks for caches among all objects that the collector knows: two thirds of its time,
    where torch and the tests before it are among them."""
    gc.freeze()
    yield
    gc.unfreeze()
