"""What a traced program reads and no operator of it makes: parameters, buffers, constants."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.costmodel.graph import TensorMeta
from meshwright.planner.tracing.values.functional import Builder, Slots


class TracedState:
    """The values of a model's tensors, defined when they are first met; tied ones once."""

    def __init__(self, model: nn.Module, builder: Builder, slots: Slots) -> None:
        self.builder, self.slots = builder, slots
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._slots: dict[str, str] = {}
        kept: dict[int, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self.aliases[name] = kept.setdefault(id(p), name)
        names = (*self.aliases, *(name for name, _ in model.named_buffers(remove_duplicate=False)))
        self._order = {name: k for k, name in enumerate(names)}

    def parameter(self, fqn: str, meta: TensorMeta) -> str:
        """The slot of a parameter, by any of its FQNs."""
        kept = self.aliases.get(fqn, fqn)
        if kept not in self._slots:
            value = self.builder.define("p_" + kept.replace(".", "_"), meta)
            self.parameters[value] = kept
            self._slots[kept] = self.slots.new(value)
        return self._slots[kept]

    def known_parameter(self, fqn: str) -> str | None:
        """The slot of a parameter already met."""
        return self._slots.get(self.aliases.get(fqn, fqn))

    def buffer(self, fqn: str, name: str, meta: TensorMeta) -> str:
        value = self.builder.define(name, meta)
        self.buffers[value] = fqn
        return self.slots.new(value)

    def constant(self, name: str, tensor: torch.Tensor, meta: TensorMeta) -> str:
        value = self.builder.define(name, meta)
        self.constants[value] = tensor
        return self.slots.new(value)

    def ordered(self, names: Mapping[str, str]) -> dict[str, str]:
        """Values and their FQNs in the order of the model."""
        return dict(sorted(names.items(), key=lambda item: self._order[item[1]]))
