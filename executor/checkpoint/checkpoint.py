"""Distributed checkpoints: saved under one plan, loaded under any other, replaced atomically.

A checkpoint is a folder on a file system that all ranks see:

    tensors-<rank>.safetensors   each rank's parts of `model.<FQN>`, for parameters and buffers, the
                                 first name of tied ones, of `optimizer.<FQN>.<state>`, and of
                                 `carried.<FQN>`, written tensors that no state dict has
    manifest.json                where the parts of each tensor are, with their checksums; the plan;
                                 and what is no tensor, the same on all ranks: steps done, seed of
                                 the random masks, loss scale, options and counters of the
                                 optimizer, states of the user's own objects, and what compressed
                                 sums of gradients remember, of each rank

Any reader of safetensors reads the files, in which the name of a part says its box. What a load
reads is verified by the checksums. torch's own storage of this format (`HuggingFaceStorageWriter`)
takes one part of a tensor per rank, where a strided shard has several, builds a rank's file in
memory, and has no checksums.

Of the replicas of a chunk, one rank writes (`collected.py`). An error of one rank in a save or a
load is raised on all (`ranks/object_collectives.py`). `atomic_folder.py` says how a finished folder
replaces the last.

A load needs no memory beside the tensors that it fills: parameters are read in place, the
optimizer's states into those it will keep. A load that fails while it reads (a damaged file) has
overwritten some; every other error is raised before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.sharing import Sharing
from meshwright.executor.checkpoint import optimizer_state
from meshwright.executor.checkpoint.collected import (
    Collected,
    carried_tensors,
    collect,
    model_tensors,
)
from meshwright.executor.checkpoint.extra import EXTRA, Merged, RankLoad, RankStates
from meshwright.executor.checkpoint.name_matching import differences
from meshwright.executor.checkpoint.notes import ANY_MODEL, make_notes, model_shapes, read_notes
from meshwright.executor.checkpoint.replica_parts import of_replica
from meshwright.executor.checkpoint.weights import initialise_buffers, wanted_tensors
from meshwright.executor.devices import synchronize
from meshwright.executor.errors import NotThereError, SavedError, UnwrittenError
from meshwright.executor.files import (
    ChunkRead,
    LocalChunks,
    Manifest,
    StoredTensor,
    atomic_folder,
    read_checkpoint,
    read_tensors,
    write_tensors,
)
from meshwright.executor.parameters.compression import REMEMBERED
from meshwright.executor.ranks import (
    BESIDE,
    Background,
    all_gather_object,
    background,
    gather_object,
    phase,
    progress,
    raising_runtime_error,
    run_on_all,
    run_on_first,
)
from meshwright.executor.runtime import RankState, Runtime, group_of
from meshwright.executor.stages import follow
from meshwright.planner.plan import Plan, PlanError
from meshwright.profiles.inputs import ArgumentError, shown

log = logging.getLogger(__name__)

# what a rank's part of a parameter depends on, of its stage
_LAYOUT = (
    *("blocks", "ranks", "dp", "tp", "cp", "ep"), *(f.name for f in fields(Sharing)), "shardings",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A checkpoint that is saved, or that a background `thread` is writing."""

    thread: Background | None

    def wait(self) -> None:
        """Return when the checkpoint is complete on the disk. Raises RuntimeError, once, if it
        failed."""
        if self.thread is not None:
            self.thread.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Targets:
    """The tensors that a rank loads into, the model's, those `carried` beside its state dict, and
    the optimizer's new states, by FQN; those that are `stored`; the states of `extra`, which
    `reads` fill."""

    model: dict[str, torch.Tensor]
    carried: dict[str, torch.Tensor]
    optimizer: optimizer_state.States
    stored: Mapping[str, StoredTensor]
    extra: dict[str, Any]
    reads: list[ChunkRead]


# --- save -----------------------------------------------------------------------------------------


