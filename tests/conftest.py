"""Tiers of tests, shared fixtures, and what no run may leave behind.

Tests price from the catalog: what was measured on this machine is out of their sight.
"""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers import leftovers, ranks, stored

# a slow moment is no failure, and every run draws the same examples
settings.register_profile("shared_machine", deadline=None, derandomize=True, database=None)
settings.load_profile("shared_machine")


# cheap checks first, large files before small ones, so that two workers end together
ORDER = (
    "test_architecture.py", "test_docs.py", "test_errors.py", "costmodel", "parity", "executor",
    "user_code",
)  # fmt: skip


KILLERS = Path(__file__).parents[1] / "scripts" / "mutation" / "killers.json"


def _place(item: pytest.Item) -> int:
    part = Path(item.nodeid.partition("::")[0]).parts[1]
    return ORDER.index(part) if part in ORDER else len(ORDER)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the second tier of tests too")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        stored.clear_old()
    config.addinivalue_line(
        "markers", "second_tier(reason): run by --all only, but for what kills a mutant"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    killers, second = {*json.loads(KILLERS.read_text()).values()}, []
    for item in items:
        marks = [*item.iter_markers("second_tier")]
        if not all(mark.kwargs.get("reason") for mark in marks):
            raise pytest.UsageError(f"{item.nodeid}: second_tier without a reason")
        if marks and item.nodeid not in killers:
            second.append(item)
    items.sort(key=_place)
    if not config.getoption("--all") and second:
        config.hook.pytest_deselected(items=second)
        left = set(map(id, second))
        items[:] = [item for item in items if id(item) not in left]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure when it happens; the summary at the end repeats it."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed in {report.when}:\n{report.longreprtext}", flush=True)


@pytest.fixture(autouse=True, scope="session")
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, open file, socket or temporary file outlives the run."""
    with leftovers.temporary_files_in(tmp_path_factory.mktemp("temporary")):
        before = leftovers.seen()
        yield
        ranks.end_all()
        gc.unfreeze()
        gc.collect()
        assert not (left := leftovers.since(before)), "\n".join(left)


@pytest.fixture(autouse=True, scope="module")
def without_the_heap_of_others() -> None:
    """The collector doesn't walk again and again what earlier modules keep: half of all time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
