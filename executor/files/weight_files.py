"""Weight files: `torch.save`, safetensors and checkpoint folders, of which a rank reads its chunks.

`fill` reads for each `ChunkRead` (`chunks.py`)

- of a `torch.save` file, mapped into memory: the pages that hold the box;
- of safetensors, one file or several with an index: the bytes of the box;
- of a checkpoint folder: the saved chunks that overlap the box, verified by their checksums.

No file runs code, and an index names files of its own folder only. Of a folder that
`save_pretrained` wrote, `check` verifies whole files.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files.atomic_folder import followed, published
from meshwright.executor.files.checksums import MovedBytes
from meshwright.executor.files.chunks import ChunkRead
from meshwright.executor.files.manifest import (
    OLD_METADATA,
    Manifest,
    holds_checkpoint,
    read_checkpoint,
    read_manifest,
)
from meshwright.executor.files.paths import inside
from meshwright.executor.files.tensors import read_tensors
from meshwright.profiles import inputs

FORMATS = (
    "a file of torch.save (.pt, .pth, .bin), a .safetensors file, a folder with "
    "model.safetensors(.index.json), or a checkpoint folder"
)


class WeightSource(Protocol):
    """Stored weights: global `shapes` by name, and reads of boxes of them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def fill(self, reads: Sequence[ChunkRead]) -> None: ...

    def check(self, part: int, parts: int) -> None:
        """Raise `DamagedError` for one of that part of the files that is not as it was saved, as
        far as checksums of files say."""


def open_source(path: str | Path) -> WeightSource:
    """The weights at `path`, in any of `FORMATS`. Raises ValueError where there are none, or a name
    leads out of the folder, RuntimeError where a file is damaged or would run code."""
    path = inputs.checked_path(path, "weights")
    if not path.is_file():  # a link to a file keeps its name, which says the format
        path = published(followed(path))
    if path.is_dir():
        if holds_checkpoint(path) or (path / OLD_METADATA).is_file():
            return CheckpointFolder(path)
        return WeightFiles(_files_of(path), read_manifest(path))
    if path.is_file():
        return WeightFiles(_indexed(path) if path.name.endswith(".index.json") else [path])
    fault = "is no regular file" if path.exists() else "does not exist"
    raise SavedError(f" {fault}", place=f"weights: {str(path)!r}", way_out=f"give {FORMATS}")


def _files_of(folder: Path) -> list[Path]:
    """The weight files of a folder: its index', or its only one. Raises ValueError for none or
    several."""
    for ending in (".safetensors", ".bin"):
        if indexes := sorted(folder.glob(f"*{ending}.index.json")):
            return _indexed(_only(folder, indexes))
        if files := sorted(folder.glob(f"*{ending}")):
            return [_only(folder, files)]
    raise SavedError(" holds none", place=f"weights: {str(folder)!r}", way_out=f"give {FORMATS}")


