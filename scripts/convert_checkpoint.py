"""Convert a checkpoint of an older version, or of torch.distributed.checkpoint (DCP), to today's.

    python -m scripts.convert_checkpoint OLD NEW

Nothing of the old folder runs. DCP pickles its `.metadata`, and a pickle calls what it names: here
the few names that DCP writes stand for plain records, every other name is refused, and what comes
out is checked: types, boxes that make up their tensors, files inside the folder. Parts of tensors
and notes are archives of `torch.save`, loaded with `weights_only`. Checksums are verified where
there are any. One part of a tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from meshwright.executor.checkpoint import MODEL, first_notes, values
from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files import (
    Chunk,
    LocalChunks,
    Manifest,
    atomic_folder,
    read_manifest,
    write_tensors,
)
from meshwright.executor.files.manifest import OLD_METADATA as METADATA
from meshwright.executor.files.manifest import OLD_NOTES as NOTES
from meshwright.executor.files.manifest import StoredChunk, StoredTensor, natural
from meshwright.executor.files.paths import inside

SERIALIZED = ("model", "steps", "seed", "loss_scale", "optimizer", "extra")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldChunk(StoredChunk):
    """A box of a tensor, an archive of `length` bytes; `xxh3_64` is empty where none is known."""

    length: int


class _Record:
    """Stands for an object of a pickle: what it was made of, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Properties(_Record): ...


class _Chunk(_Record): ...


class _Index(_Record): ...


class _Place(_Record): ...


_DCP = "torch.distributed.checkpoint"
_BEFORE = "torch.distributed._shard.sharded_tensor.metadata"  # where torch < 2.3 had some of them
_STANDS_FOR: Mapping[tuple[str, str], type] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (_BEFORE, "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Record,
    (_BEFORE, "MEM_FORMAT_ENCODING"): _Record,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "StorageMeta"): _Record,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Place,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _Record,  # Python 3.11.0 to 3.11.3 pickle a member of an enum so
    **{
        (module, name): _Record
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    """Makes records, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _STANDS_FOR:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is no part of such metadata: reading it could "
                f"run code, so it is not read"
            )
        return _STANDS_FOR[module, name]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in a DCP folder, by name; objects are left out.

    Raises RuntimeError where the file is damaged, or names anything that could run code, and
    ValueError where it names files outside of the folder.
    """
    path = folder / METADATA
    if not path.is_file():  # a pipe would be waited for
        raise DamagedError(" can't be read: it is no regular file", place=repr(str(path)))
    try:
        return _tensors(_Unpickler(io.BytesIO(path.read_bytes())).load(), folder)
    except _Misnamed as error:
        raise DamagedError(str(error)) from error
    except Exception as error:  # a damaged pickle raises any of them
        why = f"{type(error).__name__}: {error}"
        raise DamagedError(
            f" can't be read ({why})",
            place=repr(str(path)),
            way_out="it must be as torch.distributed.checkpoint wrote it: load an earlier "
            "checkpoint, or get it anew from its source",
        ) from error


class _Misnamed(ValueError):
    """A name of a file that leads out of its folder."""


def _tensors(metadata: Any, folder: Path) -> dict[str, StoredTensor]:
    fields = _fields(metadata, _Metadata)
    places: dict[tuple[str, tuple[int, ...]], OldChunk] = {}
    paths: dict[str, Path] = {}
    chunks_of = {}
    for name, kind in fields["state_dict_metadata"].items():
        if isinstance(kind, _Tensor):
            chunks_of[_of(name, str)] = _fields(kind, _Tensor)
    sizes = {
        (name, _sizes(_fields(chunk, _Chunk)["offsets"])): _sizes(_fields(chunk, _Chunk)["sizes"])
        for name, kind in chunks_of.items()
        for chunk in kind["chunks"]
    }
    for key, value in fields["storage_data"].items():
        index, place = _fields(key, _Index), _fields(value, _Place)
        if index["fqn"] not in chunks_of:
            continue  # an object
        at = index["fqn"], _sizes(index["offset"])
        file = place.get("relative_path")
        if file not in paths:
            try:
                paths[file] = inside(folder, file, repr(str(folder / METADATA)))
            except ValueError as error:
                raise _Misnamed(str(error)) from error
        if place.get("transform_descriptors"):
            raise DamagedError(f"{index['fqn']!r} is compressed, which is not supported")
        start, length, summed = place["offset"], place["length"], place.get("xxh3_64")
        places[at] = OldChunk(
            box=(at[1], sizes[at]),
            file=paths[file],
            start=natural(start),
            length=natural(length),
            xxh3_64="" if summed is None else _of(summed, str),
        )
    return {name: _tensor(name, kind, places) for name, kind in chunks_of.items()}


def _tensor(
    name: str, kind: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], OldChunk]
) -> StoredTensor:
    """One tensor, whose boxes lie inside it, hold as much as it has, and no more than their
    bytes."""
    state = _fields(kind["properties"], _Properties)
    dtype = _of(state[0] if isinstance(state, tuple) else state["dtype"], torch.dtype)
    shape = _sizes(kind["size"])
    chunks = tuple(
        places[name, _sizes(_fields(chunk, _Chunk)["offsets"])] for chunk in kind["chunks"]
    )
    tensor = StoredTensor(shape=shape, dtype=dtype, chunks=chunks)
    try:
        tensor.check()
    except ValueError as error:
        raise DamagedError(f"{name!r} {error}") from error
    for chunk in chunks:
        if tensor.length(chunk) > chunk.length:
            raise DamagedError(f"{name!r} has a part that is not stored whole")
    return tensor


