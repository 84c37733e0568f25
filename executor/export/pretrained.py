"""`save_pretrained`: a running model's weights as transformers and peft load them.

Every rank writes files of its own at the same time, from tensors that are gathered to it one after
the other (`held_tensors.py`). The folder is published when complete (`files/atomic_folder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.executor.checkpoint import check_loaded
from meshwright.executor.errors import UnwrittenError
from meshwright.executor.export import naming, weight_folder
from meshwright.executor.export.held_tensors import HeldTensor, held_tensors, owner_of, streamed
from meshwright.executor.files import SavedFile, atomic_folder
from meshwright.executor.ranks import (
    all_gather_object,
    background,
    progress,
    raising_runtime_error,
    run_on_all,
    run_on_first,
)
from meshwright.executor.runtime import RankState, group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """An export, the same on all ranks: of the `part` of the model the tensors `fqn_of` stored
    names, in the files of `layout`, each written by its owner. `adapters` alone, or other trained
    parameters alone (`partial`)."""

    part: naming.Part
    adapters: bool
    partial: bool
    fqn_of: Mapping[str, str]
    layout: weight_folder.Layout
    owner_of: Mapping[str, int]


def save_pretrained(
    state: RankState,
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    trainable_only: bool = False,
    dtype: torch.dtype | None = None,
    submodule: str | None = None,
) -> None:
    """Write a model's weights, or its adapters, to a folder that all ranks see. Collective.

    Raises ValueError for what can't be saved so, RuntimeError where writing fails: what was at
    `path` before still is.
    """
    background.finish_all()
    group = group_of(state)
    with progress.during("saving weights"):
        run_on_all(group, lambda: check_loaded(state, "save_pretrained"))
        held = held_tensors(state)
        export = run_on_all(
            group, lambda: _planned(state, held, max_shard_size, trainable_only, dtype, submodule)
        )
        folder, saving = run_on_first(group, lambda: weight_folder.prepare_folder(path))
        failed = f"weights {str(folder)!r}: not saved; what was there before still is"
        with (
            raising_runtime_error(failed, UnwrittenError),
            atomic_folder.discarded_on_error(saving, first=state.place.rank == 0),
        ):
            run_on_first(group, lambda: _write_configs(export, saving))
            files = all_gather_object(group, _written(state, held, export, saving))
            run_on_first(group, lambda: weight_folder.publish(saving, folder, export.layout, files))


def _planned(
    state: RankState,
    held: dict[str, HeldTensor],
    max_shard_size: int | str,
    trainable_only: bool,
    dtype: torch.dtype | None,
    submodule: str | None,
) -> _Export:
    weight_folder.check_dtype(dtype)
    part = naming.saved_part(state.model, submodule)
    trained = [fqn for fqn, x in held.items() if x.trained]
    adapters = trainable_only and bool(part.adapters)
    if adapters:
        names = naming.adapter_names(part, {fqn: x.shape for fqn, x in held.items()}, trained)
    else:
        aliases: dict[str, list[str]] = {}
        for alias, fqn in state.graph.aliases.items():
            aliases.setdefault(fqn, []).append(alias)
        names = naming.saved_names(part, trained if trainable_only else held, aliases)
    kinds = {
        name: weight_folder.converted((held[fqn].dtype, held[fqn].shape), dtype)
        for fqn, name in names.items()
    }
    layout = (
        weight_folder.Layout(files={weight_folder.ADAPTERS: kinds})
        if adapters
        else weight_folder.laid_out(kinds, max_shard_size)
    )
    fqn_of = {name: fqn for fqn, name in names.items()}
    bytes_before: dict[int, int] = {}
    owners = {
        file: owner_of((held[fqn_of[name]] for name in of_file), bytes_before)
        for file, of_file in layout.files.items()
    }
    return _Export(
        part=part,
        adapters=adapters,
        partial=trainable_only and not adapters,
        fqn_of=fqn_of,
        layout=layout,
        owner_of=owners,
    )


def _write_configs(export: _Export, saving: Path) -> None:
    if export.adapters:
        naming.write_adapter_config(export.part, saving)
    elif not export.partial:  # a config says that the weights are all there
        dtypes = {kind[0] for kinds in export.layout.files.values() for kind in kinds.values()}
        naming.write_config(export.part, {x for x in dtypes if x.is_floating_point}, saving)


def _written(
    state: RankState, held: dict[str, HeldTensor], export: _Export, saving: Path
) -> dict[str, SavedFile]:
    """Write this rank's files; their sizes and checksums. Collective."""
    order = weight_folder.in_turn(export.layout.files.items())
    wanted = [(export.fqn_of[name], export.owner_of[file]) for file, name in order]
    writer = weight_folder.FileWriter(saving, export.layout)
    tensors = streamed(state, held, wanted)
    for (file, name), (_, x) in zip(order, tensors, strict=True):
        if x is not None:
            writer.write(file, name, x)
    progress.enter("finishing files of weights")
    return run_on_all(group_of(state), lambda: _finished(writer, state.place.rank))


def _finished(writer: weight_folder.FileWriter, rank: int) -> dict[str, SavedFile]:
    try:
        return writer.finish()
    except OSError as error:
        raise UnwrittenError(f": {error}", place=f"rank {rank}") from error
