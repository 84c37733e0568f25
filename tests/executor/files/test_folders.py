"""Folders: names of files, which lead nowhere else, manifests, what is said of bytes, and saves: a
crash between any two operations on files leaves a complete checkpoint, the old or the new."""

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.executor.files import atomic_folder
from meshwright.executor.files.checksums import EVERY_S, MovedBytes
from meshwright.executor.files.manifest import (
    Manifest,
    SavedFile,
    files_beside,
    foreign_files,
    read_manifest,
)
from meshwright.executor.files.paths import inside
from tests.executor.checkpoint.checkpoint_runs import differing, start

NAMES = ("config.json", "model.safetensors.index.json")
TENSORS = "tensors-00000.safetensors"
MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place in ("at", "elsewhere", "snapshots/1", "blobs"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_text(place)
    return tmp_path / "at"


def test_names_of_files_inside(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(folder / "file")
    (folder.parent / "other").symlink_to(folder)
    for name in ("file", "link", "sub/new", "new"):
        for place in (folder, folder.parent / "other"):
            assert inside(place, name, "x") == place / name


def test_names_and_links_that_lead_outside(folder: Path) -> None:
    """But the cache of a hub links to its blobs."""
    (folder / "link").symlink_to(folder.parent / "elsewhere" / "file")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    outside = r"x names the file .* outside of its folder; it may only"
    link = r"a link out of its folder, to '.*elsewhere/file'"
    for name, says in (
        ("../elsewhere/file", outside), ("/etc/passwd", outside),
        ("sub/../../elsewhere/file", outside), ("link", link), ("sub/file", link),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            inside(folder, name, "x")
    snapshot = folder.parent / "snapshots" / "1"
    (snapshot / "good").symlink_to(Path("../../blobs/file"))
    (snapshot / "bad").symlink_to(Path("../../elsewhere/file"))
    assert inside(snapshot, "good", "x").read_text() == "blobs"
    with pytest.raises(ValueError, match=r"a link out of its folder"):
        inside(snapshot, "bad", "x")


@pytest.mark.parametrize("name", ["", "a\0b", 7, "x" * 256, "\ud800"])
def test_what_no_file_can_be_called_is_refused(folder: Path, name: Any) -> None:
    with pytest.raises(ValueError, match=r"is no name of a file; get it anew"):
        inside(folder, name, "x")


def folder_of(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    for name in NAMES:
        (path / name).write_bytes(name.encode() * 100)
    (path / TENSORS).write_bytes(bytes(50))
    files = files_beside(path, NAMES) | {TENSORS: SavedFile(bytes=50)}
    (path / "manifest.json").write_bytes(Manifest(files=files).to_json())
    return path


def check(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    manifest.check(folder)


def test_what_is_as_it_was_saved_passes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    manifest = read_manifest(folder)
    assert manifest is not None and set(manifest.files) == {*NAMES, TENSORS}
    assert manifest.files[TENSORS].xxh3_64 is None
    assert manifest.files["config.json"].xxh3_64 is not None
    check(folder)
    (folder / "manifest.json").write_text(
        '{"format": 1, "files": {"config.json": {"bytes": 1100}}}'
    )
    check(folder)  # as older versions wrote it beside weights
    (folder / "manifest.json").unlink()
    assert read_manifest(folder) is None


@pytest.mark.parametrize("name", ["config.json", TENSORS])
def test_a_flipped_bit_another_length_a_missing_file(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    whole = (folder / name).read_bytes()
    if name in NAMES:  # tensors have checksums of their own
        (folder / name).write_bytes(whole[:37] + bytes([whole[37] ^ 16]) + whole[38:])
        with pytest.raises(RuntimeError, match=rf"'{name}' is damaged: its checksum"):
            check(folder)
    for other in (whole[1:], whole + b"x"):
        (folder / name).write_bytes(other)
        with pytest.raises(RuntimeError, match=rf"'{name}' has {len(other)} bytes, and"):
            check(folder)
    (folder / name).unlink()
    with pytest.raises(RuntimeError, match=rf"'{name}' is missing"):
        check(folder)


DAMAGED = (
    b"\xff", b"[" * 100_000, b"[]", b'{"format": 1}', b'{"format": 2, "files": {}}',
    b'{"format": 3, "files": {}}', b'{"format": 1, "files": []}',
    b'{"format": 1, "files": {"config.json": 5}}', b'{"format": 1, "files": {"config.json": {}}}',
    b'{"format": 1, "files": {"config.json": {"bytes": true}}}',
    b'{"format": 1, "files": {"config.json": {"bytes": 5, "xxh3_64": 5}}}',
    b'{"format": 1, "files": {"config.json": {"bytes": 5, "md5": "5"}}}',
    b'{"format": 1, "files": {}, "training": 5}', b'{"format": 1, "files": {}, "tensors": []}',
)  # fmt: skip


def test_a_damaged_manifest_is_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for text in DAMAGED:
        (folder / "manifest.json").write_bytes(text)
        with pytest.raises(RuntimeError, match=r"manifest.json' is damaged \(.*load an earlier"):
            check(folder)


OURS = (
    "training.pt", "plan.json", "manifest.json", ".metadata", ".metadata.tmp", "__0_0.distcp",
    "__1023_12.distcp", "tensors-00012.safetensors", "model.safetensors",
    "adapter_model.safetensors",
    "model-00001-of-00012.safetensors", "model.safetensors.index.json", "config.json",
    "adapter_config.json", "generation_config.json",
)  # fmt: skip
FOREIGN = (
    "notes.txt", "tensors-1.safetensors", "training.pt.bak", "xtraining.pt", "__0.distcp",
    "__0_0.pt", "model.pt", "model-1-of-2.safetensors", "config.yaml",
    "my_config.json", ".metadata.bak",
)  # fmt: skip


def test_what_a_save_may_write_is_known_by_name(tmp_path: Path) -> None:
    for name in (*OURS, *FOREIGN):
        (tmp_path / name).write_text("")
    assert foreign_files(tmp_path, finished=False) == sorted(FOREIGN)
    for name in FOREIGN:
        (tmp_path / name).unlink()
    assert foreign_files(tmp_path, finished=True) == []
    (tmp_path / "manifest.json").write_text('{"format": 1, "files": {"plan.json": {"bytes": 0}}}')
    unlisted = sorted({*OURS} - {"plan.json", "manifest.json"})
    assert foreign_files(tmp_path, finished=True) == unlisted
    (tmp_path / "manifest.json").write_text("{}")  # damaged: its names say what is a save's
    assert foreign_files(tmp_path, finished=True) == []
    (tmp_path / "manifest.json").unlink()
    assert foreign_files(tmp_path, finished=True) == []
    (tmp_path / "training.pt").unlink()  # an older version's save has it
    (tmp_path / "tensors-00012.safetensors").unlink()
    assert foreign_files(tmp_path, finished=True) == sorted(x.name for x in tmp_path.iterdir())


def test_it_is_said_now_and_then_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with caplog.at_level(logging.DEBUG, "meshwright.progress"):
        moved = MovedBytes("reading", 4 * MIB, clock=lambda: now[0])
        for _ in range(4):
            moved(MIB)
            now[0] += 0.6 * EVERY_S
        now[0] += EVERY_S
        moved(512)  # what a file holds beside its tensors
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"reading: {n} MiB of 4 MiB" for n in (1, 3, 4)]


# --- saves ----------------------------------------------------------------------------------------

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
    old, new, reader = (start("mlp", "alone", other=other) for other in (False, True, False))
    old.steps(0, 1)
    new.steps(0, 2)
    path, before, after = tmp_path / "at", old.state(), new.state()
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
        is_new.append(differing(found, after) == [])
        assert is_new[-1] or differing(found, before) == [], f"after {k} of {total}"
        if k % 4 == 0 or is_new[-1]:
            old.save(path)
            reader.load(path)
            assert differing(reader.state(), before) == []
            assert not list(tmp_path.glob(".at.*"))
    assert is_new == sorted(is_new) and set(is_new) == {False, True}


def test_a_save_removes_only_what_saves_wrote(tmp_path: Path) -> None:
    """Files beside a checkpoint's own are named, of any kind and at any time."""
    run, path = start("mlp", "alone"), tmp_path / "at"
    path.mkdir()
    run.save(path)
    own = {file.name: file.read_bytes() for file in path.iterdir()}
    assert set(own) == {"manifest.json", TENSORS}
    (path / "results").mkdir()
    (path / "results" / "losses.csv").write_text("1")
    (path / "notes.txt").write_text("2")
    (path / "tensors-00007.safetensors").write_bytes(b"of another tool")
    (path / "link").symlink_to(tmp_path)
    says = r"at': holds what no save wrote, \['link', 'notes.txt', 'results', 'tensors-0"
    with pytest.raises(ValueError, match=says):
        run.save(path)
    assert (path / "results" / "losses.csv").read_text() == "1"
    assert {name: (path / name).read_bytes() for name in own} == own
    assert not list(tmp_path.glob(".at.*"))
    for name in ("results", "notes.txt", "tensors-00007.safetensors", "link"):
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
    (left / "manifest.json").unlink()  # it was killed before
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
