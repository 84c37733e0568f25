"""Optimizer state by FQN: collected from a rank for a checkpoint, and restored under another plan.

A torch optimizer keeps a dict per parameter, and options (lr, betas, …) per group of parameters.
Tensors with dims are stored as the parameters are. Values and tensors without dims (`step`) are the
same on all ranks that hold the parameter and go, with the options, into the checkpoint's notes:

    class    name of the optimizer's class
    groups   [(options, FQNs)], one entry per group and rank that described one of its parameters
    values   FQN -> name -> value
    tensors  FQN -> names of the states stored as tensors

A loading optimizer need not have any state: states are allocated from the checkpoint's metadata, in
the parameter's layout under the running plan, and given to `Optimizer.load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files import StoredTensor
from meshwright.executor.parameters import empty_like

Notes = dict[str, Any]
States = dict[str, dict[str, torch.Tensor]]  # FQN -> name -> tensor
Options = dict[str, Any]
# options that say how the optimizer runs, which are not the training's
HOW = ("foreach", "fused", "capturable", "differentiable")


def collect(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], led: Collection[str]
) -> tuple[States, Notes]:
    """The states of a rank's `parameters` as tensors, and the notes on those in `led`, which this
    rank describes for all. Raises ValueError for states of a parameter that is not the model's."""
    names = {id(p): fqn for fqn, p in parameters.items()}
    for parameter, state in optimizer.state.items():
        if state and id(parameter) not in names:
            raise SavedError(
                f"the optimizer has states of a parameter of shape {tuple(parameter.shape)} that "
                "is none of the model's",
                place="checkpoint",
                way_out="give it an optimizer of its own, and save that by extra={'name': it}",
            )
    laid_out = shaped(optimizer)
    tensors: States = {}
    notes: Notes = {"class": type(optimizer).__name__, "groups": [], "values": {}, "tensors": {}}
    for fqn, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        stored = {name: _whole(x) for name, x in state.items() if _stored(x, name in laid_out)}
        tensors[fqn] = stored
        if fqn in led:
            rest = {name: _host(x) for name, x in state.items() if name not in stored}
            notes["values"][fqn] = rest
            notes["tensors"][fqn] = list(stored)
    for group in optimizer.param_groups:
        held = [names[id(p)] for p in group["params"] if id(p) in names]
        if mine := [fqn for fqn in held if fqn in led]:
            options = {key: _host(x) for key, x in group.items() if key not in HOW}
            options = {k: x for k, x in options.items() if k not in ("params", "param_names")}
            notes["groups"].append((options, mine))
    return tensors, notes


def merge(notes: Sequence[Notes]) -> Notes:
    """The union of all ranks' notes."""
    return {
        "class": notes[0]["class"],
        "groups": [group for note in notes for group in note["groups"]],
        "values": {fqn: v for note in notes for fqn, v in note["values"].items()},
        "tensors": {fqn: v for note in notes for fqn, v in note["tensors"].items()},
    }


def check_class(optimizer: torch.optim.Optimizer, saved: Notes | None, place: str) -> None:
    """Raise ValueError where the checkpoint has no states of this optimizer's class."""
    if saved is None:
        raise SavedError(
            "it was saved without an optimizer",
            place=place,
            way_out="load it without one, and the optimizer starts anew",
        )
    if saved["class"] != type(optimizer).__name__:
        raise SavedError(
            f"its optimizer states are those of {saved['class']}, which "
            f"{type(optimizer).__name__} can't take",
            place=place,
            way_out=f"use {saved['class']}, or load without an optimizer to begin with its states "
            "empty",
        )


