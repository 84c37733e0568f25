"""The cache's files under what others do to them: locks, races, crafted contents, flipped bits."""

import logging
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs.files import MAX_MEASURED_BYTES, irregular
from meshwright.profiles.profile import load_profile
from meshwright.profiles.store import DeviceId, Measurements, Store
from tests.helpers.tiers import second_tier
from tests.profiles.test_store import HERE, aside, call, some, timing

TRIALS, WRITERS = 4, 4
SLOW_S = 10.0  # of CPU time: nobody's cache may cost a plan so much


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, lock_timeout_s=0.1)


def host() -> Cluster:
    return Cluster.local(1, "cpu", measure=False)


def test_a_locked_cache_is_read_and_written_once_it_is_free(store: Store) -> None:
    store.add(some())
    more = Measurements(device=HERE, operators={call(9): timing()})
    with FileLock(f"{store.file_of(HERE)}.lock", thread_local=False) as lock:
        assert store.read(HERE) == some()
        with pytest.raises(OSError, match=r"profile cache .*lock.*MESHWRIGHT_CACHE"):
            store.add(more)
        release = threading.Timer(0.2, lock.release)
        release.start()
        Store(store.path, lock_timeout_s=60).add(more)
        release.join()
    assert len(store.read(HERE).operators) == 3 and not aside(store)


@second_tier("one writer waits for another's lock, and a broken file is moved aside")
def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Processes that make the cache together: in every other trial out of one that is broken."""
    context = multiprocessing.get_context("fork")
    for trial in range(TRIALS):
        store = Store(tmp_path / str(trial), lock_timeout_s=60)
        if trial % 2:
            store.path.mkdir()
            store.file_of(HERE).write_bytes(b"no measurements" * 100)
        ready = context.Barrier(WRITERS)
        makes = [(ready, store, k) for k in range(WRITERS)]
        writers = [context.Process(target=_write_when, args=each) for each in makes]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(timeout=60)
        assert [writer.exitcode for writer in writers] == [0] * WRITERS
        assert store.read(HERE).operators.keys() == {call(k + 1) for k in range(2 * WRITERS)}
        assert len(aside(store)) == trial % 2


def test_a_file_that_is_moved_aside_while_it_is_looked_at_is_none(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process does that found it broken."""
    store.add(some())

    def moved(path: Path) -> str:
        kind = irregular(path)
        path.rename(path.with_suffix(".unusable"))
        return kind

    monkeypatch.setattr("meshwright.profiles.store.irregular", moved)
    assert not store.read(HERE).operators


def _write_when(ready: threading.Barrier, store: Store, k: int) -> None:
    ready.wait(timeout=60)
    for rows in (2 * k + 1, 2 * k + 2):
        store.read(HERE)
        store.add(Measurements(device=HERE, operators={call(rows): timing()}))


CRAFTED = {
    "nested": b"[" * 100_000, "no text": b"\xff\xfe\x00", "no JSON": b"no measurements" * 100,
    "a huge number": b'{"kind": "meshwright profile", "format": ' + b"9" * 100_000 + b"}",
    "a key twice": b'{"format": 1, "format": 1}', "another kind": b'{"kind": "plan", "format": 1}',
    "nothing": b"", "too long": b" " * (MAX_MEASURED_BYTES + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_contents_cost_little_and_are_moved_aside(
    store: Store, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(some())
    store.file_of(HERE).write_bytes(CRAFTED[name])
    started_s = time.process_time()
    with caplog.at_level(logging.WARNING):
        _all_reads(store)
    assert time.process_time() - started_s < SLOW_S
    (kept,), (said,) = aside(store), caplog.messages
    assert kept.read_bytes() == CRAFTED[name] and str(store.file_of(HERE)) in said
    store.add(some())
    assert store.read(HERE) == some()


def _all_reads(store: Store) -> None:
    store.devices()
    store.read(HERE)
    load_profile(host(), store)


def test_flipped_bits_cost_no_more_than_the_cache(store: Store, tmp_path: Path) -> None:
    """Reading is no error, and what is written is found."""
    store.add(some())
    whole, chance = store.file_of(HERE).read_bytes(), random.Random(0)
    for k in range(60):
        broken = Store(tmp_path / str(k), lock_timeout_s=0.1)
        broken.path.mkdir()
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        broken.file_of(HERE).write_bytes(flipped)
        _all_reads(broken)
        broken.add(some())
        assert broken.read(HERE).operators.items() >= some().operators.items()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_left_alone(store: Store, make: Callable[[Path], None]) -> None:
    make(store.file_of(HERE))
    assert load_profile(host(), store) is None
    with pytest.raises(OSError, match=r"profile cache .*MESHWRIGHT_CACHE"):
        store.add(some())
    assert not aside(store)


def test_a_link_stays_one(store: Store, tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere", store.file_of(HERE)
    link.symlink_to(target)
    store.add(some())
    assert link.is_symlink() and target.exists() and store.read(HERE) == some()


def test_a_file_of_another_device_is_not_taken_for_ones_own(store: Store) -> None:
    other = DeviceId(name="a chip", driver="2.0", torch="2.13.0")
    store.add(some(other))
    store.file_of(other).rename(store.file_of(HERE))
    assert store.read(HERE) == Measurements(device=HERE)


def test_what_no_file_takes_leaves_it_as_it_is(store: Store) -> None:
    store.add(some())
    driver = "x" * (MAX_MEASURED_BYTES + 1)
    with pytest.raises(ValueError, match="bytes"):
        store.add(some(DeviceId(name="a chip", driver=driver, torch="2")))
    assert store.read(HERE) == some()
    assert not aside(store)
