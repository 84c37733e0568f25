"""The cache's file under what others do to it: locks, races, crafted contents and flipped bits."""

import logging
import multiprocessing
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs.cache_file import SCHEMA
from meshwright.profiles.profile import load_profile
from meshwright.profiles.store import DeviceId, Measurements, Store
from tests.profiles.test_store import HERE, aside, call, collective, some, timing

TRIALS, WRITERS = 4, 4
SLOW_S = 10.0  # of CPU time: nobody's cache may cost a plan so much


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "profile.sqlite", lock_timeout_s=0.1)


@pytest.fixture
def holder(store: Store) -> Iterator[sqlite3.Connection]:
    store.add(some())
    connection = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    with closing(connection):
        connection.execute("BEGIN EXCLUSIVE")
        yield connection


def test_a_locked_cache_is_left_alone_with_one_warning(
    store: Store, holder: sqlite3.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_profile(Cluster.local(1), store) is None
    (said,) = caplog.messages
    assert "left alone" in said and "locked" in said and "MESHWRIGHT_CACHE" in said
    with pytest.raises(OSError, match=r"locked.*MESHWRIGHT_CACHE"):
        store.add(some())
    holder.execute("COMMIT")
    assert store.read(HERE) == some()
    assert not aside(store)


def test_who_finds_it_busy_waits(store: Store, holder: sqlite3.Connection) -> None:
    patient = Store(store.path, lock_timeout_s=60)
    release = threading.Timer(0.2, lambda: holder.execute("COMMIT"))
    release.start()
    assert patient.read(HERE) == some()
    release.join()


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Processes that make the cache together: in every other trial out of one that is broken."""
    context = multiprocessing.get_context("fork")
    for trial in range(TRIALS):
        store = Store(tmp_path / str(trial) / "profile.sqlite", lock_timeout_s=60)
        if trial % 2:
            store.path.parent.mkdir()
            store.path.write_bytes(b"no database" * 100)
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


def _write_when(ready: threading.Barrier, store: Store, k: int) -> None:
    ready.wait(timeout=60)
    for rows in (2 * k + 1, 2 * k + 2):
        store.read(HERE)
        store.add(Measurements(device=HERE, operators={call(rows): timing()}, collectives=()))


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"
OPERATOR = "INSERT INTO operators VALUES ('a chip', '1.0', '2.13.0', 'float32'"
CRAFTED = {
    "a view for a table": "DROP TABLE operators; CREATE VIEW operators AS SELECT 'a chip' device, "
    "'1.0' driver, '2.13.0' torch, '' dtype, '' signature, 1 forward_s, 1 backward_s, "
    "1 repetitions, 1 spread;",
    "an endless view": f"DROP TABLE operators; CREATE VIEW operators AS {ENDLESS} x device, "
    "x driver, x torch, x dtype, x signature, x forward_s, x backward_s, x repetitions, x spread "
    "FROM n;",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON operators BEGIN DELETE FROM operators; END;",
    "an endless trigger": "CREATE TRIGGER t BEFORE INSERT ON operators BEGIN "
    "INSERT INTO collectives (device) WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 "
    "FROM n) SELECT x FROM n; END;",
    "an index": "CREATE INDEX i ON operators (upper(signature) || signature);",
    "a table more": "CREATE TABLE mine (x); INSERT INTO mine VALUES ('somebody''s');",
    "a column less": "ALTER TABLE operators DROP COLUMN spread;",
    "a computed column": "ALTER TABLE operators ADD COLUMN x AS (upper(signature));",
    "a search index": "CREATE VIRTUAL TABLE words USING fts5(x);",
    "many views": "".join(f"CREATE VIEW v{k} AS SELECT {k};" for k in range(2_000)),
    "a huge text": f"{OPERATOR}, printf('%.*c', 9000000, 'x'), 1, 1, 1, 1);",
    "endless rows": "INSERT INTO operators WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 "
    "FROM n LIMIT 100001) SELECT 'a chip', '1.0', '2.13.0', '', x, 1, 1, 1, 1 FROM n;",
    "many devices": "INSERT INTO operators WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 "
    "FROM n LIMIT 100001) SELECT x, '', '', '', '', 1, 1, 1, 1 FROM n;",
    "no text": f"{OPERATOR}, x'7b7d', 1, 1, 1, 1);",
    "no UTF-8": f"{OPERATOR}, CAST(x'ff' AS TEXT), 1, 1, 1, 1);",
    "a device of bytes": "INSERT INTO operators VALUES (x'00', 1, NULL, '', '', 1, 1, 1, 1);",
    "deep JSON": f"{OPERATOR}, printf('%.*c', 200000, '['), 1, 1, 1, 1);",
    "an infinite size": f"{OPERATOR}, "
    """'{"op":"x","operands":[["float32",[1e999],true]],"args":[],"kwargs":{}}', 1, 1, 1, 1);""",
    "a number of text": "UPDATE operators SET repetitions = 'many';",
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_files(store: Store, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    store.add(some())
    with closing(sqlite3.connect(store.path)) as connection:
        connection.executescript(f"BEGIN;{CRAFTED[kind]}COMMIT;")
    started_s = time.process_time()
    with caplog.at_level(logging.WARNING):
        _all_reads(store)
    assert time.process_time() - started_s < SLOW_S
    assert len(aside(store)) == len(caplog.messages) == 1
    store.add(some())
    assert store.read(HERE) == some()


def test_odd_files_that_are_a_cache_or_none(store: Store) -> None:
    with store.path.open("wb") as file:
        file.truncate(2**28 + 1)
    assert store.devices() == []
    assert len(aside(store)) == 1
    store.add(some())
    with closing(sqlite3.connect(store.path)) as connection:
        script = "\n".join(connection.iterdump())
    store.path.unlink()
    with closing(sqlite3.connect(store.path)) as connection:
        connection.executescript(
            f"PRAGMA encoding='UTF-16le';{script}PRAGMA user_version={SCHEMA};"
        )
    assert store.read(HERE) == some()


def _all_reads(store: Store) -> None:
    store.devices()
    store.read(HERE)
    load_profile(Cluster.local(1), store)


def test_flipped_bits_cost_no_more_than_the_cache(store: Store) -> None:
    """In every page, in its header and at some of its content: reading is no error, and what is
    written is found."""
    operators = {call(n): timing() for n in range(1, 60)}
    collectives = tuple(collective(n) for n in range(1, 60))
    store.add(Measurements(device=HERE, operators=operators, collectives=collectives))
    whole, page_bytes = store.path.read_bytes(), 4096
    chance = random.Random(0)
    places = [
        (page + offset, chance.randrange(8))
        for page in range(0, len(whole), page_bytes)
        for offset in (*range(0, 12, 2), *(chance.randrange(page_bytes) for _ in range(6)))
    ]
    for k, (place, bit) in enumerate(places):
        folder = store.path.parent / str(k)
        folder.mkdir()
        broken = Store(folder / "profile.sqlite", lock_timeout_s=0.1)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        broken.path.write_bytes(flipped)
        _all_reads(broken)
        broken.add(some())
        assert broken.read(HERE).operators.items() >= some().operators.items(), (place, bit)


@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
def test_garbage_beside_the_file_is_no_error(store: Store, end: str) -> None:
    store.add(some())
    Path(f"{store.path}{end}").write_bytes(random.Random(0).randbytes(8192))
    assert load_profile(Cluster.local(1), store) is None
    store.add(some())
    assert store.read(HERE) == some()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_left_alone(store: Store, make: Callable[[Path], None]) -> None:
    make(store.path)
    assert load_profile(Cluster.local(1), store) is None
    with pytest.raises(OSError, match=r"profile cache .*MESHWRIGHT_CACHE"):
        store.add(some())
    assert not aside(store)


def test_a_link_stays_one(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.sqlite"
    store.path.symlink_to(target)
    store.add(some())
    assert store.path.is_symlink() and Store(target).read(HERE) == some()
    target.write_bytes(b"broken" * 1000)
    store.add(some())
    assert store.path.is_symlink() and store.read(HERE) == some()


@pytest.mark.parametrize("driver", ["\ud800", "x" * 2**19])
def test_rows_that_no_file_takes_leave_it_as_it_is(store: Store, driver: str) -> None:
    store.add(some())
    odd = DeviceId(name="a chip", driver=driver, torch="2")
    with pytest.raises(ValueError, match="its rows can't be stored"):
        store.add(some(odd))
    assert store.read(HERE) == some()
    assert not aside(store)
