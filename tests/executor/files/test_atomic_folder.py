"""A crash between any two operations on files leaves a complete checkpoint, the old or the new."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.executor.files import atomic_folder
from tests.executor.checkpoint.checkpoint_worker import differing, start

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


class Crash(BaseException):
    """The process is gone."""


class _Files:
    """Counts the operations on files below a folder, and lets none happen from the k-th on."""

    def __init__(self) -> None:
        self.below: str | None = None
        self.count, self.last = 0, sys.maxsize

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.below is None or event not in OPERATIONS:
            return
        path = arguments[0]
        if event == "open" and not (isinstance(path, str) and path.startswith(self.below)):
            return  # shared libraries, and folders opened by number
        self.count += 1
        if self.count > self.last:
            raise Crash(event)


@cache
def _files() -> _Files:
    """One for all tests: audit hooks can't be removed."""
    files = _Files()
    sys.addaudithook(files)
    return files


@contextmanager
def crashing(folder: Path, after: int) -> Iterator[_Files]:
    """Files below `folder` can't be touched any more after `after` operations."""
    files = _files()
    files.below, files.count, files.last = str(folder), 0, after
    try:
        yield files
    finally:
        files.below = None


def test_a_crash_at_any_operation_leaves_one_that_is_complete(tmp_path: Path) -> None:
    """The old one or the new one, the new one from some operation on; the next save clears up."""
    old, new = start("mlp", "alone"), start("mlp", "alone", other=True)
    old.steps(0, 1)
    new.steps(0, 2)
    reader = start("mlp", "alone")
    path = tmp_path / "at"
    old.save(path)
    shutil.copytree(path, tmp_path / "backup")
    with crashing(tmp_path, sys.maxsize) as files:
        new.save(path)
    total = files.count
    assert total > 10
    is_new = []
    for k in range(total):
        for left in tmp_path.glob(".at.*"):
            shutil.rmtree(left)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "backup", path)
        with crashing(tmp_path, k), pytest.raises((Crash, RuntimeError)):
            new.save(path)
        reader.load(path)
        found = reader.state()
        is_new.append(differing(found, new.state()) == [])
        assert is_new[-1] or differing(found, old.state()) == [], f"after {k} of {total}"
        if k % 4 == 0 or is_new[-1]:
            old.save(path)
            reader.load(path)
            assert differing(reader.state(), old.state()) == []
            assert not list(tmp_path.glob(".at.*"))
    assert is_new == sorted(is_new) and set(is_new) == {False, True}


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    run = start("mlp", "alone")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("…")
    with pytest.raises(
        ValueError,
        match=r"thesis': holds what no save wrote, .'chapter1.tex'.*save to another path",
    ):
        run.save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    (tmp_path / "empty").mkdir()
    run.save(tmp_path / "empty")
    run.load(tmp_path / "empty")


def test_another_checkpoint_being_saved_is_left_alone(tmp_path: Path) -> None:
    beside = atomic_folder.prepare(tmp_path / "at.0123abcd")
    first = atomic_folder.prepare(tmp_path / "at")
    second = atomic_folder.prepare(tmp_path / "at")
    assert beside.exists() and second.exists() and not first.exists()
