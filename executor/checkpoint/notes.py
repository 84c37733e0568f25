"""Training state of a checkpoint that is no tensor of the model or the optimizer, written and read.

It is the manifest's `training`: JSON values, whose tensors are stored beside the model's by their
paths in it. Every value that is used has its type, or the checkpoint is refused before anything of
it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.executor.checkpoint import optimizer_state, values
from meshwright.executor.checkpoint.extra import EXTRA
from meshwright.executor.checkpoint.name_matching import differences
from meshwright.executor.checkpoint.weights import wanted_tensors
from meshwright.executor.errors import SavedError
from meshwright.executor.files import Manifest, StoredTensor, read_whole
from meshwright.executor.ranks import raising_runtime_error
from meshwright.executor.runtime import Runtime

MODEL = "model."  # before the names of parameters and buffers in a checkpoint
TRAINING = "training"  # before the paths of the notes' tensors
ANY_MODEL = ""  # the fingerprint where none is known


def make_notes(
    runtime: Runtime, notes: Sequence[optimizer_state.Notes | None], extra: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The notes and the plan as JSON, with the trees of states beside the model, `extra`; and their
    tensors by name. Raises `SavedError` for a state that JSON and tensors can't hold."""
    known = [note for note in notes if note is not None]
    tensors: dict[str, torch.Tensor] = {}

    def encoded(name: str, state: Any) -> Any:
        def keep(x: torch.Tensor, path: str) -> Any:
            tensors[path] = x.detach()
            return {}

        return values.encode_state(name, state, keep, f"{TRAINING}/{name}")

    scale = runtime.loss_scale
    described = {
        "model": runtime.plan.model,
        "steps": runtime.steps,
        "seed": runtime.seed,
        "loss_scale": encoded("loss_scale", scale.state_dict() if scale else None),
        "optimizer": encoded("optimizer", optimizer_state.merge(known) if known else None),
        EXTRA: dict(extra),
        "plan": json.loads(runtime.plan.to_json()),
    }
    return described, tensors


def first_notes() -> dict[str, Any]:
    """Notes on weights that no plan has trained: of any model whose tensors they are, before the
    first step."""
    nothing: dict[str, Any] = dict.fromkeys(("seed", "loss_scale", "optimizer", "plan"))
    return {"model": ANY_MODEL, "steps": 0, "extra": {}, **nothing}


def read_notes(manifest: Manifest, runtime: Runtime, place: str) -> dict[str, Any]:
    """The notes of a checkpoint, with the trees of states beside the model. Raises RuntimeError
    where they are damaged, ValueError where they are of another model."""

    def tensor(node: Mapping[str, Any]) -> torch.Tensor:
        return read_whole(node["of"], manifest.tensors)

    with raising_runtime_error(f"{place}: its notes are damaged; load an earlier checkpoint"):
        training = dict(manifest.training or {})
        extra = training.pop(EXTRA, None)
        notes = {**values.decoded(training, tensor), EXTRA: extra}
        _check(notes)
    if notes["model"] not in (runtime.plan.model, ANY_MODEL):
        raise SavedError(
            f"is of another model (fingerprint {notes['model']}, this one {runtime.plan.model}); "
            f"{_differing(manifest, runtime)}",
            place=place,
            legal="checkpoints of this model",
            way_out="load it with the model that it was saved from, or read its safetensors and "
            "give load_state_dict those that fit",
        )
    return notes


def _differing(manifest: Manifest, runtime: Runtime) -> str:
    differing = differences(wanted_tensors(runtime), model_shapes(manifest.tensors))
    return differing or "names and shapes are the same, so they are used in another way"


def model_shapes(stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's parameters and buffers, by FQN."""
    return {n.removeprefix(MODEL): x.shape for n, x in stored.items() if n.startswith(MODEL)}


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
