"""Tests price from the catalog: what was measured on this machine is out of their sight."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("shared_machine", deadline=None)  # a slow moment is no failure
settings.load_profile("shared_machine")


@pytest.fixture(autouse=True)
def without_the_heap_of_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where CPU seconds are limited, collections don't walk what earlier tests have left."""
    limited = hasattr(request.module, "LATE_S")
    if limited:
        gc.freeze()
    yield
    if limited:
        gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def no_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("MESHWRIGHT_CACHE")
    os.environ["MESHWRIGHT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["MESHWRIGHT_CACHE"]
    if before is not None:
        os.environ["MESHWRIGHT_CACHE"] = before
