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
from tests.executor.checkpoint.checkpoint_runs import differing, start

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


def test_a_save_removes_only_what_saves_wrote(tmp_path: Path) -> None:
    """Files beside a checkpoint's own are named, of any kind and at any time."""
    run, path = start("mlp", "alone"), tmp_path / "at"
    path.mkdir()
    run.save(path)
    own = {file.name: file.read_bytes() for file in path.iterdir()}
    assert set(own) == {".metadata", "__0_0.distcp", "manifest.json", "plan.json", "training.pt"}
    (path / "results").mkdir()
    (path / "results" / "losses.csv").write_text("1")
    (path / "notes.txt").write_text("2")
    (path / "__7_0.distcp").write_bytes(b"of another tool")
    (path / "link").symlink_to(tmp_path)
    says = r"at': holds what no save wrote, \['__7_0.distcp', 'link', 'notes.txt', 'results'\]"
    with pytest.raises(ValueError, match=says):
        run.save(path)
    assert (path / "results" / "losses.csv").read_text() == "1"
    assert {name: (path / name).read_bytes() for name in own} == own
    assert not list(tmp_path.glob(".at.*"))
    for name in ("results", "notes.txt", "__7_0.distcp", "link"):
        (path / name).rename(tmp_path / name)
    run.save(path)
    # nor what comes while a save runs
    saving = atomic_folder.prepare(path)
    (path / "notes.txt").write_text("2")
    with pytest.raises(ValueError, match=r"holds what no save wrote, \['notes.txt'\]"):
        atomic_folder.publish(saving, path)
    assert (path / "notes.txt").read_text() == "2"
    run.load(path)


def test_what_is_left_of_a_save_is_removed_unless_it_is_not_all_of_it(tmp_path: Path) -> None:
    run, path = start("mlp", "alone"), tmp_path / "at"
    left, old = tmp_path / ".at.0123abcd.saving", tmp_path / ".at.old"
    run.save(path)
    for folder in (left, old):
        shutil.copytree(path, folder)
    (left / "manifest.json").unlink()
    (left / "training.pt").unlink()  # it was killed before
    run.save(path)
    assert not left.exists() and not old.exists()
    left.mkdir()
    (left / "thesis.tex").write_text("…")
    with pytest.raises(ValueError, match=r"\.at\.0123abcd\.saving': holds .*'thesis.tex'"):
        run.save(path)
    assert (left / "thesis.tex").exists()
    beside, first, second = (
        atomic_folder.prepare(tmp_path / name) for name in ("to.0123abcd", "to", "to")
    )  # another checkpoint being saved is left alone
    assert beside.exists() and second.exists() and not first.exists()


def test_links_are_followed(tmp_path: Path) -> None:
    """A path to a checkpoint may be a link, to a folder that is there or not yet."""
    run = start("mlp", "alone")
    (tmp_path / "disk").mkdir()
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "disk" / "at")
    for steps in range(2):
        run.steps(steps, 1)
        run.save(link)
        assert link.is_symlink() and (tmp_path / "disk" / "at" / "manifest.json").exists()
    reader = start("mlp", "alone", other=True)
    reader.load(link)
    assert differing(reader.state(), run.state()) == []
    (tmp_path / "disk" / "at").rename(tmp_path / "disk" / ".at.old")  # a crash between renames
    reader.load(link)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ValueError, match=r"circle': its links lead nowhere"):
        run.save(tmp_path / "circle")
    with pytest.raises(ValueError, match=r"is the root folder"):
        run.save("/")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ValueError, match=r"file': holds what no save wrote, \['file'\]"):
        run.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "a file"


def test_a_removed_checkpoint_is_whole_or_gone(tmp_path: Path) -> None:
    """Killed at any operation; what is left of it is cleared up by name. Other files stay."""
    run, path = start("mlp", "alone"), tmp_path / "step-1"
    run.save(path)
    shutil.copytree(path, tmp_path / "backup")
    with crashing(tmp_path, sys.maxsize) as files:
        atomic_folder.remove(path)
    assert files.count > 5 and not list(tmp_path.glob("*step*"))
    for k in range(files.count):
        shutil.copytree(tmp_path / "backup", path, dirs_exist_ok=True)
        with crashing(tmp_path, k), pytest.raises(Crash):
            atomic_folder.remove(path)
        if path.exists():
            run.load(path)
        atomic_folder.clear_unfinished(tmp_path, "step-*")
        assert not list(tmp_path.glob(".step-*"))
    run.save(path)
    (path / "mine.txt").write_text("1")
    with pytest.raises(ValueError, match=r"holds what no save wrote, \['mine.txt'\]"):
        atomic_folder.remove(path)
    assert (path / "mine.txt").exists()
