"""Checkpoints: saved under one plan, loaded under any other, never half there.

A checkpoint is a folder on a file system that all ranks see:

    .metadata, *.distcp   tensors, by torch.distributed.checkpoint (DCP), each rank its own parts:
                          `model.<FQN>` for parameters and buffers, the first name of tied ones, and
                          `optimizer.<FQN>.<state>`; without any layout in it
    training.pt           what is no tensor, the same on all ranks: steps done, seed of the random
                          masks, loss scale, options and counters of the optimizer, and the states
                          of the user's own objects
    plan.json             the plan that it was saved under, for people: loading does not read it

`dcp.load({"model": ...}, checkpoint_id=path)` reads the weights without Meshwright.

Of each part that several ranks hold, one writes: on one mesh `Writers` chooses; of tied copies it
is the first stage's. A save tells all ranks before it returns whether it worked, and so does a
load: what one rank finds wrong is raised on all (`checkpoint_ranks.py`). How a finished folder
takes the place of the last one is told in `checkpoint_folder.py`.

To load needs no memory beside the tensors that are loaded into: parameters are read in place, the
optimizer's states into those it will keep. A load that fails while it reads (a damaged file) has
overwritten some; whatever else can be wrong is found before. Tensors without elements are not
stored.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright.executor.checkpoint import folder as checkpoint_folder
from meshwright.executor.checkpoint import optimizer as checkpoint_optimizer
from meshwright.executor.checkpoint.parts import LoadPlanner, Parts, SavePlanner, Writers
from meshwright.executor.checkpoint.weights import initialise_buffers
from meshwright.executor.ranks import background
from meshwright.executor.ranks.agree import (
    WAITING,
    failing,
    gloo_group,
    on_first,
    part,
    together,
    told_by_all,
    told_to_first,
)
from meshwright.executor.ranks.background import Background
from meshwright.executor.ranks.watch import progress
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.flow import stages_of_parameters

FORMAT = 1
NOTES, PLAN = "training.pt", "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A checkpoint that is saved, or, with a `thread`, on its way to the disk."""

    thread: Background | None

    def wait(self) -> None:
        """Return when the checkpoint is complete on the disk; RuntimeError, once, if it failed."""
        if self.thread is not None:
            self.thread.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Targets:
    """What a rank loads: the model's tensors and the optimizer's new states, by FQN."""

    model: dict[str, torch.Tensor]
    optimizer: checkpoint_optimizer.States


def _group(runtime: Runtime) -> dist.ProcessGroup | None:
    """The ranks that take part; None on one device."""
    return None if runtime.place.mesh is None else gloo_group()


# --- save -----------------------------------------------------------------------------------------


