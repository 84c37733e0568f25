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
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from pathlib import Path


def prepare(folder: Path, marker: str) -> Path:
    """Clean up after earlier crashes; returns a new empty folder, to be filled and published.

    Raises ValueError where `folder` exists, and is no folder with a file `marker` in it.
    """
    old = _old(folder)
    saving = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.saving")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if old.exists() and not folder.exists():
        _rename(old, folder)
    if folder.exists() and not _replaceable(folder, marker):
        raise ValueError(
            f"checkpoint {str(folder)!r}: exists and is no checkpoint (no {marker!r} in it), so it "
            f"is not replaced; save to another path, or remove it"
        )
    unfinished = f".{glob.escape(folder.name)}.{'[0-9a-f]' * 8}.saving"
    for leftover in (*folder.parent.glob(unfinished), old):
        if leftover.exists():
            shutil.rmtree(leftover)
    saving.mkdir()
    sync_folder(folder.parent)
    return saving


def publish(saving: Path, folder: Path) -> None:
    """Replace `folder` by a prepared one, whose files are complete and synced."""
    old = _old(folder)
    sync_folder(saving)
    if folder.exists():
        _rename(folder, old)
    _rename(saving, folder)
    shutil.rmtree(old, ignore_errors=True)  # the new one is there; the next `prepare` clears up


def published(folder: Path) -> Path:
    """The complete folder to read: the previous one, if a crash came between two renames."""
    old = _old(folder)
    return old if old.exists() and not folder.exists() else folder


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


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync_folder(target.parent)


def _replaceable(folder: Path, marker: str) -> bool:
    return folder.is_dir() and ((folder / marker).exists() or not any(folder.iterdir()))
