"""What of a folder a save wrote: the manifest, and the names that a save may write.

A save writes `manifest.json` last, of the files beside it:

    {"format": 1, "files": {"training.pt": {"bytes": 1234, "xxh3_64": "0123456789abcdef"}, ...}}

A checkpoint's files of tensors have no checksum there: those of their parts are in `.metadata`
(`dcp_writes.py`). A folder without a manifest is an unfinished save, or was saved by an older
version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.executor.errors import DamagedError
from meshwright.executor.files.checksums import checksum_of_file
from meshwright.profiles.inputs import MAX_MEASURED_BYTES, read_json

NOTES, PLAN, METADATA, MANIFEST = "training.pt", "plan.json", ".metadata", "manifest.json"
FORMAT = 1
SHOWN = 5
_NAMES = re.compile(
    r"training\.pt|plan\.json|manifest\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp"
    r"|(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(adapter_|generation_)?config\.json"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """The size and, of files that are not of tensors, the checksum of a file of a save."""

    bytes: int
    xxh3_64: str | None = None


def write_manifest(folder: Path, bytes_of: Mapping[str, int]) -> bytes:
    """The manifest of a complete checkpoint: `bytes_of` the files of tensors, and what is
    beside."""
    of_tensors = {name: OwnFile(bytes=n) for name, n in bytes_of.items()}
    return manifest(folder, of_tensors, (METADATA, NOTES, PLAN))


def manifest(folder: Path, of_tensors: Mapping[str, OwnFile], beside: Iterable[str]) -> bytes:
    """The manifest of a complete folder: its files of tensors, and those `beside`, by name."""
    files: dict[str, OwnFile] = dict(sorted(of_tensors.items()))
    for name in beside:
        path = folder / name
        files[name] = OwnFile(bytes=path.stat().st_size, xxh3_64=checksum_of_file(path))
    said = {
        name: {key: value for key, value in asdict(file).items() if value is not None}
        for name, file in files.items()
    }
    return json.dumps({"format": FORMAT, "files": said}, indent=1).encode()


def read_manifest(folder: Path) -> dict[str, OwnFile] | None:
    """The files that a save wrote, by name; None where an older version did. Raises RuntimeError
    for a damaged manifest."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        found = read_json(path, most=MAX_MEASURED_BYTES)
        files = {name: OwnFile(**fields) for name, fields in found["files"].items()}
        sound = found["format"] == FORMAT and all(map(_sound, files.values()))
    except (ValueError, TypeError, KeyError, AttributeError):
        sound = False
    if not sound:
        raise DamagedError(
            f" is damaged: it must say format {FORMAT}, and of each of its files the bytes",
            place=repr(str(path)),
            way_out="load an earlier checkpoint",
        )
    return files


def _sound(file: OwnFile) -> bool:
    return type(file.bytes) is int and (file.xxh3_64 is None or type(file.xxh3_64) is str)


def check_files(folder: Path) -> bool:
    """Whether what a load reads is as it was saved, as far as the manifest says; False where there
    is none. Raises RuntimeError for a file that is not."""
    return _checked(folder, {METADATA, NOTES}, {PLAN})


def check_every_file(folder: Path) -> bool:
    """`check_files` of a folder that is no checkpoint."""
    return _checked(folder, set(), set())


def _checked(folder: Path, needed: set[str], unread: set[str]) -> bool:
    files = read_manifest(folder)
    if files is None:
        return False
    for name in sorted(files.keys() - unread | needed):
        check_file(folder, name, files)
    return True


def check_file(folder: Path, name: str, files: Mapping[str, OwnFile]) -> None:
    """Raise RuntimeError where a file is not the one that was saved."""
    said, path = files.get(name), folder / name
    size = path.stat().st_size if path.is_file() else None
    if said is None or size is None:
        fault = f"{'is missing' if size is None else 'is not in its manifest'}"
    elif size != said.bytes:
        fault = f"has {size} bytes, and {said.bytes} were saved"
    elif said.xxh3_64 is not None and checksum_of_file(path) != said.xxh3_64:
        fault = "is damaged: its checksum is not that of what was saved"
    else:
        return
    raise DamagedError(f" {fault}", place=repr(name), way_out="load an earlier checkpoint")


def foreign_files(folder: Path, *, finished: bool) -> list[str]:
    """What is in a folder that no save wrote, by name. In a `finished` folder there must be a sound
    manifest or, as in one of an older version, notes: else all of it is foreign."""
    if not folder.is_dir() or folder.is_symlink():
        return [folder.name] if folder.exists() or folder.is_symlink() else []
    entries = sorted(folder.iterdir())
    try:
        listed = read_manifest(folder)
    except RuntimeError:  # nothing but its names says what the save wrote
        listed = None
    ours = not finished or listed is not None or (folder / NOTES).is_file()
    return [
        entry.name
        for entry in entries
        if not ours
        or not _NAMES.fullmatch(entry.name)
        or not entry.is_file()
        or entry.is_symlink()
        or (listed is not None and entry.name not in (*listed, MANIFEST))
    ]
