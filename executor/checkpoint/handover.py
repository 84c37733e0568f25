"""Handing a model over from one running plan to another, with what was trained.

Weights, buffers and optimizer states go through whole tensors on the host, unless both plans leave
every rank the whole model: then nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from meshwright.executor.checkpoint.optimizer_state import shaped
from meshwright.executor.parameters import StageParameter, part_of, whole_of, wrap_like
from meshwright.executor.runtime import Runtime
from meshwright.executor.stages import current, follow, replicated
from meshwright.executor.states_in_files import in_file
from meshwright.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An optimizer's state of one parameter: its group, and values by name; tensors whole."""

    group: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """State that a plan leaves to the next: steps, seed, guard, and the optimizer's states by FQN
    (None: they stay as they are). `like_parameters` names those laid out as their parameter."""

    before: Runtime
    states: dict[str, Kept] | None
    like_parameters: frozenset[str]


def hand_over(before: Runtime, plan: Plan, optimizer: torch.optim.Optimizer | None) -> Handover:
    """Give the model back to the user for a new `plan`. Collective; nothing of the old plan runs
    after it."""
    states = None
    stays = before.user.whole and replicated(plan)
    named = dict(before.named_parameters())
    if optimizer is not None:
        follow(optimizer)
        if not stays:
            states = before.merged(_collected(optimizer, named))
    state = {} if before.user.whole else before.everything()
    before.user.release(state, loaded=before.loaded)
    before.retired = True
    return Handover(
        before=before,
        states=states,
        like_parameters=frozenset(shaped(optimizer)) if optimizer is not None else frozenset(),
    )


def take_over(runtime: Runtime, left: Handover, optimizer: torch.optim.Optimizer | None) -> None:
    """Go on where the plan before ended."""
    runtime.steps, runtime.seed = left.before.steps, left.before.seed
    runtime.guard.skipped_steps = left.before.guard.skipped_steps
    if runtime.loss_scale is not None and left.before.loss_scale is not None:
        runtime.loss_scale.load_state_dict(left.before.loss_scale.state_dict())
    if optimizer is None or left.states is None:
        return
    models = {id(p) for p in runtime.model.parameters()}  # of other ranks' stages too
    for group in optimizer.param_groups:
        gone = [p for p in group["params"] if id(current(p)) in models]
        for p in gone:
            optimizer.state.pop(p, None)
        left_over = {id(p) for p in gone}
        group["params"][:] = [p for p in group["params"] if id(p) not in left_over]
    for p in runtime.stage_parameters:
        state = left.states.get(p.fqn)
        if state is None:
            continue
        group = optimizer.param_groups[state.group]
        group["params"].append(p.api)
        on_device = group.get("capturable") or group.get("fused")
        values = {
            name: _laid_out(x, p, runtime, like=name in left.like_parameters, on_device=on_device)
            for name, x in state.values.items()
        }
        if values:
            optimizer.state[p.api] = values


def _collected(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]
) -> dict[str, Kept]:
    """The states of a rank's parameters. Collective among the ranks that hold them."""
    group_of = {id(p): k for k, g in enumerate(optimizer.param_groups) for p in g["params"]}
    return {
        fqn: Kept(
            group=group_of[id(p)],
            values={name: _whole(x) for name, x in optimizer.state.get(p, {}).items()},
        )
        for fqn, p in named.items()
        if id(p) in group_of
    }


def _whole(x: Any) -> Any:
    """A tensor whole on the host; other values themselves."""
    return whole_of(x).detach().cpu() if isinstance(x, torch.Tensor) else x


def _laid_out(x: Any, p: StageParameter, runtime: Runtime, *, like: bool, on_device: Any) -> Any:
    """A state of a parameter in its layout under the running plan."""
    if not isinstance(x, torch.Tensor):
        return x
    device = p.stored.device  # the host where it is offloaded
    if like and x.shape == p.shape:
        shard = part_of(p, x.to(device), runtime.place)
        return wrap_like(p, in_file(shard) if p.home == "file" else shard.clone().contiguous())
    if x.ndim and isinstance(p.api, DTensor):
        mesh = p.api.device_mesh
        return DTensor.from_local(x.to(device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return x.to(device) if on_device or x.ndim else x.clone()
