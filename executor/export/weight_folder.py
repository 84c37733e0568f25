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
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import torch

from meshwright.executor.errors import SavedError
from meshwright.executor.files import (
    NAMES_OF_DTYPES,
    Kind,
    Manifest,
    SafetensorsFile,
    SavedFile,
    atomic_folder,
    bytes_of,
    files_beside,
    holds_checkpoint,
    in_file_order,
)
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
        shards = split(
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
    files = shards.filename_to_tensors
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

    def finish(self) -> dict[str, SavedFile]:
        """Sizes and checksums of the files, which are on the disk then. Raises the first error."""
        self._wait()
        self._thread.shutdown()
        try:
            if self._error is not None:
                raise self._error
            return {
                name: SavedFile(bytes=file.bytes, xxh3_64=file.finish())
                for name, file in self._open.items()
            }
        finally:
            for file in self._open.values():
                file.close()


def prepare_folder(path: str | Path) -> tuple[Path, Path]:
    """The folder that `path` leads to, and the one to fill in its place. Raises ValueError where it
    holds a checkpoint, or what no save wrote."""
    folder = atomic_folder.followed(path)
    if holds_checkpoint(folder):
        raise SavedError(
            "holds a checkpoint of a run, which weights alone can't replace",
            place=f"{str(folder)!r}",
            way_out="save to another path",
        )
    return folder, atomic_folder.prepare(folder)


def publish(
    saving: Path, folder: Path, layout: Layout, files: Sequence[Mapping[str, SavedFile]]
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
    manifest = Manifest(files={**written, **files_beside(saving, beside)})
    atomic_folder.complete(saving, folder, manifest)
