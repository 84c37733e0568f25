"""The mixture-of-experts layer of reference models, with its data movement as single operators.

Each of s tokens goes to k of E experts. What a framework does there in dozens of kernels (counting,
sorting, exchanging) is one operator here, so that it can be priced as one:

    dispatch         (b, s, h), (b, s, k)               -> (b, s, k, h)   a copy per chosen expert
    grouped_linear   (b, s, k, i), (E, i, o), (b, s, k) -> (b, s, k, o)   each copy by its expert
    combine          (b, s, k, h)                       -> (b, s, h)      the copies' sum

The copies keep their token's place: which rank holds them is the cost model's business
(`costmodel/moe_rules.py`). The router's weights are applied between the two products, as
Megatron-Core does, so that nothing wide is kept for the combination.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@torch.library.custom_op("meshwright::dispatch", mutates_args=())
def dispatch(x: Tensor, experts: Tensor) -> Tensor:
    """One copy of each token per chosen expert."""
    return x.unsqueeze(2).expand(*experts.shape, x.shape[-1]).contiguous()


@dispatch.register_fake
def _(x: Tensor, experts: Tensor) -> Tensor:
    return x.new_empty(*experts.shape, x.shape[-1])


@torch.library.custom_op("meshwright::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Each copy times the matrix of its expert."""
    return torch.einsum("bski,bskio->bsko", x, weight[experts])


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-1])


@torch.library.custom_op("meshwright::combine", mutates_args=())
def combine(x: Tensor) -> Tensor:
    """The sum of each token's copies."""
    return x.sum(2)


@combine.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], x.shape[-1])


class GroupedLinear(nn.Module):
    """As many matrices as there are experts, without biases."""

    def __init__(self, experts: int, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inner, outer))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, chosen)


class MoE(nn.Module):
    """Router, gated experts of width `ffn`, and a gated MLP that all tokens share (`shared`: its
    width, 0 for none)."""

    def __init__(self, *, hidden: int, ffn: int, experts: int, topk: int, shared: int) -> None:
        super().__init__()
        self.topk = topk
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleDict({
            "gate": GroupedLinear(experts, hidden, ffn),
            "up": GroupedLinear(experts, hidden, ffn),
            "down": GroupedLinear(experts, ffn, hidden),
        })  # fmt: skip
        self.shared = (
            nn.ModuleDict({
                "gate": nn.Linear(hidden, shared, bias=False),
                "up": nn.Linear(hidden, shared, bias=False),
                "down": nn.Linear(shared, hidden, bias=False),
            }) if shared else None
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.router(x), -1).topk(self.topk)
        rows = dispatch(x, chosen)
        y = F.silu(self.experts["gate"](rows, chosen)) * self.experts["up"](rows, chosen)
        out = combine(self.experts["down"](y * weights.unsqueeze(-1), chosen))
        if self.shared is None:
            return out
        always = F.silu(self.shared["gate"](x)) * self.shared["up"](x)
        return out + self.shared["down"](always)
