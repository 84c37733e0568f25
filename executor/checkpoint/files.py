"""Files of weights, read piece by piece: each source knows the names, shapes and where they lie.

`fill` reads what the pieces (`executor.checkpoint.parts`) need:

- a `torch.save` file, mapped into memory: the pages that hold the box;
- safetensors, one file or several with an index: the bytes of the box;
- a checkpoint folder of torch.distributed.checkpoint (DCP): the saved chunks that overlap the box
  (its format stores a chunk as one archive).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright.executor.checkpoint.folder import published
from meshwright.executor.checkpoint.parts import LoadPlanner, Piece

FORMATS = (
    "a file of torch.save (.pt, .pth, .bin), a .safetensors file, a folder with "
    "model.safetensors(.index.json), or a checkpoint folder with .metadata"
)


class Source(Protocol):
    """Stored weights: `shapes` by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def fill(self, pieces: Sequence[Piece]) -> None: ...


def open_source(path: str | Path) -> Source:
    """The weights at `path`, in whatever format they are. Raises ValueError where there are
    none."""
    path = published(Path(path))
    if path.is_dir():
        if (path / ".metadata").is_file():
            return Checkpoint(path)
        return Files(_files_of(path))
    if path.is_file():
        return Files(_indexed(path) if path.name.endswith(".index.json") else [path])
    raise ValueError(f"weights: {str(path)!r} does not exist; give {FORMATS}")


def _files_of(folder: Path) -> list[Path]:
    """The weight files of a folder: those of its index, or its only one."""
    for ending in (".safetensors", ".bin"):
        if indexes := sorted(folder.glob(f"*{ending}.index.json")):
            return _indexed(_only(folder, indexes))
        if files := sorted(folder.glob(f"*{ending}")):
            return [_only(folder, files)]
    raise ValueError(f"weights: {str(folder)!r} holds none; give {FORMATS}")


def _only(folder: Path, found: Sequence[Path]) -> Path:
    if len(found) > 1:
        names = [path.name for path in found]
        raise ValueError(f"weights: {str(folder)!r} holds several, {names}; name one of them")
    return found[0]


def _indexed(index: Path) -> list[Path]:
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    files = [index.parent / name for name in sorted(set(names))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"weights: {str(index)!r} lists {missing}, which are not there")
    return files


# --- files of whole tensors -----------------------------------------------------------------------


class Files:
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

    def fill(self, pieces: Sequence[Piece]) -> None:
        by_file: dict[Path, list[Piece]] = {}
        for piece in pieces:
            by_file.setdefault(self.path_of[piece.name], []).append(piece)
        for path, here in by_file.items():
            with ExitStack() as stack, torch.no_grad():
                stored = opened(path, stack)
                for piece in here:
                    piece.into.copy_(stored[piece.name][piece.box])


def shape_of(stored: Any) -> Sequence[int]:
    return stored.shape if isinstance(stored, torch.Tensor) else stored.get_shape()


def opened(path: Path, stack: ExitStack) -> Mapping[str, Any]:
    """What a file holds, by name: tensors in mapped memory, or safetensors' slices; both are read
    by indexing."""
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


class Checkpoint:
    """A DCP folder; what it holds besides tensors is left alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        self.shapes = {
            name: tuple(entry.size)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def fill(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            dcp.load({}, checkpoint_id=self.path, planner=LoadPlanner(pieces), no_dist=True)
