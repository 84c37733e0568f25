"""Weight files: `torch.save`, safetensors and DCP folders, of which a rank reads its chunks only.

`fill` reads for each `ChunkRead` (`chunks.py`)

- of a `torch.save` file, mapped into memory: the pages that hold the box;
- of safetensors, one file or several with an index: the bytes of the box;
- of a checkpoint folder of torch.distributed.checkpoint (DCP): the saved chunks that overlap the
  box (its format stores a chunk as one archive).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.executor.checkpoint.atomic_folder import published
from meshwright.executor.checkpoint.chunks import ChunkRead
from meshwright.executor.checkpoint.dcp_storage import read_tensors_alone, stored_tensors

FORMATS = (
    "a file of torch.save (.pt, .pth, .bin), a .safetensors file, a folder with "
    "model.safetensors(.index.json), or a checkpoint folder with .metadata"
)


class WeightSource(Protocol):
    """Stored weights: global `shapes` by name, and reads of boxes of them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def fill(self, reads: Sequence[ChunkRead]) -> None: ...


def open_source(path: str | Path) -> WeightSource:
    """The weights at `path`, in any of `FORMATS`. Raises ValueError where there are none."""
    path = published(Path(path))
    if path.is_dir():
        if (path / ".metadata").is_file():
            return CheckpointFolder(path)
        return WeightFiles(_files_of(path))
    if path.is_file():
        return WeightFiles(_indexed(path) if path.name.endswith(".index.json") else [path])
    raise ValueError(f"weights: {str(path)!r} does not exist; give {FORMATS}")


def _files_of(folder: Path) -> list[Path]:
    """The weight files of a folder: its index', or its only one. Raises ValueError for none or
    several."""
    for ending in (".safetensors", ".bin"):
        if indexes := sorted(folder.glob(f"*{ending}.index.json")):
            return _indexed(_only(folder, indexes))
        if files := sorted(folder.glob(f"*{ending}")):
            return [_only(folder, files)]
    raise ValueError(f"weights: {str(folder)!r} holds none; give {FORMATS}")


def _only(folder: Path, paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        names = [path.name for path in paths]
        raise ValueError(f"weights: {str(folder)!r} holds several, {names}; name one of them")
    return paths[0]


def _indexed(index: Path) -> list[Path]:
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    files = [index.parent / name for name in sorted(set(names))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"weights: {str(index)!r} lists {missing}, which are not there")
    return files


# --- files of whole tensors -----------------------------------------------------------------------


class WeightFiles:
    """One or several files of whole tensors, safetensors or `torch.save`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.path_of: dict[str, Path] = {}
        for path in paths:
            with ExitStack() as stack:
                for name, stored in opened(path, stack).items():
                    self.shapes[name] = tuple(shape_of(stored))
                    self.path_of[name] = path

    def fill(self, reads: Sequence[ChunkRead]) -> None:
        by_file: dict[Path, list[ChunkRead]] = {}
        for read in reads:
            by_file.setdefault(self.path_of[read.name], []).append(read)
        for path, of_file in by_file.items():
            with ExitStack() as stack, torch.no_grad():
                stored = opened(path, stack)
                for read in of_file:
                    read.into.copy_(stored[read.name][read.index])


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
            raise ImportError(
                f"weights: {str(path)!r} needs the safetensors package: pip install safetensors"
            ) from error
        file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, Mapping):
        raise ValueError(f"weights: {str(path)!r} holds a {type(state).__name__}, no state dict")
    return dict(_flat(state))


def _flat(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested dicts (`{"model": {...}, "step": 3}`) by dotted name."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")


# --- checkpoints of torch.distributed.checkpoint --------------------------------------------------


class CheckpointFolder:
    """A DCP folder, of which only the tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes = {name: tuple(x.size) for name, x in stored_tensors(path).items()}

    def fill(self, reads: Sequence[ChunkRead]) -> None:
        if reads:
            read_tensors_alone(reads, self.path)