def allocate(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    saved: Notes,
    stored: Mapping[str, StoredTensor],
    place: str,
) -> States:
    """Empty tensors for the states of a rank's parameters, by FQN and name. `stored` is the
    checkpoint's metadata by `<FQN>.<name>`. Raises ValueError for parameters or states it lacks."""
    names = {id(p): fqn for fqn, p in parameters.items()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    known = {fqn for _, fqns in saved["groups"] for fqn in fqns}
    if unknown := sorted(names[id(p)] for p in trained if names[id(p)] not in known):
        raise SavedError(
            f"its optimizer lacks {len(unknown)} parameters that this one trains, e.g. "
            f"{unknown[:3]}",
            place=place,
            way_out="give this one the same parameters, or load without one",
        )
    states: States = {}
    for p in trained:
        fqn = names[id(p)]
        names_of = saved["tensors"].get(fqn, ())
        if not p.numel():  # nothing of it is stored
            states[fqn] = {name: torch.empty_like(p.detach()) for name in names_of}
            continue
        kinds = {name: stored.get(f"{fqn}.{name}") for name in names_of}
        if lost := [name for name, kind in kinds.items() if kind is None]:
            raise SavedError(
                f"the states {lost} of {fqn!r} are missing; it is damaged",
                place=place,
                way_out="load an earlier checkpoint, or load without an optimizer",
            )
        states[fqn] = {name: _empty(p, kind) for name, kind in kinds.items() if kind is not None}
    return states


def options_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    saved: Notes,
    place: str,
) -> list[Options | None]:
    """The saved options of each of the optimizer's groups, None for one without parameters on this
    rank. Raises ValueError for a group whose parameters were saved with different options."""
    names = {id(p): fqn for fqn, p in parameters.items()}
    by_name = {fqn: options for options, fqns in saved["groups"] for fqn in fqns}
    chosen: list[Options | None] = []
    for k, group in enumerate(optimizer.param_groups):
        held = [names[id(p)] for p in group["params"] if id(p) in names]
        for fqn in held[1:]:
            if by_name[fqn] != by_name[held[0]]:
                raise SavedError(
                    f"{held[0]!r} and {fqn!r} are both in group {k} of the optimizer, but "
                    f"were saved with different options ({by_name[held[0]]} and {by_name[fqn]})",
                    place=place,
                    way_out="group the parameters as they were",
                )
        chosen.append(by_name[held[0]] if held else None)
    return chosen


def install(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    saved: Notes,
    states: States,
    options: Sequence[Options | None],
) -> None:
    """Load states and group options into the optimizer; a group with options None keeps its own.
    Raises `DamagedError` where the optimizer can't take what was saved."""
    names = {id(p): fqn for fqn, p in parameters.items()}
    state: dict[int, dict[str, Any]] = {}
    groups = []
    position = 0
    for group, chosen in zip(optimizer.param_groups, options, strict=True):
        local_options = {
            k: x for k, x in group.items() if k != "params" and (k in HOW or chosen is None)
        }
        numbers = range(position, position + len(group["params"]))
        groups.append({**(chosen or {}), **local_options, "params": list(numbers)})
        for number, p in zip(numbers, group["params"], strict=True):
            fqn = names.get(id(p))
            if fqn is not None and (values := {**saved["values"].get(fqn, {}), **states[fqn]}):
                state[number] = values
        position += len(numbers)
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except Exception as error:  # of any kind: the optimizer is the user's
        kind = type(optimizer).__name__
        raise DamagedError(
            f" are none that {kind} can take ({type(error).__name__}: {error})",
            place="the optimizer's states in the checkpoint",
        ) from error


def shaped(optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of states that have their parameter's shape, judged on parameters with dims. Of a
    scalar parameter's states, these are tensors like it, and the others counters."""
    return {
        name
        for parameter, state in optimizer.state.items()
        for name, x in state.items()
        if isinstance(x, torch.Tensor) and parameter.ndim and x.shape == parameter.shape
    }


def _stored(value: Any, shaped: bool) -> bool:
    """Whether a state is stored as a tensor, rather than in the notes."""
    return isinstance(value, torch.Tensor) and (
        value.ndim > 0 or shaped or isinstance(value, DTensor)
    )


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A partial DTensor as a whole tensor, which can be cut into chunks; others themselves."""
    if isinstance(x, DTensor) and any(isinstance(p, Partial) for p in x.placements):
        return x.full_tensor()
    return x


def _host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _empty(parameter: torch.Tensor, kind: StoredTensor) -> torch.Tensor:
    """An empty state: laid out as its parameter if it has its shape, else replicated."""
    dtype = kind.dtype
    if kind.shape == parameter.shape:
        return empty_like(parameter.detach(), dtype)
    replicated = torch.empty(kind.shape, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return replicated
    mesh = parameter.device_mesh
    return DTensor.from_local(replicated, mesh, [Replicate()] * mesh.ndim, run_check=False)
