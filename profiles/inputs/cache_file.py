"""The SQLite file of the cache, which anyone may have written: read within limits, never believed.

    missing    read as empty; made by the first write
    unusable   corrupt, of another format, with tables, views or triggers that are not ours, or too
               large to be ours: moved aside with a warning, whole, and read as empty
    not to be had   locked for longer than the timeout, another user's, a full disk, a folder in its
               place: an OSError, and the file is left as it is

A reader waits for a writer. Writers, and whoever moves the file aside, hold a lock beside it, so
that what one of them begins no other takes for broken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from meshwright.profiles.inputs.errors import MeshwrightError

log = logging.getLogger(__name__)

R = TypeVar("R")

SCHEMA = 3  # 1 had no column for the source of a collective, 2 no steps
_STEPS = """
CREATE TABLE steps (
    device TEXT, driver TEXT, torch TEXT, backend TEXT, precision TEXT, target TEXT, basis TEXT,
    plan TEXT, term TEXT, measured_s REAL, predicted_s REAL, parts TEXT, samples INTEGER,
    PRIMARY KEY (device, driver, torch, backend, precision, target, basis, plan, term));
"""
TABLES = f"""
CREATE TABLE operators (
    device TEXT, driver TEXT, torch TEXT, dtype TEXT, signature TEXT,
    forward_s REAL, backward_s REAL, repetitions INTEGER, spread REAL,
    PRIMARY KEY (device, driver, torch, dtype, signature));
CREATE TABLE collectives (
    device TEXT, driver TEXT, torch TEXT, backend TEXT, kind TEXT, ranks INTEGER, size INTEGER,
    per_node INTEGER, nbytes INTEGER, seconds REAL, repetitions INTEGER, spread REAL,
    source TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (device, driver, torch, backend, kind, ranks, size, per_node, nbytes));
{_STEPS}"""
_SOURCE = "source TEXT NOT NULL DEFAULT ''"
_ADD_SOURCE = f"ALTER TABLE collectives ADD COLUMN {_SOURCE};"
_UPGRADES = {1: _ADD_SOURCE + _STEPS, 2: _STEPS}  # from a schema to this one

# far above what a file of ours can need
MAX_FILE_BYTES = 2**28
MAX_VALUE_BYTES = 2**18  # of a text, and of a row
MAX_READ_BYTES = 2**25  # of all rows of an answer
MAX_ROWS = 100_000  # of an answer
MAX_INSTRUCTIONS = 20_000_000  # of SQLite's machine, in a call
MAX_SECONDS = 10.0  # of a call, on a disk that is slow
_INSTRUCTIONS_A_CHECK = 10_000

# what SQLite says of a file that is wrong; any other error is of the disk, the rights or the moment
_WRONG = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_RANGE,
)
_BESIDE = ("", "-journal", "-wal", "-shm")  # ends of the names of what SQLite keeps


class Unusable(ValueError):
    """A file that no version of this program can have written as it is."""


class CacheFile:
    """The file at `path`; every call opens and closes it, so processes may share it."""

    def __init__(self, path: Path, *, lock_timeout_s: float) -> None:
        self.given = path
        self.lock_timeout_s = lock_timeout_s

    @property
    def path(self) -> Path:
        """The file itself: a link to it stays."""
        return Path(os.path.realpath(self.given))

    def read(self, work: Callable[[sqlite3.Connection], R], empty: R) -> R:
        """`work` on the file; `empty` where there is none, or none that can be used. Raises OSError
        where the file can't be had."""
        with self._errors():
            if not self.path.exists():
                return empty
            try:
                return self._on_file(work)
            except (Unusable, FileNotFoundError):
                pass
            except sqlite3.Error as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CANTOPEN:
                    raise
            with self._alone():  # another process may have put a new one in its place, or does so
                return self._or_moved(work, empty)

    def write(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """`work` on the file in a transaction; on a new one where there is none that can be used.
        Raises OSError where the file can't be had, ValueError for rows that no file takes."""
        _try_out(work)
        with self._errors(), self._alone():
            if self.path.exists():
                try:
                    self._on_file(_check_whole)
                    return self._on_file(work)
                except Unusable as error:
                    self._move_aside(error)
            self._make()
            return self._on_file(work)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{self.path}.lock", timeout=self.lock_timeout_s)
        try:
            lock.acquire()
        except NotImplementedError as error:  # the file system has no locks
            raise OSError(str(error)) from error
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Whatever keeps the file from being had as an OSError that names it."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise OSError(
                f"profile cache {self.path}: {error}; wait for the process that has it, or name "
                "another folder in MESHWRIGHT_CACHE"
            ) from error

    def _or_moved(self, work: Callable[[sqlite3.Connection], R], empty: R) -> R:
        """`work` on the file; where it can't be used it is moved aside, and the answer is `empty`.
        To be called alone."""
        if not self.path.exists():
            return empty
        try:
            return self._on_file(work)
        except Unusable as error:
            self._move_aside(error)
            return empty

    def _make(self) -> None:
        """A new file, which is whole when it gets its name. To be called alone."""
        begun = Path(f"{self.path}.new")
        begun.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(begun)) as connection:
            connection.executescript(f"BEGIN;{TABLES}PRAGMA user_version={SCHEMA};COMMIT;")
        os.replace(begun, self.path)

    def _on_file(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """`work` on the file, in a transaction. Raises Unusable."""
        info = self.path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise OSError("it is no file")
        if info.st_size > MAX_FILE_BYTES:
            raise Unusable(f"{info.st_size} bytes; legal: up to {MAX_FILE_BYTES}")
        limits = _Limits()
        try:
            with contextlib.closing(self._opened(limits)) as connection:
                _check_tables(connection)
                with connection:
                    return work(connection)
        except sqlite3.Error as error:
            if limits.instructions > MAX_INSTRUCTIONS:
                raise Unusable("reading it takes longer than any file of ours") from error
            if _is_of_content(error):
                raise Unusable(str(error)) from error
            raise
        except (Unusable, OSError):
            raise
        except (ValueError, TypeError, RecursionError, OverflowError) as error:  # of its values
            raise Unusable(str(error)) from error

    def _opened(self, limits: _Limits) -> sqlite3.Connection:
        where = f"{self.path.absolute().as_uri()}?mode=rw"  # it exists: none is made by opening
        connection = sqlite3.connect(where, uri=True, timeout=self.lock_timeout_s)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.set_progress_handler(limits.exceeded, _INSTRUCTIONS_A_CHECK)
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        return connection

    def _move_aside(self, error: Exception) -> None:
        """Rename the file with what SQLite keeps beside it. To be called alone."""
        aside = self.path.with_name(f"{self.path.name}.unusable-{time.time_ns()}")
        for end in _BESIDE:
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self.path}{end}", f"{aside}{end}")
        log.warning(
            "the profile cache %s can't be used (%s); it is kept as %s and a new one is begun: "
            "run `meshwright profile` again",
            self.path,
            error,
            aside.name,
        )