def save(
    runtime: Runtime,
    path: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Write a checkpoint, or replace the one at `path`. Collective.

    `extra` are objects with `state_dict()`, the same on all ranks; rank 0's is saved. Asynchronous,
    it returns when this rank's part is copied to the host, and the disk follows beside training.
    As a step must, each part of a save must end within the launch's timeout. Raises ValueError
    where something can't be saved, RuntimeError where the disk refuses.
    """
    background.finish_all()
    folder, group = Path(path).absolute(), _group(runtime)
    with progress.during("saving a checkpoint"):
        saving = on_first(group, lambda: checkpoint_folder.prepare(folder, NOTES))
        tensors, notes = together(group, lambda: _collect(runtime, optimizer, saving))
        every = told_to_first(group, notes)
        on_first(group, lambda: _describe(saving, runtime, every, extra or {}))
        if not asynchronous:
            _write(tensors, saving, folder, group)
            return Saving(thread=None)
        with part("copying a checkpoint to the host"):
            copied = {
                kind: {name: parts.copied() for name, parts in named.items()}
                for kind, named in tensors.items()
            }
            if runtime.place.device.type == "cuda":
                torch.cuda.synchronize(runtime.place.device)
    work = partial(_write, copied, saving, folder, group)
    return Saving(thread=Background(f"checkpoint {folder}", work))


def _collect(
    runtime: Runtime, optimizer: torch.optim.Optimizer | None, saving: Path
) -> tuple[dict[str, dict[str, Parts]], checkpoint_optimizer.Notes | None]:
    """What this rank writes, and what it tells of the optimizer."""
    if not runtime.loaded or runtime.unset & runtime.saved:
        raise ValueError(
            "checkpoint: the model is on the meta device: it has no weights to save; call "
            "init_weights, load_weights, load_state_dict or load_checkpoint first"
        )
    if not saving.is_dir():
        raise ValueError(
            f"checkpoint: rank {runtime.place.rank} does not see {str(saving)!r}, which rank 0 "
            f"made; save to a file system that all hosts share"
        )
    place, homes = runtime.place, _homes(runtime)
    parameters = dict(runtime.named_parameters())
    states: checkpoint_optimizer.States = {}
    notes = None
    if optimizer is not None:
        led = [fqn for fqn in parameters if homes[fqn][0] == place.rank]
        states, notes = checkpoint_optimizer.collect(optimizer, parameters, led)
    writers = Writers()

    def mine(fqn: str, x: torch.Tensor) -> bool:
        return place.rank in homes.get(fqn, (place.rank,)) and writers.is_mine(x, place.mesh)

    # in the order of the names, since buffers come in another order on every rank
    model = {fqn: Parts.of(x) for fqn, x in sorted(_model(runtime).items()) if mine(fqn, x)}
    flat = {
        f"{fqn}.{name}": Parts.of(x)
        for fqn, state in sorted(states.items())
        for name, x in sorted(state.items())
        if mine(fqn, x)
    }
    return {"model": model, "optimizer": flat}, notes


def _model(runtime: Runtime) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers, each under its first name."""
    found = runtime.state_dict()
    return {fqn: x for fqn, x in found.items() if fqn not in runtime.graph.aliases}


def _homes(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    """The ranks of the first stage that holds each parameter: they write it."""
    plan, graph = runtime.plan, runtime.graph
    return {
        graph.parameters[value]: plan.stages[stages[0]].ranks
        for value, stages in stages_of_parameters(plan, graph).items()
    }


def _describe(
    saving: Path,
    runtime: Runtime,
    notes: list[checkpoint_optimizer.Notes | None],
    extra: Mapping[str, Any],
) -> None:
    """Write what is no tensor. Only what loads without running code is taken."""
    told = [each for each in notes if each is not None]
    merged = checkpoint_optimizer.merge(told) if told else None
    states = {name: thing.state_dict() for name, thing in extra.items()}
    described = {
        "format": FORMAT,
        "model": runtime.plan.model,
        "steps": runtime.steps,
        "seed": runtime.seed,
        "loss_scale": runtime.loss_scale.state_dict() if runtime.loss_scale else None,
        "optimizer": merged,
        "extra": states,
    }
    for name, value in {"optimizer": merged, **states}.items():
        try:
            torch.load(io.BytesIO(_packed(value)), weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise ValueError(
                f"checkpoint: the state of {name!r} holds more than tensors, numbers, text and "
                f"containers of these, so it could not be loaded safely: {error}"
            ) from error
    checkpoint_folder.write_synced(saving / NOTES, _packed(described))
    checkpoint_folder.write_synced(saving / PLAN, runtime.plan.to_json().encode())


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _write(
    tensors: dict[str, dict[str, Parts]],
    saving: Path,
    folder: Path,
    group: dist.ProcessGroup | None,
) -> None:
    """Write the tensors, and put the folder in its place when all ranks have."""
    with failing(f"checkpoint {str(folder)!r}: not saved; what was there before still is"):
        with part(WAITING, waits=True):
            dcp.save(
                tensors,
                storage_writer=_Writer(saving),
                planner=SavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        on_first(group, lambda: checkpoint_folder.publish(saving, folder))


class _Writer(dcp.FileSystemWriter):
    """Writes files; what a rank writes itself is not waiting."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with part("writing a checkpoint"):
            return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        with part("finishing a checkpoint"):
            super().finish(*args, **kwargs)


# --- load -----------------------------------------------------------------------------------------


def load(
    runtime: Runtime,
    path: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Read a checkpoint, saved under this plan or another. Collective.

    The optimizer need not have made a step. Raises FileNotFoundError where there is nothing,
    ValueError where what is there does not fit, RuntimeError where it is damaged.
    """
    background.finish_all()
    group = _group(runtime)
    place = f"checkpoint {str(path)!r}"
    with progress.during("loading a checkpoint"):
        folder, notes = on_first(
            group, lambda: _opened(Path(path).absolute(), runtime, optimizer, extra or {}, place)
        )
        targets, options = together(
            group, lambda: _prepared(runtime, optimizer, folder, notes, place)
        )
        agreed = _agreed(told_by_all(group, options), place)
        _read(targets, folder, group, place)
        runtime.load_state_dict(targets.model)
        runtime.steps, runtime.seed = notes["steps"], notes["seed"]
        if runtime.loss_scale is not None and notes["loss_scale"] is not None:
            runtime.loss_scale.load_state_dict(notes["loss_scale"])
        if optimizer is not None:
            checkpoint_optimizer.install(
                optimizer,
                dict(runtime.named_parameters()),
                notes["optimizer"],
                targets.optimizer,
                agreed,
            )
        for name, thing in (extra or {}).items():
            thing.load_state_dict(notes["extra"][name])


def _opened(
    path: Path,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    place: str,
) -> tuple[Path, dict[str, Any]]:
    """The folder to read and its notes; raises where they are not what this run can take."""
    folder = checkpoint_folder.published(path)
    if not folder.exists():
        raise FileNotFoundError(f"{place}: there is none; it must be a path that was saved to")
    if not (folder / NOTES).exists():
        raise ValueError(
            f"{place}: has no {NOTES!r}, so it is no checkpoint of a ParallelModel; weights saved "
            f"otherwise go through load_state_dict"
        )
    with failing(f"{place}: {NOTES!r} is damaged; load an earlier checkpoint"):
        notes = torch.load(folder / NOTES, weights_only=True)
    if notes["format"] != FORMAT:
        raise ValueError(f"{place}: has format {notes['format']}; this version reads {FORMAT}")
    if notes["model"] != runtime.plan.model:
        raise ValueError(
            f"{place}: is of another model (fingerprint {notes['model']}, this one "
            f"{runtime.plan.model}); load it with the model that it was saved from, or read its "
            f"weights by torch.distributed.checkpoint and give load_state_dict those that fit"
        )
    if optimizer is not None:
        checkpoint_optimizer.check_class(optimizer, notes["optimizer"], place)
    if missing := sorted(set(extra) - set(notes["extra"])):
        raise ValueError(
            f"{place}: holds no state of {missing}; saved as extra: {sorted(notes['extra'])}"
        )
    return folder, notes


def _prepared(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer | None,
    folder: Path,
    notes: dict[str, Any],
    place: str,
) -> tuple[_Targets, list[checkpoint_optimizer.Options | None]]:
    """The tensors to read into, and the options of the optimizer's groups as far as known here.

    Buffers that are on meta and were not saved are initialised, as by `load_weights`.
    """
    stored = {
        name: x
        for name, x in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(x, TensorStorageMetadata)
    }
    model = {
        fqn: torch.empty_like(x, device="cpu") if fqn in runtime.unused else x  # the user's own
        for fqn, x in _model(runtime).items()
    }
    needed = {fqn: x for fqn, x in model.items() if x.numel()}
    if missing := sorted(fqn for fqn in needed if f"model.{fqn}" not in stored):
        raise ValueError(
            f"{place}: {len(missing)} names are missing, e.g. {missing[:3]}; it is damaged, or was "
            f"saved from a model that keeps fewer buffers"
        )
    for fqn, x in needed.items():
        if stored[f"model.{fqn}"].size != x.shape:
            raise ValueError(
                f"{place}: {fqn!r} has shape {tuple(stored[f'model.{fqn}'].size)}, the model "
                f"{tuple(x.shape)}"
            )
    initialise_buffers(runtime, given=[name.removeprefix("model.") for name in stored])
    if optimizer is None:
        return _Targets(model=model, optimizer={}), []
    found = {
        name.removeprefix("optimizer."): x
        for name, x in stored.items()
        if name.startswith("optimizer.")
    }
    parameters, saved = dict(runtime.named_parameters()), notes["optimizer"]
    states = checkpoint_optimizer.allocate(optimizer, parameters, saved, found, place)
    options = checkpoint_optimizer.options_of(optimizer, parameters, saved, place)
    return _Targets(model=model, optimizer=states), options


def _agreed(
    options: Sequence[Sequence[checkpoint_optimizer.Options | None]], place: str
) -> list[checkpoint_optimizer.Options | None]:
    """The options of each group, from the first rank that has a parameter in it."""
    if len({len(each) for each in options}) > 1:
        raise ValueError(
            f"{place}: the optimizer has {[len(each) for each in options]} groups on the ranks; "
            f"make the same groups on all of them, empty where a rank has none of the parameters"
        )
    return [next((x for x in each if x is not None), None) for each in zip(*options, strict=True)]


def _read(targets: _Targets, folder: Path, group: dist.ProcessGroup | None, place: str) -> None:
    named = {f"model.{fqn}": x for fqn, x in targets.model.items()}
    for fqn, state in targets.optimizer.items():
        named |= {f"optimizer.{fqn}.{name}": x for name, x in state.items()}
    pieces = [piece for name, x in named.items() for piece in Parts.of(x).pieces(name)]
    with (
        failing(f"{place}: damaged, and read in part; load an earlier one"),
        part(WAITING, waits=True),
    ):
        dcp.load(
            {},
            storage_reader=_Reader(folder),
            planner=LoadPlanner(pieces),
            process_group=group,
            no_dist=group is None,
        )


class _Reader(dcp.FileSystemReader):
    """Reads files; what a rank reads itself is not waiting."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with part("reading a checkpoint's metadata"):
            return super().read_metadata(*args, **kwargs)

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        with part("reading a checkpoint"):
            return super().read_data(*args, **kwargs)