def _only(folder: Path, paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        names = [path.name for path in paths]
        raise SavedError(
            f" holds several, {names}",
            place=f"weights: {str(folder)!r}",
            way_out="name one of them",
        )
    if not paths[0].is_file():  # a pipe would be waited for
        raise SavedError(
            " is no regular file", place=f"weights: {str(paths[0])!r}", way_out=f"give {FORMATS}"
        )
    return paths[0]


def _indexed(index: Path) -> list[Path]:
    try:
        names = {*inputs.read_json(index, most=inputs.MAX_MEASURED_BYTES)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f" is damaged ({type(error).__name__}: {error})",
            place=f"weights: {str(index)!r}",
            legal='it must be an object with "weight_map": {name of a tensor: name of its file}',
            way_out="get it anew from its source",
        ) from error
    files = [inside(index.parent, name, f"weights: {str(index)!r}") for name in names]
    files.sort()
    if missing := [file.name for file in files if not file.is_file()]:
        raise SavedError(
            f" lists {missing}, which are not there",
            place=f"weights: {str(index)!r}",
            legal="files beside the index, each a regular one",
            way_out="get them from where the index is from",
        )
    return files


# --- files of whole tensors -----------------------------------------------------------------------


class WeightFiles:
    """One or several files of whole tensors, safetensors or `torch.save`; the `manifest` of a
    folder that `save_pretrained` wrote."""

    def __init__(self, paths: Sequence[Path], manifest: Manifest | None = None) -> None:
        self.paths, self.manifest = paths, manifest
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.path_of: dict[str, Path] = {}
        for path in paths:
            with ExitStack() as stack:
                for name, stored in opened(path, stack).items():
                    self.shapes[name] = tuple(shape_of(stored))
                    self.path_of[name] = path

    @contextmanager
    def opened(self) -> Iterator[Callable[..., torch.Tensor]]:
        """The files open, for a function that reads a tensor by its name; with `rows`, as many of
        dim 0."""
        with ExitStack() as stack, torch.no_grad():
            stored = {path: opened(path, stack) for path in self.paths}

            def read(name: str, rows: int | None = None) -> torch.Tensor:
                with _damage_named(self.path_of[name]):
                    box = (slice(rows), *[slice(None)] * len(self.shapes[name]))
                    x: torch.Tensor = stored[self.path_of[name]][name][box[:-1]]
                    return x

            yield read

    def check(self, part: int, parts: int) -> None:
        if self.manifest is not None:
            names = sorted(self.manifest.files.keys() & {path.name for path in self.paths})
            self.manifest.check(self.paths[0].parent, names[part::parts])

    def fill(self, reads: Sequence[ChunkRead]) -> None:
        by_file: dict[Path, list[ChunkRead]] = {}
        for read in reads:
            by_file.setdefault(self.path_of[read.name], []).append(read)
        moved = MovedBytes("reading weights", sum(read.into.nbytes for read in reads))
        for path, of_file in by_file.items():
            with ExitStack() as stack, torch.no_grad(), _damage_named(path):
                stored = opened(path, stack)
                for read in of_file:
                    read.into.copy_(stored[read.name][read.index])
                    moved(read.into.nbytes)


def shape_of(stored: Any) -> Sequence[int]:
    """The shape of a tensor, or of a slice of safetensors."""
    shape: Sequence[int]
    shape = stored.shape if isinstance(stored, torch.Tensor) else stored.get_shape()
    return shape


def opened(path: Path, stack: ExitStack) -> Mapping[str, Any]:
    """A file's tensors by name, in mapped memory, or safetensors' slices; both are read by
    indexing. Raises ValueError for a file that holds no state dict."""
    if path.suffix == ".safetensors":
        try:
            safe_open = import_module("safetensors").safe_open
        except ImportError as error:
            raise inputs.NotInstalledError(
                " needs the safetensors package",
                place=f"weights: {str(path)!r}",
                way_out="pip install safetensors",
            ) from error
        with _damage_named(path):
            file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    with _damage_named(path):
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, Mapping):
        raise SavedError(
            f" holds a {type(state).__name__}, no state dict",
            place=f"weights: {str(path)!r}",
            legal="tensors by name, in dicts of any depth",
            way_out="save model.state_dict()",
        )
    return dict(_flat(state))


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn what readers raise of a file that is damaged, or would run code, into RuntimeError."""
    try:
        yield
    except Exception as error:
        how = "would run code" if isinstance(error, pickle.UnpicklingError) else "is damaged"
        raise DamagedError(
            f" {how}, or is no such file ({error!s:.400})",
            place=f"weights: {str(path)!r}",
            way_out=f"get it anew, or give {FORMATS}",
        ) from error


def _flat(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested dicts (`{"model": {...}, "step": 3}`) by dotted name."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")


# --- checkpoints ----------------------------------------------------------------------------------


class CheckpointFolder:
    """Weights and optimizer states of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.stored = read_checkpoint(path, f"weights: {str(path)!r}").tensors
        self.shapes = {name: x.shape for name, x in self.stored.items()}

    def fill(self, reads: Sequence[ChunkRead]) -> None:
        read_tensors(reads, self.stored)

    def check(self, part: int, parts: int) -> None:
        """Parts are verified as they are read."""