def _fields(x: Any, kind: type[_Record]) -> Any:
    """The state of a record of that kind."""
    return _of(x, kind).state


def _of(x: Any, kind: type) -> Any:
    if not isinstance(x, kind):
        raise DamagedError(f"a {type(x).__name__} is where a {kind.__name__.strip('_')} must be")
    return x


def _sizes(x: Any) -> tuple[int, ...]:
    return tuple(natural(size) for size in _of(x, tuple))


# --- conversion -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldChunks(LocalChunks):
    """The parts of an old tensor, read when they are written elsewhere: `local` has no values."""

    tensor: StoredTensor

    @staticmethod
    def of_old(tensor: StoredTensor) -> _OldChunks:
        local = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        chunks = tuple(
            Chunk(offset=chunk.box[0], local_offset=chunk.box[0], sizes=chunk.box[1])
            for chunk in tensor.chunks
        )
        return _OldChunks(shape=local.shape, local=local, chunks=chunks, tensor=tensor)

    def values(self, k: int) -> torch.Tensor:
        chunk = self.tensor.chunks[k]
        assert isinstance(chunk, OldChunk)
        return read_chunk(chunk, self.dtype)


def read_chunk(chunk: OldChunk, dtype: torch.dtype) -> torch.Tensor:
    """The values of a part. Raises `DamagedError` where they are not what was saved."""
    place = f"{str(chunk.file)!r}, from byte {chunk.start}"
    with chunk.file.open("rb") as file:
        file.seek(chunk.start)
        data = file.read(chunk.length)
    if chunk.xxh3_64 not in ("", xxhash.xxh3_64_hexdigest(data)):
        raise DamagedError("is damaged: its checksum is not that of what was saved", place=place)
    try:
        x = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises any of them
        raise DamagedError(f"is damaged ({error!s:.200})", place=place) from error
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != (chunk.box[1], dtype):
        raise DamagedError(f"is no tensor of {dtype} and shape {chunk.box[1]}", place=place)
    return x


def converted(old: Path, new: Path) -> Manifest:
    """Write the checkpoint in the folder `old` to `new`. Raises ValueError for a folder that holds
    none, RuntimeError where it is damaged or would run code."""
    if (saved := read_manifest(old)) is not None:
        saved.check(old)
    if not (old / METADATA).is_file():
        raise SavedError(
            f"has no {METADATA!r}",
            place=repr(str(old)),
            legal="a checkpoint of format 1, or of torch.distributed.checkpoint",
        )
    stored = read_metadata(old)
    if not any(name.startswith(MODEL) for name in stored):
        stored = {MODEL + name: x for name, x in stored.items()}
    training, tensors = _training(old)
    chunks = {name: _OldChunks.of_old(x) for name, x in stored.items()}
    folder = atomic_folder.followed(new)
    saving = atomic_folder.prepare(folder)
    with atomic_folder.discarded_on_error(saving, first=True):
        parts, files = write_tensors({**chunks, **tensors}, saving, None)
        manifest = Manifest(files=files, tensors=parts, training=training)
        atomic_folder.complete(saving, folder, manifest)
    return manifest


def _training(old: Path) -> tuple[dict[str, Any], dict[str, LocalChunks]]:
    """The notes of an old checkpoint, and their tensors by name; of other programs' nothing."""
    notes = first_notes()
    tensors: dict[str, torch.Tensor] = {}

    def keep(x: torch.Tensor, path: str) -> dict[str, Any]:
        tensors[path] = x
        return {}

    if (old / NOTES).is_file():
        try:
            of_old = torch.load(old / NOTES, map_location="cpu", weights_only=True)
            notes |= {n: values.encoded(of_old[n], keep, f"old/{n}") for n in SERIALIZED}
        except Exception as error:  # a damaged archive raises any of them
            raise DamagedError(f"is damaged ({error!s:.200})", place=repr(NOTES)) from error
    if (old / "plan.json").is_file():
        notes["plan"] = json.loads((old / "plan.json").read_text())
    return notes, {path: LocalChunks.of(x) for path, x in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    chosen = parser.parse_args()
    try:
        manifest = converted(atomic_folder.published(chosen.old), chosen.new)
    except (SavedError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{len(manifest.tensors)} tensors in {chosen.new}")


if __name__ == "__main__":
    main()
