"""Steps of an optimizer that are not made as usual: within a backward, parameter by parameter; or
before it is known whether they hold, so that they can be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.executor.errors import StateError
from meshwright.executor.parameters.parameters import StageParameter, accumulate_grads, local_of


class StepInBackward:
    """An optimizer that steps each of its parameters as the gradient of that is whole."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self.groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.stepped = set[str]()  # parameters, by value

    def takes(self, p: StageParameter) -> bool:
        """Whether a parameter is stepped as its gradient is whole."""
        return id(p.api) in self.groups

    def step(self, p: StageParameter) -> None:
        """Step one parameter, and let its gradient go."""
        accumulate_grads([p], self.device)
        step_alone(self.optimizer, self.groups[id(p.api)], p.api)
        p.api.grad = None
        self.stepped.add(p.value)


def step_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> None:
    """Step one parameter of a group."""
    groups, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [p]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


# --- undoable steps -------------------------------------------------------------------------------

# An optimizer's step that can be undone: weights and states put back, and the step made again.


Options = list[dict[str, Any]]  # of each group of an optimizer, parameters apart


@dataclass(slots=True, kw_only=True)
class UndoableStep:
    """One step of an optimizer on the gradients that are there. `options` are learning rates and
    the like of this step, whatever a schedule makes of them; `tensors` what `step` changed, each
    with its copy, and `states` what there was of each parameter; `gradients` those of this step,
    with the version of their memory."""

    optimizer: torch.optim.Optimizer
    options: Options
    left: Options = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    states: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    gradients: dict[torch.Tensor, tuple[torch.Tensor, int]] = field(default_factory=dict)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> UndoableStep:
        return UndoableStep(optimizer=optimizer, options=_options(optimizer))

    def step(self) -> None:
        """Step, and keep a copy of the weights and states of all that has a gradient."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p in held:
            if p.grad is None:
                continue
            self.gradients[p] = p.grad, local_of(p.grad)._version
            state = self.optimizer.state.get(p, {})
            for x in (p, *state.values()):
                if isinstance(x, torch.Tensor):
                    self.tensors.append((x, local_of(x.detach()).clone()))
            self.states[p] = {
                name: x if isinstance(x, torch.Tensor) else copy.deepcopy(x)
                for name, x in state.items()
            }
        self.optimizer.step()
        self.left = _options(self.optimizer)

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Context in which parameters have the gradients of this step, whatever they have now.
        Raises StateError where those were written since."""
        now = {p: p.grad for p in self.gradients}
        for p, (gradient, version) in self.gradients.items():
            if local_of(gradient)._version != version:
                raise StateError(
                    " were written before their step was validated, which may have to be made "
                    "again with them",
                    place="gradients of the last train_step",
                    legal="gradients that stay, or that are let go (zero_grad's set_to_none=True)",
                    way_out="drop what writes them (train_step(..., optimizer=) zeroes and clips), "
                    "or call result.settle() before",
                )
            p.grad = gradient
        try:
            yield
        finally:
            for p, theirs in now.items():
                if theirs is not self.gradients[p][0]:
                    p.grad = theirs

    @torch.no_grad()
    def undo(self) -> None:
        """Put back what was kept."""
        self.optimizer.state.update(self.states)
        here = [local_of(x.detach()) for x, _ in self.tensors]
        if here:
            torch._foreach_copy_(here, [before for _, before in self.tensors])

    def step_again(self) -> None:
        """Step with the options of this step; what a schedule made of them since stays."""
        now = _options(self.optimizer)
        _write(self.optimizer, self.options)
        self.optimizer.step()
        newer = [
            {name: x for name, x in gradient.items() if name not in was or not _same(x, was[name])}
            for gradient, was in zip(now, self.left, strict=True)
        ]
        _write(self.optimizer, newer)

    def forget(self) -> None:
        """Let go of the copies."""
        self.tensors, self.states, self.gradients = [], {}, {}


def _options(optimizer: torch.optim.Optimizer) -> Options:
    return [
        {
            name: x.clone() if isinstance(x, torch.Tensor) else copy.copy(x)
            for name, x in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _write(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Set options of each group; tensors in place, as a schedule holds them."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, x in values.items():
            if isinstance(x, torch.Tensor) and isinstance(group[name], torch.Tensor):
                group[name].copy_(x)
            else:
                group[name] = x


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
