"""The `.metadata` of torch.distributed.checkpoint (DCP), read without running anything.

DCP pickles it, and a pickle calls what it names. Here the few names that DCP writes stand for
plain records, every other name is refused, and what comes out is checked: types, boxes that make up
their tensors, files inside the folder. torch's own classes are made neither from a file nor changed
by it.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.errors import DamagedError
from meshwright.executor.files.chunks import Box
from meshwright.executor.files.ownership import METADATA, check_file, read_manifest
from meshwright.executor.files.paths import inside


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A box of a tensor, stored as `length` bytes of a file; their checksum, if it is known."""

    box: Box
    file: Path
    start: int
    length: int
    xxh3_64: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a folder: of the whole the shape and dtype, and where its parts are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


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
    files = read_manifest(folder)
    if files is not None:
        check_file(folder, METADATA, files)
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
    places: dict[tuple[str, tuple[int, ...]], StoredChunk] = {}
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
        places[at] = StoredChunk(
            box=(at[1], sizes[at]),
            file=paths[file],
            start=_natural(start),
            length=_natural(length),
            xxh3_64=None if summed is None else _of(summed, str),
        )
    return {name: _tensor(name, kind, places) for name, kind in chunks_of.items()}


def _tensor(
    name: str, kind: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], StoredChunk]
) -> StoredTensor:
    """One tensor, whose boxes lie inside it, hold as much as it has, and no more than their
    bytes."""
    state = _fields(kind["properties"], _Properties)
    dtype = _of(state[0] if isinstance(state, tuple) else state["dtype"], torch.dtype)
    shape = _sizes(kind["size"])
    chunks = tuple(
        places[name, _sizes(_fields(chunk, _Chunk)["offsets"])] for chunk in kind["chunks"]
    )
    for chunk in chunks:
        fits = all(
            a + n <= size for a, n, size in zip(chunk.box[0], chunk.box[1], shape, strict=True)
        )
        if not fits or math.prod(chunk.box[1]) * dtype.itemsize > chunk.length:
            raise DamagedError(f"{name!r} has a part that is not inside it, or not stored whole")
    if sum(math.prod(chunk.box[1]) for chunk in chunks) != math.prod(shape):
        raise DamagedError(f"the parts of {name!r} do not make up its shape {shape}")
    return StoredTensor(shape=shape, dtype=dtype, chunks=chunks)


def _fields(x: Any, kind: type[_Record]) -> Any:
    """The state of a record of that kind."""
    return _of(x, kind).state


def _of(x: Any, kind: type) -> Any:
    if not isinstance(x, kind):
        raise DamagedError(f"a {type(x).__name__} is where a {kind.__name__.strip('_')} must be")
    return x


def _natural(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise DamagedError(f"{x!r} is where a size or an offset must be")
    return x


def _sizes(x: Any) -> tuple[int, ...]:
    return tuple(_natural(size) for size in _of(x, tuple))
