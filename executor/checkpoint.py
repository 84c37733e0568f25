"""Checkpoints by torch.distributed.checkpoint under the user's FQNs, readable under any plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from executor.runtime import Runtime


def _state(runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": runtime.plain_state_dict(),
        "step": torch.tensor(runtime.steps),
    }
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(runtime, optimizer)
    return state


def _optimizer_state(runtime: Runtime, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`<fqn>.<state>` -> tensor in the parameter's plain layout."""
    flat = {}
    for fqn, parameter in runtime.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            flat[f"{fqn}.{name}"] = (
                runtime.plain(value) if isinstance(value, torch.Tensor) else value
            )
    return flat


def save(runtime: Runtime, path: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Write a checkpoint; every rank takes part."""
    dcp.save(_state(runtime, optimizer), checkpoint_id=path, no_dist=runtime.place.mesh is None)


def load(runtime: Runtime, path: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Read a checkpoint into the running parts; every rank takes part."""
    if optimizer is not None:
        _materialise(runtime, optimizer)
    state = _state(runtime, optimizer)
    dcp.load(state, checkpoint_id=path, no_dist=runtime.place.mesh is None)
    runtime.load_state_dict(state["model"])
    runtime.steps = int(state["step"])
    if optimizer is None:
        return
    for fqn, parameter in runtime.named_parameters():
        for name, held in optimizer.state.get(parameter, {}).items():
            if isinstance(held, torch.Tensor):
                runtime.restore(held, state["optimizer"][f"{fqn}.{name}"])


def _materialise(runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its states, by a step with zero gradients whose effect is
    undone."""
    parameters = [
        p for p in runtime.parameters() if isinstance(p, nn.Parameter) and p not in optimizer.state
    ]
    if not parameters:
        return
    held = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        for p, before in zip(parameters, held, strict=True):
            p.copy_(before)
            p.grad = None
