"""The manifest of a folder that a save wrote, and the names that a save may write.

`manifest.json` is written last. Its first line has the XXH3 of the rest, of which

    files      {"config.json": {"bytes": 1234, "xxh3_64": "0123456789abcdef"}, ...}
               every file beside it; those of tensors have checksums of their parts
    tensors    {name: {"dtype": "float32", "shape": [4, 6], "chunks": [[file, [2, 0], [2, 6],
               first byte, XXH3 of the bytes], ...]}}: offset and sizes of each part of a tensor
    training   a checkpoint's plan and what is no tensor (`checkpoint/notes.py`)

Weights saved alone have only `files`. A folder without a manifest is an unfinished save, or a
checkpoint of an older version, which `scripts/convert_checkpoint.py` converts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from meshwright.executor.errors import DamagedError, NoCheckpointError, SavedError
from meshwright.executor.files.checksums import checksum_of_file
from meshwright.executor.files.chunks import Box
from meshwright.executor.files.paths import inside

MANIFEST = "manifest.json"
OLD_METADATA, OLD_NOTES = ".metadata", "training.pt"  # a checkpoint's before format 2
FORMATS = (1, 2)  # 1: of weights alone, without a checksum of itself
MAX_SHOWN = 5
_NAMES = re.compile(
    r"manifest\.json|tensors-\d{5,}\.safetensors"
    r"|(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(adapter_|generation_)?config\.json"
    r"|training\.pt|plan\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp"  # of older versions
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A box of a tensor: bytes of a file from `start` on, and their checksum."""

    box: Box
    file: Path
    start: int
    xxh3_64: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Shape, dtype and parts of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def length(self, chunk: StoredChunk) -> int:
        """Bytes of a part."""
        return math.prod(chunk.box[1]) * self.dtype.itemsize

    def check(self) -> None:
        """Raise ValueError unless the parts lie inside the tensor and have as many elements."""
        for chunk in self.chunks:
            offset, sizes = chunk.box
            ends = (a + n for a, n in zip(offset, sizes, strict=True))
            if any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise ValueError("has a part that is not inside it")
        if sum(math.prod(chunk.box[1]) for chunk in self.chunks) != math.prod(self.shape):
            raise ValueError(f"has parts that do not make up its shape {self.shape}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """Size of a file of a save, and the checksum of one that holds no tensors."""

    bytes: int
    xxh3_64: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Files and tensors of a save by name, and a checkpoint's notes."""

    files: Mapping[str, SavedFile]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None

    def to_json(self) -> bytes:
        tensors = {
            name: {
                "dtype": str(x.dtype).removeprefix("torch."),
                "shape": x.shape,
                "chunks": [[c.file.name, *c.box, c.start, c.xxh3_64] for c in x.chunks],
            }
            for name, x in self.tensors.items()
        }
        files = {
            name: {key: of for key, of in asdict(file).items() if of is not None}
            for name, file in sorted(self.files.items())
        }
        parts: dict[str, Any] = {"files": files}
        if self.training is not None:
            parts |= {"tensors": tensors, "training": self.training}
        rows = (f"{json.dumps(key)}: {json.dumps(part)}" for key, part in parts.items())
        body = (",\n".join(rows) + "}\n").encode()
        head = {"format": FORMATS[-1], "xxh3_64": xxhash.xxh3_64_hexdigest(body)}
        return json.dumps(head).encode()[:-1] + b",\n" + body

    def check(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Raise `DamagedError` for a file, by default of all, that is not as it was saved."""
        for name in sorted(self.files if names is None else names):
            file = self.files[name]
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                fault = "is missing"
            elif size != file.bytes:
                fault = f"has {size} bytes, and {file.bytes} were saved"
            elif file.xxh3_64 is not None and checksum_of_file(path) != file.xxh3_64:
                fault = "is damaged: its checksum is not that of what was saved"
            else:
                continue
            raise DamagedError(f" {fault}", place=repr(name))


def files_beside(folder: Path, names: Iterable[str]) -> dict[str, SavedFile]:
    """Sizes and checksums of small files of a folder."""
    paths = {name: folder / name for name in names}
    return {
        name: SavedFile(bytes=path.stat().st_size, xxh3_64=checksum_of_file(path))
        for name, path in paths.items()
    }


def read_manifest(folder: Path, *, with_tensors: bool = True) -> Manifest | None:
    """The manifest of a folder, whose tensors may be left out; None where there is none. Raises
    `DamagedError` for a damaged one, `SavedError` where it names files outside of the folder."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no regular file")
        return _parsed(path.read_bytes(), folder, with_tensors)
    except SavedError:
        raise
    except Exception as error:  # of whatever a forged file holds, recursion and types among them
        raise DamagedError(
            f" is damaged ({type(error).__name__}: {error!s:.200})",
            place=repr(str(path)),
            way_out="load an earlier checkpoint",
        ) from error


def _parsed(text: bytes, folder: Path, with_tensors: bool) -> Manifest:
    tree = json.loads(text)
    if tree["format"] not in FORMATS:
        raise ValueError(f"format {tree['format']!r}; this version reads {FORMATS}")
    body = text.partition(b"\n")[2]
    if tree["format"] > 1 and tree["xxh3_64"] != xxhash.xxh3_64_hexdigest(body):
        raise ValueError("its checksum is not that of what was saved")
    files = {}
    for name, fields in tree["files"].items():
        files[name] = SavedFile(**fields)
        natural(files[name].bytes)
        if not isinstance(files[name].xxh3_64, str | None):
            raise TypeError(f"{files[name].xxh3_64!r} is no checksum")
    paths = {name: inside(folder, name, repr(str(folder / MANIFEST))) for name in files}
    tensors = {}
    for name, fields in tree.get("tensors", {}).items() if with_tensors else ():
        dtype = getattr(torch, fields["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{fields['dtype']!r} is no dtype")
        tensors[name] = StoredTensor(
            shape=_sizes(fields["shape"]),
            dtype=dtype,
            chunks=tuple(_chunk(chunk, paths) for chunk in fields["chunks"]),
        )
        tensors[name].check()
    training = tree.get("training")
    if not isinstance(training, dict | None):
        raise TypeError("training is no object")
    return Manifest(files=files, tensors=tensors, training=training)


def _chunk(fields: Any, paths: Mapping[str, Path]) -> StoredChunk:
    file, offset, sizes, start, checksum = fields
    if not isinstance(checksum, str):
        raise TypeError(f"{checksum!r} is no checksum")
    box = _sizes(offset), _sizes(sizes)
    return StoredChunk(box=box, file=paths[file], start=natural(start), xxh3_64=checksum)


def natural(number: Any) -> int:
    """A size or an offset. Raises ValueError for anything else."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is where a size or an offset must be")
    return number


def _sizes(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list):
        raise TypeError(f"{sizes!r} is where sizes must be")
    return tuple(map(natural, sizes))


def read_checkpoint(folder: Path, place: str, *, check_files: bool = True) -> Manifest:
    """The manifest of a checkpoint, whose files are there in full. Raises `DamagedError` where they
    are not, `NoCheckpointError` where the folder is none, `SavedError` for an older version's."""
    try:
        manifest = read_manifest(folder)
        if manifest is not None and manifest.training is not None:
            if check_files:
                manifest.check(folder)
            return manifest
    except DamagedError as error:
        raise DamagedError.of(error, place) from error
    if (folder / OLD_METADATA).exists():
        raise SavedError(
            "was saved by an older version, or by torch.distributed.checkpoint",
            place=place,
            way_out=f"python -m scripts.convert_checkpoint {folder} <new folder>",
        )
    raise NoCheckpointError(
        f"has no {MANIFEST!r} of a checkpoint, so it is no checkpoint of a ParallelModel",
        place=place,
        way_out="weights saved otherwise go through load_weights or load_state_dict",
    )


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint, of this version or of an older one."""
    manifest = _sound_manifest(folder)
    return (folder / OLD_NOTES).exists() or (manifest is not None and manifest.training is not None)


def _sound_manifest(folder: Path) -> Manifest | None:
    """The manifest without its tensors, of which there may be a million parts; None for none, or a
    damaged one."""
    try:
        return read_manifest(folder, with_tensors=False)
    except SavedError:
        return None


def foreign_files(folder: Path, *, finished: bool) -> list[str]:
    """Files of a folder that no save wrote. A `finished` folder must have a sound manifest, or
    files that only a checkpoint has: else all of it is foreign."""
    if not folder.is_dir() or folder.is_symlink():
        return [folder.name] if folder.exists() or folder.is_symlink() else []
    listed = _sound_manifest(folder)
    entries = sorted(folder.iterdir())
    known = not finished or listed is not None or _has_parts(entries)
    return [entry.name for entry in entries if not known or _is_foreign(entry, listed)]


def _has_parts(entries: Iterable[Path]) -> bool:
    """Whether files of a checkpoint are there, whose manifest may be damaged."""
    return any(x.name == OLD_NOTES or x.match("tensors-*.safetensors") for x in entries)


def _is_foreign(entry: Path, listed: Manifest | None) -> bool:
    if not _NAMES.fullmatch(entry.name) or not entry.is_file() or entry.is_symlink():
        return True
    return listed is not None and entry.name not in (*listed.files, MANIFEST)
