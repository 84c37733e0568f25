"""A folder of safetensors: which file holds what, and the files' writing.

    model.safetensors                             or, of more than max_shard_size,
    model-00001-of-00003.safetensors, ...         with model.safetensors.index.json
    adapter_model.safetensors                     adapters, in one file
    config.json, generation_config.json, adapter_config.json
    manifest.json                                 the sizes and checksums of all of them

Files are cut as transformers cuts them, whatever the plan. torch's `HuggingFaceStorageWriter` is
not used: it takes one chunk of a tensor per rank (a fused projection has several), and writes the
ranks' parts to files of their own first, which rank 0 then copies into whole ones: each byte is
written twice and read once more, by one rank in the end, into the folder that is to be replaced.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import xxhash

from meshwright.executor.errors import SavedError
from meshwright.executor.files import MANIFEST, NOTES, OwnFile, atomic_folder, manifest
from meshwright.profiles.inputs import shown

ADAPTERS = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The `files` of a folder: of each its tensors, stored name -> dtype and shape."""

    files: Mapping[str, Mapping[str, Kind]]

    @property
    def index(self) -> bytes | None:
        """The index of several files."""
        if len(self.files) == 1:
            return None
        total = sum(bytes_of(kind) for kinds in self.files.values() for kind in kinds.values())
        weight_map = {name: file for file, kinds in self.files.items() for name in kinds}
        data = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return json.dumps(data, indent=2).encode()