class _Limits:
    """Counts what a connection does, and interrupts it."""

    def __init__(self) -> None:
        self.instructions = 0
        self.deadline_s = time.monotonic() + MAX_SECONDS

    def exceeded(self) -> bool:
        self.instructions += _INSTRUCTIONS_A_CHECK
        return self.instructions > MAX_INSTRUCTIONS or time.monotonic() > self.deadline_s


def rows_of(connection: sqlite3.Connection, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
    """The rows of an answer. Raises Unusable for more than a file of ours has."""
    rows, read_bytes = [], 0
    for row in connection.execute(query, values):
        read_bytes += sum(len(x) if isinstance(x, str | bytes) else 8 for x in row)
        rows.append(row)
        if read_bytes > MAX_READ_BYTES or len(rows) > MAX_ROWS:
            raise Unusable(f"more than {MAX_ROWS} rows or {MAX_READ_BYTES} bytes of them")
    return rows


def _try_out(work: Callable[[sqlite3.Connection], object]) -> None:
    """`work` on an empty database in memory: what is wrong with it is not the file's fault."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.executescript(TABLES)
        try:
            work(connection)
        except (sqlite3.Error, OverflowError, ValueError) as error:
            raise MeshwrightError(
                f"its rows can't be stored: {error}",
                place="profile",
                legal="numbers and texts that SQLite takes",
                way_out="export the profile again on the machine that measured it",
            ) from error


def _is_of_content(error: sqlite3.Error) -> bool:
    """Whether an error is the file's own; texts that are no UTF-8 have no code."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _WRONG


def _check_tables(connection: sqlite3.Connection) -> None:
    """Raise Unusable unless the file holds our tables and nothing else; a file of an older schema
    gets what it lacks."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (*_UPGRADES, SCHEMA):
        raise Unusable(f"format {version}; this version reads {SCHEMA}")
    found = _schema_objects(connection)
    if found not in _ours(version):
        raise Unusable("it holds other tables, views or triggers than a profile cache")
    if version in _UPGRADES:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone()[0] == version:
                for statement in filter(str.strip, _UPGRADES[version].split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={SCHEMA}")


def _check_whole(connection: sqlite3.Connection) -> None:
    """Raise Unusable where what is written may not be found again: indices unlike their tables."""
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise Unusable(found)


def _schema_objects(connection: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    """Type, name, table and SQL of all that a database defines."""
    rows = rows_of(connection, "SELECT type, name, tbl_name, sql FROM sqlite_schema")
    return frozenset(tuple("".join(str(x).split()) for x in row) for row in rows)


@cache
def _ours(version: int) -> tuple[frozenset[tuple[str, ...]], ...]:
    """What files of a schema define: those made so, and those upgraded."""
    second = TABLES.replace(_STEPS, "")
    first = second.replace(f"    {_SOURCE},\n", "")
    scripts = {
        1: [[first]],
        2: [[second], [first, _ADD_SOURCE]],
        SCHEMA: [[TABLES], [first, _UPGRADES[1]]],
    }
    return tuple(_made_by(statements) for statements in scripts[version])


def _made_by(statements: list[str]) -> frozenset[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(";".join(statements))
        return _schema_objects(connection)
