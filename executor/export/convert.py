"""Checkpoints as files that transformers loads, and back: in one process, tensor by tensor.

Names and shapes are those of a model, which may be on meta; a checkpoint of another model is
refused with what differs. What is read is verified where there are checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from meshwright.executor.checkpoint import MODEL, Wanted, first_notes, match_names
from meshwright.executor.errors import SavedError, UnwrittenError
from meshwright.executor.export import weight_folder
from meshwright.executor.export.naming import saved_names, saved_part, write_config
from meshwright.executor.files import (
    LocalChunks,
    Manifest,
    SavedFile,
    WeightFiles,
    atomic_folder,
    open_source,
    read_checkpoint,
    read_manifest,
    read_whole,
    write_tensors,
)
from meshwright.executor.ranks import raising_runtime_error


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileTensor(LocalChunks):
    """A tensor of a file, read when it is written elsewhere: `local` has no values."""

    name: str
    read: Callable[..., torch.Tensor]

    @staticmethod
    def of_file(
        name: str, shape: tuple[int, ...], read: Callable[..., torch.Tensor]
    ) -> _FileTensor:
        described = torch.empty(shape, dtype=read(name, rows=0).dtype, device="meta")
        chunks = LocalChunks.of(described).chunks
        return _FileTensor(
            shape=described.shape, local=described, chunks=chunks, name=name, read=read
        )

    def values(self, k: int) -> torch.Tensor:
        return self.read(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Tensors that were written, their bytes, and the folder's files of them."""

    tensors: int
    bytes: int
    files: tuple[str, ...]


def to_pretrained_files(
    checkpoint: str | Path,
    path: str | Path,
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    submodule: str | None = None,
) -> Converted:
    """Write the model's weights in a checkpoint to a folder that `from_pretrained` reads.

    `model` gives names and config, and may be on meta; `max_shard_size`, `dtype` and `submodule` as
    in `save_pretrained`. Raises ValueError where the checkpoint is of another model, RuntimeError
    where it is damaged or the folder can't be written.
    """
    weight_folder.check_dtype(dtype)
    source = atomic_folder.published(atomic_folder.followed(checkpoint))
    tensors = read_checkpoint(source, f"convert: {str(checkpoint)!r}").tensors
    stored = {n.removeprefix(MODEL): x for n, x in tensors.items() if n.startswith(MODEL)}
    wanted = _wanted(model)
    matched = match_names(wanted, {n: x.shape for n, x in stored.items()}, str(checkpoint))
    part = saved_part(model, submodule)
    names = saved_names(part, matched.stored, {fqn: want.names for fqn, want in wanted.items()})
    source_of = {name: matched.stored[fqn] for fqn, name in names.items()}
    kinds = {
        name: weight_folder.converted((stored[of].dtype, stored[of].shape), dtype)
        for name, of in source_of.items()
    }
    layout = weight_folder.laid_out(kinds, max_shard_size)
    folder, saving = weight_folder.prepare_folder(_another(path, checkpoint))
    with _written(folder, saving):
        write_config(
            part, {kind[0] for kind in kinds.values() if kind[0].is_floating_point}, saving
        )
        writer = weight_folder.FileWriter(saving, layout)
        for file, name in weight_folder.in_turn(layout.files.items()):
            writer.write(file, name, read_whole(source_of[name], stored))
        files = writer.finish()
        weight_folder.publish(saving, folder, layout, [files])
    return _converted(len(names), files)


def from_pretrained_files(path: str | Path, checkpoint: str | Path, model: nn.Module) -> Converted:
    """Write weights, of `from_pretrained` or in any format of `load_weights` but a checkpoint, to a
    checkpoint that `load_checkpoint` reads, at step 0 and without an optimizer.

    `model` gives names and shapes, and may be on meta. Raises ValueError where the weights are of
    another model, RuntimeError where they are damaged or the checkpoint can't be written.
    """
    source = open_source(path)
    if not isinstance(source, WeightFiles):
        raise SavedError(
            "is a checkpoint already",
            place=f"convert: {str(path)!r}",
            legal="a folder or file of weights",
            way_out="give a folder of safetensors",
        )
    if Path(path).is_dir() and (saved := read_manifest(Path(path))) is not None:
        saved.check(Path(path))
    matched = match_names(_wanted(model), source.shapes, str(path))
    folder = _another(checkpoint, path)
    saving = atomic_folder.prepare(folder)
    with _written(folder, saving), source.opened() as read:
        tensors = {
            MODEL + fqn: _FileTensor.of_file(name, source.shapes[name], read)
            for fqn, name in matched.stored.items()
        }
        stored, files = write_tensors(tensors, saving, None)
        manifest = Manifest(files=files, tensors=stored, training=first_notes())
        atomic_folder.complete(saving, folder, manifest)
    return _converted(len(tensors), files)


def _wanted(model: nn.Module) -> dict[str, Wanted]:
    """A model's parameters and persistent buffers by their first FQN, with all names of tied
    ones."""
    names: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    held = parameters | buffers
    tensors = {fqn: held[fqn] for fqn in model.state_dict() if fqn in held}
    for fqn, x in tensors.items():
        names.setdefault(id(x), []).append(fqn)
    return {
        fqns[0]: Wanted(
            names=tuple(fqns), shape=tuple(tensors[fqns[0]].shape), required=fqns[0] in parameters
        )
        for fqns in names.values()
    }


def _another(target: str | Path, source: str | Path) -> Path:
    """The folder to write. Raises `SavedError` where it is the one that is read."""
    folder = atomic_folder.followed(target)
    place = atomic_folder.followed(source)
    if folder == (place.parent if place.is_file() else place):
        raise SavedError(
            "is the folder that is read, whose configs would be lost",
            place=f"convert: {str(target)!r}",
            legal="another folder",
            way_out="write to a new one",
        )
    return folder


@contextmanager
def _written(folder: Path, saving: Path) -> Iterator[None]:
    """Around what fills a folder: an error leaves what was there before."""
    failed = f"{str(folder)!r}: not written; what was there before still is"
    with (
        raising_runtime_error(failed, UnwrittenError),
        atomic_folder.discarded_on_error(saving, first=True),
    ):
        yield


def _converted(tensors: int, files: dict[str, SavedFile]) -> Converted:
    total = sum(file.bytes for file in files.values())
    return Converted(tensors=tensors, bytes=total, files=tuple(sorted(files)))