def laid_out(kinds: Mapping[str, Kind], max_shard_size: int | str) -> Layout:
    """Files of at most that many bytes ("5GB"), or of one tensor. Raises ValueError for a size that
    is none."""
    if (
        isinstance(max_shard_size, bool)
        or not isinstance(max_shard_size, int | str)
        or (isinstance(max_shard_size, int) and max_shard_size < 1)
    ):
        raise SavedError.refused(
            "max_shard_size",
            max_shard_size,
            legal="bytes, from 1, or text as '5GB'",
            way_out="leave it out for 5 GB",
        )
    split = import_module("huggingface_hub").split_state_dict_into_shards_factory
    try:
        found = split(
            dict(kinds),
            get_storage_size=bytes_of,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise SavedError(
            f"={shown(max_shard_size)}: {error}",
            place="max_shard_size",
            legal="bytes, or text as '5GB'",
        ) from error
    files = found.filename_to_tensors
    return Layout(files={file: {n: kinds[n] for n in names} for file, names in files.items()})


def check_dtype(dtype: object) -> None:
    """Raise ValueError for what floats can't be saved as."""
    legal = [x for x in NAMES_OF_DTYPES if x.is_floating_point]
    if dtype is not None and dtype not in legal:
        raise SavedError.refused(
            "dtype",
            dtype,
            legal=f"None, {', '.join(map(str, legal))}",
            way_out="leave it out to keep what is stored",
        )


def converted(kind: Kind, dtype: torch.dtype | None) -> Kind:
    """A tensor's dtype and shape where those of floats become `dtype`."""
    return (dtype if dtype and kind[0].is_floating_point else kind[0]), kind[1]


def in_turn(files: Iterable[tuple[str, Mapping[str, Kind]]]) -> list[tuple[str, str]]:
    """(file, name) of all tensors: the first of each file, then the second of each, so that the
    ranks that own files have something to write at the same time."""
    columns = ([(file, name) for name in in_file_order(kinds)] for file, kinds in files)
    return [entry for row in zip_longest(*columns) for entry in row if entry is not None]


# --- writing --------------------------------------------------------------------------------------


class FileWriter:
    """Writes files of safetensors in a thread, so that tensors are gathered meanwhile: one is being
    written, and one may wait for it. After an error it takes what comes, and `finish` raises."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder, self._layout = folder, layout
        self._open: dict[str, SafetensorsFile] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="safetensors")
        self._last: Future[None] | None = None
        self._error: Exception | None = None

    def write(self, file: str, name: str, x: torch.Tensor) -> None:
        """The next tensor of a file."""
        self._wait()
        if self._error is None:
            self._last = self._thread.submit(self._write, file, name, x)

    def _write(self, file: str, name: str, x: torch.Tensor) -> None:
        kinds = self._layout.files[file]
        if file not in self._open:
            self._open[file] = SafetensorsFile(self._folder / file, kinds)
        self._open[file].write(x.to(kinds[name][0]))

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        try:
            last.result()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's parts
            self._error = error

    def finish(self) -> dict[str, OwnFile]:
        """Sizes and checksums of the files, which are on the disk then. Raises the first error."""
        self._wait()
        self._thread.shutdown()
        try:
            if self._error is not None:
                raise self._error
            return {
                name: OwnFile(bytes=file.bytes, xxh3_64=file.finish())
                for name, file in self._open.items()
            }
        finally:
            for file in self._open.values():
                file.close()


def prepare_folder(path: str | Path) -> tuple[Path, Path]:
    """The folder that `path` leads to, and the one to fill in its place. Raises ValueError where it
    holds a checkpoint, or what no save wrote."""
    folder = atomic_folder.followed(path)
    if (folder / NOTES).exists():
        raise SavedError(
            "holds a checkpoint of a run, which weights alone can't replace",
            place=f"{str(folder)!r}",
            way_out="save to another path",
        )
    return folder, atomic_folder.prepare(folder)


def publish(
    saving: Path, folder: Path, layout: Layout, files: Sequence[Mapping[str, OwnFile]]
) -> None:
    """Complete a folder whose weights are written, and put it in its place."""
    if layout.index is not None:
        (saving / INDEX).write_bytes(layout.index)
    written = {name: file for some in files for name, file in some.items()}
    beside = [path.name for path in saving.iterdir() if path.name not in written]
    for name in beside:
        handle = os.open(saving / name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    atomic_folder.write_synced(saving / MANIFEST, manifest(saving, written, beside))
    atomic_folder.publish(saving, folder)


# --- safetensors files ----------------------------------------------------------------------------

# A file of safetensors that is written tensor by tensor: no more than one of them is in memory.
#
#     8 bytes, little-endian    the header's length
#     the header, JSON          {name: {"dtype": "F32", "shape": [...], "data_offsets": [from, to]}}
#     the tensors               one after the other, without gaps
#
# The safetensors library writes a file from tensors that are all there, a file's 5 GB at a time;
# its reader is what the tests read with. Larger elements come first, so that each tensor lies at a
# multiple of its element's size, which readers that map the file want.


ALIGNMENT = 8
NAMES_OF_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape


def bytes_of(kind: Kind) -> int:
    return math.prod(kind[1]) * kind[0].itemsize


def in_file_order(kinds: Mapping[str, Kind]) -> list[str]:
    """The names of a file's tensors, as they follow each other in it."""
    return sorted(kinds, key=lambda name: -kinds[name][0].itemsize)


class SafetensorsFile:
    """A file that takes the tensors `kinds`, in the order of `in_file_order`."""

    def __init__(self, path: Path, kinds: Mapping[str, Kind]) -> None:
        header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in in_file_order(kinds):
            dtype, shape = kinds[name]
            if dtype not in NAMES_OF_DTYPES:
                raise SavedError(
                    f"is of {dtype}, which safetensors can't hold",
                    place=f"{name!r}",
                    legal=", ".join(map(str, NAMES_OF_DTYPES)),
                    way_out="give one of these as dtype=",
                )
            start, end = end, end + bytes_of(kinds[name])
            entry = {"dtype": NAMES_OF_DTYPES[dtype], "shape": list(shape)}
            header[name] = entry | {"data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self.bytes = 8 + len(text) + end
        self._sum = xxhash.xxh3_64()
        self._file = path.open("wb", buffering=0)
        self._write(len(text).to_bytes(8, "little") + text)

    def write(self, x: torch.Tensor) -> None:
        """The next tensor, on the host."""
        if x.numel():
            self._write(x.contiguous().reshape(-1).view(torch.uint8).numpy())

    def _write(self, data: Any) -> None:
        """Write bytes, or an array of them."""
        self._sum.update(data)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def finish(self) -> str:
        """Close the file, which is on the disk then; returns its checksum."""
        os.fsync(self._file.fileno())
        self.close()
        return self._sum.hexdigest()

    def close(self) -> None:
        self._file.close()
