"""Tests price from the catalog: what was measured on this machine is out of their sight."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("shared_machine", deadline=None)  # a slow moment is no failure
settings.load_profile("shared_machine")


@pytest.fixture(autouse=True, scope="session")
def no_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("MESHWRIGHT_CACHE")
    os.environ["MESHWRIGHT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["MESHWRIGHT_CACHE"]
    if before is not None:
        os.environ["MESHWRIGHT_CACHE"] = before
