"""What of a checkpoint is no tensor of the model or the optimizer: written, read, and checked.

Notes load without running code (`weights_only` of `torch.load`), and every value that is used has
its type, or the checkpoint is refused before anything of it is loaded.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.checkpoint import optimizer_state
from meshwright.executor.checkpoint.name_matching import differences
from meshwright.executor.checkpoint.weights import wanted_tensors
from meshwright.executor.errors import SavedError, UnwrittenError
from meshwright.executor.files import NOTES, PLAN, StoredTensor, atomic_folder, read_metadata
from meshwright.executor.ranks import raising_runtime_error
from meshwright.executor.runtime import Runtime

FORMAT = 1
MODEL = "model."  # before the names of parameters and buffers in a checkpoint
ANY_MODEL = ""  # the fingerprint where none is known


def write_notes(
    saving: Path,
    runtime: Runtime,
    notes: Sequence[optimizer_state.Notes | None],
    states: Mapping[str, Any],
) -> None:
    """Write the notes and the plan, with the `states` of what is saved beside the model. Raises
    ValueError for a state that does not load without running code."""
    given = [note for note in notes if note is not None]
    merged = optimizer_state.merge(given) if given else None
    described = {
        "format": FORMAT,
        "model": runtime.plan.model,
        "steps": runtime.steps,
        "seed": runtime.seed,
        "loss_scale": runtime.loss_scale.state_dict() if runtime.loss_scale else None,
        "optimizer": merged,
        "extra": dict(states),
    }
    for name, value in {"optimizer": merged, **states}.items():
        try:
            torch.load(io.BytesIO(_serialized(value)), weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise SavedError(
                f"the state of {name!r} holds more than tensors, numbers, text and "
                f"containers of these, so it could not be loaded safely: {error}",
                place="checkpoint",
                legal="states of tensors, numbers, text and containers of these",
                way_out="have its state_dict() return such",
            ) from error
    try:
        atomic_folder.write_synced(saving / NOTES, _serialized(described))
        atomic_folder.write_synced(saving / PLAN, runtime.plan.to_json().encode())
    except OSError as error:
        what = f"checkpoint: its notes were not written; what was there before still is ({error})"
        raise UnwrittenError(what) from error


def write_first_notes(saving: Path) -> None:
    """Write the notes on weights that no plan has trained: of any model whose tensors they are,
    before the first step."""
    nothing: dict[str, Any] = dict.fromkeys(("seed", "loss_scale", "optimizer"))
    described = {"format": FORMAT, "model": ANY_MODEL, "steps": 0, "extra": {}, **nothing}
    atomic_folder.write_synced(saving / NOTES, _serialized(described))


def read_notes(folder: Path, runtime: Runtime, place: str) -> dict[str, Any]:
    """The notes of a checkpoint. Raises RuntimeError where they are damaged, ValueError where they
    are of another format or model."""
    with raising_runtime_error(f"{place}: {NOTES!r} is damaged; load an earlier checkpoint"):
        notes = torch.load(folder / NOTES, weights_only=True)
        version = _of(_of(notes, "it", dict).get("format"), "format", int)
    if version != FORMAT:
        raise SavedError(
            f"has format {version}; this version reads {FORMAT}",
            place=place,
            way_out="load it with the version that saved it, or its weights by load_weights",
        )
    with raising_runtime_error(f"{place}: {NOTES!r} is damaged; load an earlier checkpoint"):
        _check(notes)
    if notes["model"] not in (runtime.plan.model, ANY_MODEL):
        raise SavedError(
            f"is of another model (fingerprint {notes['model']}, this one {runtime.plan.model}); "
            f"{_differing(folder, runtime)}",
            place=place,
            legal="checkpoints of this model",
            way_out="load it with the model that it was saved from, or read its weights by "
            "torch.distributed.checkpoint and give load_state_dict those that fit",
        )
    return dict(notes)


def _differing(folder: Path, runtime: Runtime) -> str:
    found = differences(wanted_tensors(runtime), model_shapes(read_metadata(folder)))
    return found or "names and shapes are the same, so they are used in another way"


def model_shapes(stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's parameters and buffers, by FQN."""
    return {n.removeprefix(MODEL): x.shape for n, x in stored.items() if n.startswith(MODEL)}


def _serialized(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _check(notes: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that is missing, or not of its type."""
    for name, kinds in (("steps", (int,)), ("seed", (int, type(None)))):
        if (_of(notes.get(name), name, *kinds) or 0) < 0:
            raise SavedError(f"{name} is {notes[name]}, and must not be negative")
    _of(notes.get("model"), "model", str)
    scale = _of(notes.get("loss_scale"), "loss_scale", dict, type(None))
    if scale is not None:
        _of(scale.get("value"), "the loss scale's value", float)
        _of(scale.get("finite_steps"), "the loss scale's finite_steps", int)
    for name in _of(notes.get("extra"), "extra", dict):
        _of(name, "a name of extra", str)
    optimizer = _of(notes.get("optimizer"), "optimizer", dict, type(None))
    if optimizer is None:
        return
    _of(optimizer.get("class"), "the optimizer's class", str)
    for group in _of(optimizer.get("groups"), "the optimizer's groups", list):
        options, fqns = _of(group, "a group", tuple, list)
        _names(_of(options, "a group's options", dict), "an option")
        _names(_of(fqns, "a group's parameters", list), "a parameter")
    for key, kind in (("values", dict), ("tensors", list)):
        of_optimizer = _of(optimizer.get(key), f"the optimizer's {key}", dict)
        _names(of_optimizer, "a parameter")
        for states in of_optimizer.values():
            _names(_of(states, f"one of the optimizer's {key}", kind), "a state")


def _names(found: Any, what: str) -> None:
    for name in found:
        _of(name, f"the name of {what}", str)


def _of(value: Any, what: str, *kinds: type) -> Any:
    if type(value) not in kinds:  # a bool is no number
        legal = " or ".join(kind.__name__ for kind in kinds)
        raise SavedError(f"{what} is {value!r:.60}, and must be of type {legal}")
    return value
