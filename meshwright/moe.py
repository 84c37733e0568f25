"""Mixtures of experts that Meshwright can plan and run: a layer, and the operators it is made of.

A module that calls the operators itself is planned alike; expert parallelism needs a parameter
[experts, in, out] as the weight of each `grouped_linear`, and what stands between `dispatch` and
`combine` to work on each copy alone. The layer applies the router's weights between the two
products, as Megatron-Core does, so that nothing wide is stored for the combination.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.planner.operators import combine, dispatch, grouped_linear
from meshwright.profiles.inputs import ArgumentError, shown

__all__ = ["GroupedLinear", "MoE", "combine", "dispatch", "grouped_linear"]


class GroupedLinear(nn.Module):
    """A linear layer per expert, without biases: rows [b, s, k, inner] of the experts chosen
    [b, s, k] -> [b, s, k, outer]."""

    def __init__(self, experts: int, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inner, outer))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each matrix as `nn.Linear` initialises its own: uniform within 1/√inner."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y: Tensor = grouped_linear(x, self.weight, chosen)
        return y


def _gated(linear: Callable[[int, int], nn.Module], hidden: int, ffn: int) -> nn.ModuleDict:
    """The layers of a gated MLP."""
    sizes = {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
    return nn.ModuleDict({name: linear(*size) for name, size in sizes.items()})


class MoE(nn.Module):
    """Router, gated experts of width `ffn`, and a gated MLP that all tokens share (`shared`: its
    width, 0 for none): [b, s, hidden] -> [b, s, hidden].

    A token goes to the `topk` experts that the softmax of the router prefers, weighted by it.
    """

    def __init__(self, *, hidden: int, ffn: int, experts: int, topk: int, shared: int = 0) -> None:
        super().__init__()
        if not 1 <= topk <= experts:
            raise ArgumentError(
                f"={shown(topk)} of experts={shown(experts)}",
                place="MoE: topk",
                legal=f"1 to {shown(experts)}",
            )
        self.topk = topk
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = _gated(partial(GroupedLinear, experts), hidden, ffn)
        self.shared = _gated(partial(nn.Linear, bias=False), hidden, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.router(x), -1).topk(self.topk)
        rows = dispatch(x, chosen)
        y = F.silu(self.experts["gate"](rows, chosen)) * self.experts["up"](rows, chosen)
        out: Tensor = combine(self.experts["down"](y * weights.unsqueeze(-1), chosen))
        if self.shared is None:
            return out
        always = F.silu(self.shared["gate"](x)) * self.shared["up"](x)
        shared: Tensor = self.shared["down"](always)
        return out + shared
