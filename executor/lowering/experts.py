"""Experts shared out: each token's copies travel to the ranks of their experts, and home again.

ep ranks with tokens of their own hold E/ep experts each, in rank order. Between `dispatch` and
`combine` a value of a rank's copies, traced as [b, s, k, ...], is laid out [n, 1, 1, ...] instead:
the n copies that arrived from all ep ranks, sorted by expert. What works on each copy alone runs
there as it was traced, and a value made outside (the router's weights) is sent the same way.

    own copies, by token  --order-->  by expert  --all-to-all-->  by sender, then expert
                          --arranged-->  by expert

The way home, and the backward of each way, is the inverse. How many copies travel is known when the
router has chosen: the ranks exchange E numbers, which cost the host one wait. A rank that gets no
copy takes part with none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.executor.host_values import read
from meshwright.executor.resharding import Axis
from meshwright.planner.operators import expert_order, grouped_rows, grouped_weights, inverse_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Permutations and counts of the copies of a rank's tokens on their way, `copies` = (b, s, k),
    and what comes in their place.

    `order` sorts this rank's copies by expert, `arranged` those that arrive; `home` and `restored`
    undo them. `sent` and `received` are copies per rank, `counts` what arrived per expert.
    """

    axis: Axis
    copies: tuple[int, ...]
    order: torch.Tensor
    home: torch.Tensor
    arranged: torch.Tensor
    restored: torch.Tensor
    sent: list[int]
    received: list[int]
    counts: list[int]


class FindRoute(nn.Module):
    """Experts of each token [b, s, k] -> the route of their copies over `axis`."""

    def __init__(self, axis: Axis, experts: int) -> None:
        super().__init__()
        self.axis, self.experts = axis, experts

    def forward(self, chosen: torch.Tensor) -> Route:
        axis, local_experts = self.axis, self.experts // self.axis.size
        order, counts = expert_order(chosen, self.experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=axis.group)
        numbers = torch.stack([counts, arriving]).view(2, axis.size, local_experts)
        leaving, coming = read(numbers, lambda: _balanced(chosen.numel(), axis, local_experts))
        expert = torch.arange(local_experts, device=chosen.device).repeat(axis.size)
        received = [sum(row) for row in coming]
        expert = expert.repeat_interleave(arriving, output_size=sum(received))
        arranged = expert.argsort(stable=True)
        return Route(
            axis=axis,
            copies=tuple(chosen.shape),
            order=order,
            home=inverse_of(order),
            arranged=arranged,
            restored=inverse_of(arranged),
            sent=[sum(row) for row in leaving],
            received=received,
            counts=[sum(column) for column in zip(*coming, strict=True)],
        )


def _balanced(copies: int, axis: Axis, local_experts: int) -> list[list[list[int]]]:
    """Copies that a rehearsal sends to each expert of each rank, and gets from each rank for each
    of its experts: as many as any other, the first experts one more."""
    quotient, more = divmod(copies, axis.size * local_experts)
    per_expert = [
        [quotient + (rank * local_experts + e < more) for e in range(local_experts)]
        for rank in range(axis.size)
    ]
    return [per_expert, [per_expert[axis.rank]] * axis.size]


def _outward(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """This rank's copies, sorted by expert -> those of its experts. Copies of no expert stay."""
    out = rows.new_empty(sum(route.received), rows.shape[1])
    leaving = rows[: sum(route.sent)]
    dist.all_to_all_single(out, leaving, route.received, route.sent, group=route.axis.group)
    return out.index_select(0, route.arranged)


def _homeward(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Copies of this rank's experts -> its own, each in its token's place; zeros for no expert."""
    out, sent = rows.new_empty(len(route.home), rows.shape[1]), sum(route.sent)
    back = rows.index_select(0, route.restored)
    dist.all_to_all_single(out[:sent], back, route.sent, route.received, group=route.axis.group)
    out[sent:].zero_()
    return out.index_select(0, route.home)


class _Send(torch.autograd.Function):
    """Tokens [b, s, h], or values of their copies [b, s, k, ...], to the experts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route, tokens: bool) -> torch.Tensor:
        ctx.route, ctx.tokens, ctx.shape = route, tokens, x.shape
        features = x.shape[2:] if tokens else x.shape[3:]
        order = route.order // route.copies[2] if tokens else route.order
        rows = x.reshape(-1, prod(features)).index_select(0, order)
        return _outward(rows, route).view(-1, 1, 1, *features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        route, (grad,) = ctx.route, grads
        returned = _homeward(grad.reshape(len(grad), prod(grad.shape[3:])), route)
        if ctx.tokens:
            returned = returned.view(*route.copies, -1).sum(2)
        return returned.view(ctx.shape), None, None


class _Return(torch.autograd.Function):
    """Results [n, 1, 1, h] home, and each token's added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return _homeward(x.flatten(0, 2), route).view(*route.copies, -1).sum(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        route, (grad,) = ctx.route, grads
        rows = grad.flatten(0, 1).index_select(0, route.order // route.copies[2])
        return _outward(rows, route).view(-1, 1, 1, grad.shape[2]), None


class _Product(torch.autograd.Function):
    """Copies [n, 1, 1, i], sorted, times the matrices [E, i, o] of this rank's experts, plus their
    biases [E, o]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: list[int],
        transposed: bool,
    ) -> torch.Tensor:
        rows = x.flatten(0, 2)
        ctx.save_for_backward(rows, weight)
        ctx.counts, ctx.transposed = counts, transposed
        matrices = weight.transpose(1, 2) if transposed else weight
        return grouped_rows(rows, matrices, counts, bias).view(-1, 1, 1, matrices.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows, weight), counts = ctx.saved_tensors, ctx.counts
        to_rows, to_weight, to_bias, *_ = ctx.needs_input_grad
        grad = grads[0].flatten(0, 2)
        back = weight if ctx.transposed else weight.transpose(1, 2)
        left, right = (grad, rows) if ctx.transposed else (rows, grad)
        ones = grad.new_ones(len(grad), 1)
        return (
            grouped_rows(grad, back, counts).view(-1, 1, 1, rows.shape[1]) if to_rows else None,
            grouped_weights(left, right, counts) if to_weight else None,
            grouped_weights(ones, grad, counts).squeeze(1) if to_bias else None,
            None,
            None,
        )


_send: Callable[..., torch.Tensor] = _Send.apply
_return: Callable[..., torch.Tensor] = _Return.apply
_product: Callable[..., torch.Tensor] = _Product.apply


class Send(nn.Module):
    """Tokens, or values of their copies, along a route."""

    def __init__(self, *, tokens: bool) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        return _send(x, route, self.tokens)


class Return(nn.Module):
    """Results home, each token's copies added up."""

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        return _return(x, route)


class GroupedProduct(nn.Module):
    """The copies that arrived, each times the matrix of its expert, plus its bias."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, route: Route
    ) -> torch.Tensor:
        return _product(x, weight, bias, route.counts, self.transposed)
