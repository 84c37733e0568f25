"""State of a traced program: parameters, buffers and constants, which no operator makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.costmodel.graph import TensorMeta
from meshwright.planner.tracing.values.functional import GraphBuilder, Slots


class TracedState:
    """Value -> FQN of the parameters and buffers met so far, and value -> tensor of constants.

    `aliases` maps every parameter FQN of the model to the first of those tied to it; `buffers` are
    the FQNs of its buffers, in order.
    """

    def __init__(
        self, model: nn.Module, buffers: Sequence[str], builder: GraphBuilder, slots: Slots
    ) -> None:
        self.builder = builder
        self.slots = slots
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._slots: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self.aliases[name] = first.setdefault(id(p), name)
        self._order = {name: k for k, name in enumerate((*self.aliases, *buffers))}

    def parameter(self, fqn: str, meta: TensorMeta) -> str:
        """The slot of a parameter, by any of its FQNs; defined when it is first met."""
        fqn = self.aliases.get(fqn, fqn)
        if fqn not in self._slots:
            value = self.builder.define("p_" + fqn.replace(".", "_"), meta)
            self.parameters[value] = fqn
            self._slots[fqn] = self.slots.new(value)
        return self._slots[fqn]

    def known_parameter(self, fqn: str) -> str | None:
        """The slot of a parameter; None if it was not met."""
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