def _check_extra(extra: Mapping[str, Any], verb: str) -> None:
    if not isinstance(extra, Mapping):
        raise ArgumentError(
            f" is a {type(extra).__name__}, {shown(extra)}",
            place="extra",
            legal="a dict of objects with state_dict() and load_state_dict(), or None",
            way_out='extra={"scheduler": scheduler}',
        )
    if REMEMBERED in extra:
        raise ArgumentError(
            f" has the name {REMEMBERED!r}, which a checkpoint has for errors of compressed "
            "gradients",
            place="extra",
            legal="any other name",
            way_out="give the object another one",
        )
    for name, x in extra.items():
        if not hasattr(x, verb):
            raise ArgumentError(
                f" is of type {type(x).__name__}, which has no {verb}()",
                place=f"extra[{name!r}]",
                legal="objects with state_dict() and load_state_dict(), such as schedulers",
                way_out="wrap other values in one",
            )


def _states(extra: Mapping[str, Any]) -> dict[str, Any]:
    _check_extra(extra, "state_dict")
    return {name: x.state_dict() for name, x in extra.items()}


def save(
    runtime: Runtime,
    path: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Write a checkpoint, or replace the one at `path`. Collective.

    `extra` are objects with `state_dict()`, which may be collective; of states that differ between
    ranks, each rank's is saved (`extra.py`).
    `asynchronous` returns when this rank's chunks are copied to the host, and writes them in the
    background. Each phase of a save must end within the launch's timeout, as a step's must. Raises
    ValueError for a state that can't be saved, RuntimeError where writing fails.
    """
    background.finish_all()
    group = group_of(runtime)
    if optimizer is not None:
        follow(optimizer)
    with progress.during("saving a checkpoint"):
        folder, saving = run_on_first(group, lambda: prepared_folder(path))
        with atomic_folder.discarded_on_error(saving, first=runtime.place.rank == 0):
            tensors, training = gathered(runtime, optimizer, extra or {}, saving)
        work = partial(write, training=training, saving=saving, folder=folder)
        if not asynchronous:
            work(tensors, group=group)
            return Saving(thread=None)
        beside = group_of(runtime, BESIDE)
        with phase("copying a checkpoint to the host"):
            copied = {name: chunks.copied() for name, chunks in tensors.items()}
            synchronize(runtime.place.device)
    return Saving(thread=Background(f"checkpoint {folder}", partial(work, copied, group=beside)))


@dataclass(frozen=True, slots=True)
class _Fixed:
    """An object whose state was asked for before."""

    state: Any

    def state_dict(self) -> Any:
        return self.state


def compared_states(extra: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """States of objects, and their trees, in which tensors have checksums; or the error that they
    raise, for `same_states` to raise on all ranks."""
    try:
        states = _states(extra)
        return states, RankStates.of(states, compared=True).trees
    except Exception as error:  # noqa: BLE001 - other ranks wait for this one
        return {}, error


def same_states(states: Mapping[str, Any], of_ranks: Sequence[Any]) -> dict[str, _Fixed]:
    """Objects with these states. Raises an error that a rank met, and `SavedError` where the trees
    of ranks differ."""
    if error := next((trees for trees in of_ranks if isinstance(trees, Exception)), None):
        raise error
    names = [name for name in states if any(trees != of_ranks[0] for trees in of_ranks)]
    differ = [n for n in names if any(trees.get(n) != of_ranks[0][n] for trees in of_ranks)]
    if differ or len({frozenset(trees) for trees in of_ranks}) > 1:
        raise SavedError(
            f"={differ} differs between ranks, and rank 0 writes alone beside parameter servers",
            place="extra",
            legal="objects whose states are alike on all ranks",
            way_out="leave them out, or save each rank's in a file of your own",
        )
    return {name: _Fixed(state) for name, state in states.items()}


def gathered(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    saving: Path,
) -> tuple[dict[str, LocalChunks], dict[str, Any]]:
    """Chunks that this rank writes to a prepared folder, and on rank 0 the notes. Collective."""
    group = group_of(runtime)
    collected = run_on_all(group, lambda: _checked(runtime, optimizer, saving))
    tensors, all_notes = dict(collected.tensors), gather_object(group, collected.notes)
    # on every rank, since a state may be gathered from all
    compared = group is not None
    states = run_on_all(
        group, lambda: RankStates.of(_states(extra) | _remembered(runtime), compared)
    )
    all_trees = gather_object(group, states.trees)
    merged = run_on_first(group, lambda: Merged.of(all_trees))
    tensors |= states.chunks(merged.writes.get(runtime.place.rank, {}))
    training: dict[str, Any] = {}

    def note() -> None:  # on rank 0
        notes, of_notes = make_notes(runtime, all_notes, merged.trees)
        training.update(notes)
        tensors.update((name, LocalChunks.of(x)) for name, x in of_notes.items())

    run_on_first(group, note)
    return tensors, training


def check_loaded(state: RankState, place: str) -> None:
    """Raise ValueError where the model has no weights."""
    if not state.loaded or state.uninitialised & state.persistent:
        raise SavedError(
            "the model is on the meta device: it has no weights to save",
            place=place,
            legal="a model with weights",
            way_out="call init_weights, load_weights, load_state_dict or load_checkpoint first",
        )


def _remembered(runtime: Runtime) -> dict[str, Any]:
    """Memories of this rank's compressed sums of gradients, by the name that they have beside the
    user's objects, where the plan has such sums."""
    compresses = any(stage.compression for stage in runtime.plan.stages)
    return {REMEMBERED: runtime.memories.state_dict()} if compresses else {}


def _remembers(runtime: Runtime, notes: Mapping[str, Any], place: str) -> bool:
    """Whether what compressed sums remember goes on from a checkpoint: its ranks' own parts of the
    same parameters. What is dropped is logged."""
    if REMEMBERED not in notes[EXTRA]:
        return False
    unlike = _unlike(notes.get("plan"), runtime.plan)
    if unlike and not runtime.place.rank:
        log.warning(
            "%s: errors of compressed gradients that it has are dropped, and begin at zero, as its "
            "stages differ from this plan's (%s)",
            place,
            ", ".join(unlike),
        )
    return not unlike


def _unlike(noted: Any, plan: Plan) -> list[str]:
    """The decisions, of those that parts of ranks depend on, that a noted plan has otherwise."""
    try:
        saved = Plan.from_json(json.dumps(noted))
    except PlanError:
        return ["no plan that can be read"]
    if len(saved.stages) != len(plan.stages):
        return ["another number of them"]
    pairs = [*zip(saved.stages, plan.stages, strict=True)]
    unlike = [x for x in _LAYOUT if any(getattr(a, x) != getattr(b, x) for a, b in pairs)]
    return unlike + ["precision"] * (saved.precision != plan.precision)


def prepared_folder(path: str | Path) -> tuple[Path, Path]:
    """The folder that `path` leads to, and the one to fill in its place."""
    folder = atomic_folder.followed(path)
    return folder, atomic_folder.prepare(folder)


def _checked(runtime: Runtime, optimizer: torch.optim.Optimizer | None, saving: Path) -> Collected:
    """This rank's part of a save. Raises ValueError where the model has no weights, or the folder
    is not shared."""
    check_loaded(runtime, "checkpoint")
    if not saving.is_dir():
        raise SavedError(
            f"rank {runtime.place.rank} does not see {str(saving)!r}, which rank 0 made",
            place="checkpoint",
            legal="a folder that all ranks see",
            way_out="save to a file system that all hosts share",
        )
    return collect(runtime, optimizer)


def write(
    tensors: Mapping[str, LocalChunks],
    training: Mapping[str, Any],
    saving: Path,
    folder: Path,
    group: dist.ProcessGroup | None,
) -> None:
    """Write the tensors, and publish the folder when all ranks have."""
    failed = f"checkpoint {str(folder)!r}: not saved; what was there before still is"
    first = group is None or dist.get_rank(group) == 0
    with (
        raising_runtime_error(failed, UnwrittenError),
        atomic_folder.discarded_on_error(saving, first=first),
    ):
        stored, files = write_tensors(tensors, saving, group)
        manifest = Manifest(files=files, tensors=stored, training=training)
        run_on_first(group, lambda: atomic_folder.complete(saving, folder, manifest))


# --- load -----------------------------------------------------------------------------------------


def load(
    runtime: Runtime,
    path: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    replica: int | None = None,
) -> None:
    """Read a checkpoint, saved under this plan or another; of replicas that train apart what that
    `replica` had, else what they had in common when they met last. Collective.

    The optimizer need not have made a step. Raises FileNotFoundError where there is no checkpoint,
    ValueError where it does not fit the model or the optimizer, RuntimeError where it is damaged.
    """
    background.finish_all()
    group = group_of(runtime)
    if optimizer is not None:
        follow(optimizer)
    place = f"checkpoint {str(path)!r}"
    with progress.during("loading a checkpoint"):
        folder, notes = run_on_first(
            group, lambda: _opened(path, runtime, optimizer, extra or {}, place, replica)
        )
        given = {**(extra or {})}
        if _remembers(runtime, notes, place):
            given[REMEMBERED] = runtime.memories
        targets, options = run_on_all(
            group, lambda: _prepared(runtime, optimizer, given, folder, notes, place, replica)
        )
        merged = _merged_options(all_gather_object(group, options), place)
        _read(targets, group, place)
        runtime.load_state_dict(targets.model)
        runtime.steps = notes["steps"]
        if notes["seed"] is not None:
            runtime.seed = notes["seed"]
        if runtime.loss_scale is not None and notes["loss_scale"] is not None:
            runtime.loss_scale.load_state_dict(notes["loss_scale"])
        if optimizer is not None:
            optimizer_state.install(
                optimizer,
                dict(runtime.named_parameters()),
                notes["optimizer"],
                targets.optimizer,
                merged,
            )
        for name, x in given.items():
            x.load_state_dict(targets.extra[name])


def saved_folder(path: str | Path, place: str) -> Path:
    """The folder of a checkpoint, as it was published last. Raises FileNotFoundError."""
    folder = atomic_folder.published(atomic_folder.followed(path))
    if not folder.exists():
        raise NotThereError(
            "there is none", place=place, way_out="it must be a path that was saved to"
        )
    return folder


def _opened(
    path: str | Path,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    place: str,
    replica: int | None,
) -> tuple[Path, dict[str, Any]]:
    """The folder to read, and its notes. Raises FileNotFoundError or ValueError where this run
    can't load them."""
    _check_extra(extra, "load_state_dict")
    folder = saved_folder(path, place)
    notes = read_notes(of_replica(read_checkpoint(folder, place), replica), runtime, place)
    if optimizer is not None:
        optimizer_state.check_class(optimizer, notes["optimizer"], place)
    there = set(notes[EXTRA]) - {REMEMBERED}
    if missing := sorted(set(extra) - there):
        raise SavedError(
            f"holds no state of {missing}; saved as extra: {sorted(there)}",
            place=place,
            way_out="give extra= those, or leave it out",
        )
    return folder, notes


def _prepared(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    folder: Path,
    notes: dict[str, Any],
    place: str,
    replica: int | None,
) -> tuple[_Targets, list[optimizer_state.Options | None]]:
    """The tensors to read into, and the options of the optimizer's groups that this rank knows.

    Buffers that are on meta and were not saved are initialised, as by `load_weights`.
    """
    stored = of_replica(read_checkpoint(folder, place, check_files=False), replica).tensors
    model = {
        fqn: torch.empty_like(x, device="cpu") if x.is_meta else x
        for fqn, x in model_tensors(runtime).items()
    }
    needed = {fqn: x for fqn, x in model.items() if x.numel()}
    if notes["model"] == ANY_MODEL and (
        differing := differences(wanted_tensors(runtime), model_shapes(stored))
    ):
        raise SavedError(
            f"is of another model: {differing}", place=place, way_out="load it with its own"
        )
    if missing := sorted(fqn for fqn in needed if f"model.{fqn}" not in stored):
        raise SavedError(
            f"{len(missing)} names are missing, e.g. {missing[:3]}; it is damaged, or was "
            f"saved from a model that keeps fewer buffers",
            place=place,
            way_out="load an earlier one, or what fits by load_weights",
        )
    for fqn, x in needed.items():
        if stored[f"model.{fqn}"].shape != x.shape:
            raise SavedError(
                f"{fqn!r} has shape {stored[f'model.{fqn}'].shape}, the model {tuple(x.shape)}",
                place=place,
                way_out="load it with the model that it was saved from",
            )
    initialise_buffers(runtime, given=[name.removeprefix("model.") for name in stored])
    carried = _carried(runtime, stored, place)
    targets = _Targets(
        model=model, carried=carried, optimizer={}, stored=stored, extra={}, reads=[]
    )
    _prepare_extra(runtime, targets, extra, notes[EXTRA], place)
    if optimizer is None:
        return targets, []
    stored_states = {
        name.removeprefix("optimizer."): x
        for name, x in stored.items()
        if name.startswith("optimizer.")
    }
    parameters, saved = dict(runtime.named_parameters()), notes["optimizer"]
    states = optimizer_state.allocate(optimizer, parameters, saved, stored_states, place)
    targets.optimizer.update(states)
    return targets, optimizer_state.options_of(optimizer, parameters, saved, place)


def _carried(
    runtime: Runtime, stored: Mapping[str, StoredTensor], place: str
) -> dict[str, torch.Tensor]:
    """The tensors beside the model's state dict that a checkpoint has. Logs those that it lacks."""
    carried = carried_tensors(runtime)
    if missing := sorted(fqn for fqn in carried if f"carried.{fqn}" not in stored):
        log.warning("%s has no value of %s, which steps write: they keep theirs", place, missing)
    return {fqn: x for fqn, x in carried.items() if fqn not in missing}


def _prepare_extra(
    runtime: Runtime, targets: _Targets, extra: Mapping[str, Any], trees: Any, place: str
) -> None:
    """Add the states of `extra`, and the reads that fill them."""
    load = RankLoad(
        rank=runtime.place.rank,
        world=runtime.plan.num_ranks,
        stored=targets.stored,
        fqns=wanted_tensors(runtime).keys(),
        place=place,
    )
    for name, x in extra.items():
        current = x.state_dict() if load.needs_layout(trees[name]) else None
        targets.extra[name], reads = load.state(name, trees[name], current)
        targets.reads.extend(reads)


def _merged_options(
    options: Sequence[Sequence[optimizer_state.Options | None]], place: str
) -> list[optimizer_state.Options | None]:
    """The options of each group, from the first rank that has a parameter in it."""
    if len({len(groups) for groups in options}) > 1:
        counts = [len(groups) for groups in options]
        raise SavedError(
            f"the optimizer has {counts} groups on the ranks",
            place=place,
            way_out="make the same groups on all of them, empty where a rank has none of the "
            "parameters",
        )
    by_group = zip(*options, strict=True)
    return [next((x for x in known if x is not None), None) for known in by_group]


def _read(targets: _Targets, group: dist.ProcessGroup | None, place: str) -> None:
    named = {f"model.{fqn}": x for fqn, x in targets.model.items()}
    named |= {f"carried.{fqn}": x for fqn, x in targets.carried.items()}
    for fqn, state in targets.optimizer.items():
        named |= {f"optimizer.{fqn}.{name}": x for name, x in state.items()}
    reads = [read for name, x in named.items() for read in LocalChunks.of(x).reads(name)]
    reads += targets.reads
    with raising_runtime_error(f"{place}: damaged, and read in part; load an earlier one"):
        run_on_all(group, lambda: read_tensors(reads, targets.stored))
