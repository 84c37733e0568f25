"""Atomic replacement of a folder: whatever happens in between, a complete one can be found.

Beside the folder `F` there may be `.F.<n>.saving`, which is being written, and `.F.old`, which `F`
was before. One rank does, where → is a rename, each followed by a sync of the parent folder:

    prepare   .F.old → F, if a crash left no F;  remove .F.*.saving and .F.old;  make .F.<n>.saving
    publish   F → .F.old, if there is an F;  .F.<n>.saving → F;  remove .F.old, as far as it goes

All data is synced before `publish`. So at any point `F`, or else `.F.old`, is complete, and nothing
half-written ever has either name; readers take the first that exists. Rename must be atomic for all
that look, as on local and on shared POSIX file systems (NFS, Lustre, GPFS), and one job at a time
writes to a path. `n` is random: a host whose NFS client remembers the last save's name would write
into the folder that has been published since.

Nothing but what saves wrote (`manifest.py`) is ever removed: a folder that holds anything else is
refused, before the save and again before it is replaced. `F` is what a path leads to when its links
are followed.
"""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.executor.errors import SavedError
from meshwright.executor.files.manifest import MANIFEST, MAX_SHOWN, Manifest, foreign_files
from meshwright.profiles.inputs import MeshwrightError, checked_path


def followed(path: str | Path) -> Path:
    """The folder that a path leads to, be it there or not. Raises ValueError where links lead in a
    circle, or to no folder that a save could replace."""
    checked = checked_path(path, "checkpoint")
    try:
        folder = checked.resolve()
    except (OSError, RuntimeError) as error:
        raise SavedError(
            f"its links lead nowhere ({error})",
            place=f"checkpoint {str(path)!r}",
            way_out="give another path",
        ) from error
    if not folder.name:
        raise SavedError(
            "is the root folder", place=f"checkpoint {str(path)!r}", way_out="give one inside it"
        )
    return folder


def prepare(folder: Path) -> Path:
    """Clean up after earlier crashes; returns a new empty folder, to be filled and published.

    Raises ValueError where `folder`, or what is left of an earlier save, holds what no save wrote.
    """
    old = _old(folder)
    saving = _unfinished(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise SavedError(
            f"can't be made: {error}",
            place=f"checkpoint {str(folder)!r}",
            legal="a path whose folders are folders, or can be made",
            way_out="save to another path",
        ) from error
    if old.exists() and not folder.exists():
        _rename(old, folder)
    _refuse_foreign(folder, finished=True)
    clear_unfinished(folder.parent, glob.escape(folder.name))
    _remove(old)
    saving.mkdir()
    sync_folder(folder.parent)
    return saving


def publish(saving: Path, folder: Path) -> None:
    """Replace `folder` by a prepared one, whose files are complete and synced. Raises ValueError
    where it holds what no save wrote."""
    old = _old(folder)
    sync_folder(saving)
    _refuse_foreign(folder, finished=True)
    if folder.exists():
        _rename(folder, old)
    _rename(saving, folder)
    with suppress(OSError, ValueError):  # the new one is there; the next `prepare` clears up
        _remove(old)


def complete(saving: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a prepared folder, whose files are on the disk, and `publish` it."""
    write_synced(saving / MANIFEST, manifest.to_json())
    publish(saving, folder)


@contextmanager
def discarded_on_error(saving: Path, *, first: bool) -> Iterator[None]:
    """Remove a folder that was prepared, on the `first` rank, where filling it fails on all: what a
    full disk took is free again. Where a rank is lost, others may still have files open in it."""
    try:
        yield
    except (OSError, MeshwrightError):  # not of a connection that broke
        if first:
            with suppress(OSError, ValueError):  # the next `prepare` clears up
                _remove(saving)
        raise


def published(folder: Path) -> Path:
    """The complete folder to read: the previous one, if a crash came between two renames."""
    old = _old(folder)
    return old if old.exists() and not folder.exists() else folder


def remove(folder: Path) -> None:
    """Remove a folder that a save wrote; killed meanwhile, it is an unfinished save. Raises
    ValueError where it holds what no save wrote."""
    _refuse_foreign(folder, finished=True)
    going = _unfinished(folder)
    _rename(folder, going)
    _remove(going)


def clear_unfinished(parent: Path, pattern: str) -> None:
    """Remove what killed saves to `parent` left, of folders whose names match a glob pattern.
    Raises ValueError where it holds what no save wrote."""
    for leftover in parent.glob(f".{pattern}.{'[0-9a-f]' * 8}.saving"):
        _remove(leftover)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and fsync it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Fsync a folder: the names made, renamed or removed in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.saving")


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync_folder(target.parent)


def _refuse_foreign(folder: Path, *, finished: bool) -> None:
    if names := foreign_files(folder, finished=finished):
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        raise SavedError(
            f"holds what no save wrote, {names[:MAX_SHOWN]}{more}, so it is not replaced",
            place=f"checkpoint {str(folder)!r}",
            way_out="move that elsewhere, or save to another path",
        )


def _remove(leftover: Path) -> None:
    """Remove what is left of a save, its files only."""
    _refuse_foreign(leftover, finished=False)
    if leftover.exists():
        for file in sorted(leftover.iterdir()):
            file.unlink()
        leftover.rmdir()
