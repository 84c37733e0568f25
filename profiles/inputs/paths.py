"""Paths that users give, and files that are written to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.profiles.inputs.errors import FileError, MeshwrightError, shown

MAX_NAME = 255  # bytes, of which file systems take as many


class UnwritableError(MeshwrightError, OSError):
    """A file that can't be written."""

    CODE = "MW104"
    PLACE = "a file that is written"
    LEGAL = "a file in a folder that exists and can be written to"
    WAY_OUT = "make the folder, or give another path"


def checked_path(path: object, place: str) -> Path:
    """A path that a file system can have. Raises `FileError` for anything else."""
    if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str):
        what = f" is a {type(path).__name__}, {shown(path)}"
    elif not name or "\0" in name:
        what = f" is {shown(name)}"
    else:
        try:
            longest = max((len(os.fsencode(part)) for part in Path(name).parts), default=0)
        except UnicodeEncodeError:  # half of a surrogate pair
            longest = MAX_NAME + 1
        if longest <= MAX_NAME:
            return Path(name)
        what = f" {shown(name)} has a name that no file can have"
    raise FileError(
        what,
        place=place,
        legal=f"a text or a pathlib.Path, with names of up to {MAX_NAME} bytes",
        way_out="give the path of a file or a folder",
    )


def write_text(path: object, text: str, place: str) -> Path:
    """Write a file, or replace it. Raises `MeshwrightError`, which is an OSError too where the
    file system refuses."""
    with _writable(path, place) as file:
        file.write_text(text, encoding="utf-8")
    return file


def check_writable(path: object, place: str) -> None:
    """Raise as `write_text` would; a file that is there stays as it is."""
    with _writable(path, place) as file:
        file.touch()


@contextmanager
def _writable(path: object, place: str) -> Iterator[Path]:
    """The path checked; a refusal of the file system inside the block as `UnwritableError`."""
    file = checked_path(path, place)
    try:
        yield file
    except OSError as error:
        raise UnwritableError(
            f" can't be written: {error}", place=f"{place} {shown(str(file))}"
        ) from error
