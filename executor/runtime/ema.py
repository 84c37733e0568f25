"""Exponential moving average of a parallel model's weights, laid out as they are under any plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from meshwright.executor.errors import StateDictError, StateError
from meshwright.executor.parameters import local_of
from meshwright.profiles.inputs import ArgumentError, shown
from meshwright.profiles.inputs.limits import is_number


class HasParameters(Protocol):
    """A parallel model, or the runtime of one."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


class Ema:
    """Averages a ← decay·a + (1 − decay)·p of the trained parameters p of a parallel model, in
    their dtype and layout: each rank averages the parts that it holds, and nothing is communicated.

    `update()` follows each `optimizer.step()`. Inside `with ema.applied():` the model has the
    averages for weights, for `eval_step`, `evaluate`, `generate`, `save_pretrained` and
    `full_state_dict`. `save_checkpoint(path, optimizer, extra={"ema": ema})` saves them as the
    model's own tensors are saved, and any plan's Ema loads them. Buffers are not averaged.
    """

    def __init__(self, model: HasParameters, decay: float = 0.999) -> None:
        """Averages begin as the weights are. Raises ValueError for a decay out of [0, 1),
        StateError for replicas that train apart."""
        if not is_number(decay) or not 0 <= decay < 1:
            raise ArgumentError.refused("Ema: decay", decay, legal="a number from 0 to below 1")
        if getattr(getattr(model, "plan", None), "outer_loop", None) is not None:
            raise StateError(
                ": replicas that train apart have weights of their own, and those that are saved "
                "are of their last meeting",
                place="Ema",
                legal="a plan without an outer loop",
                way_out="average full_state_dict() after each meet() yourself",
            )
        self.decay = decay
        self._model = model
        self._averages = {fqn: p.detach().clone() for fqn, p in self._trained().items()}
        self._applied = False

    def _trained(self) -> dict[str, torch.Tensor]:
        return {fqn: p for fqn, p in self._model.named_parameters() if p.requires_grad}

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A rank's parts of averages and weights. Raises StateError where the model was planned
        anew."""
        trained = self._trained()
        layouts = {fqn: _layout(p) for fqn, p in trained.items()}
        if layouts != {fqn: _layout(a) for fqn, a in self._averages.items()}:
            raise StateError(
                "the model's parameters are others, or laid out otherwise, than when it was made",
                place="Ema",
                legal="the model and the plan that it was made with",
                way_out="make an Ema of the new model, and load_checkpoint into it",
            )
        return [(local_of(self._averages[fqn]), local_of(p.detach())) for fqn, p in trained.items()]

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights as they are now in; after `optimizer.step()`."""
        if self._applied:
            raise StateError("is called inside `with ema.applied():`", place="Ema.update")
        for average, weights in self._pairs():
            average.lerp_(weights, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averages for weights."""
        pairs = self._pairs()
        self._swap(pairs)
        self._applied = True
        try:
            yield
        finally:
            self._applied = False
            self._swap(pairs)

    @torch.no_grad()
    def _swap(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for average, weights in pairs:  # one copy of one parameter more in memory
            before = weights.clone()
            weights.copy_(average)
            average.copy_(before)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages by FQN, as `named_parameters` lays them out."""
        if self._applied:
            raise StateError("is called inside `with ema.applied():`", place="Ema.state_dict")
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take averages over. Raises ValueError for other names or shapes."""
        if differing := sorted(self._averages.keys() ^ state.keys()):
            raise StateDictError(
                f" has other names, e.g. {shown(differing[:3])}",
                place="Ema: state",
                legal="the names of the parameters that are trained",
                way_out="load what an Ema of this model saved",
            )
        for fqn, average in self._averages.items():
            average.copy_(state[fqn])


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(x.shape), x.device, x.placements if isinstance(x, DTensor) else ())
