"""Names that a file gives of others: they lead to files of its folder, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.executor.errors import SavedError
from meshwright.profiles.inputs import shown

HUB = ("snapshots", "blobs")  # of the cache of Hugging Face's hub: a snapshot links to its blobs
MAX_NAME = 255  # bytes, of which file systems take as many


def inside(folder: Path, name: object, said_by: str) -> Path:
    """The file `name` of a folder. Raises ValueError for a name that leads out of it, as a path or
    by a link; the links of a hub's cache to the blobs beside its snapshots are followed."""
    place, text = said_by, f" names the file {shown(name)}, which"
    if not isinstance(name, str) or not _can_be(name):
        raise SavedError(
            f"{text} is no name of a file", place=place, way_out="get it anew from its source"
        )
    path, root = folder / name, folder.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise SavedError(
            f"{text} is outside of its folder; it may only name files inside it, relative to it",
            place=place,
            way_out="get it anew from its source",
        )
    roots = [root]
    if root.parent.name == HUB[0]:
        roots.append(root.parent.parent / HUB[1])
    if not any(path.resolve().is_relative_to(allowed) for allowed in roots):
        raise SavedError(
            f"{text} is a link out of its folder, to {str(path.resolve())!r}",
            place=place,
            way_out="put the file itself there if you trust it",
        )
    return path


def _can_be(name: str) -> bool:
    """Whether a file system can have a file of that name."""
    try:
        return "\0" not in name and 0 < len(os.fsencode(name)) <= MAX_NAME
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
