"""Moving a tensor between states on one mesh axis: one autograd function, one table.

A state covers value and gradient (see `costmodel.strategies`), so each transition has one forward
and one backward action, and the backward of `a -> b` is what its gradient's state demands.
Collectives are plain and blocking on the tensor's own stream; on an axis of one rank every
transition is the identity and is never emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from costmodel.strategies import Placement


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as seen from this rank: its process group, size and this rank's coordinate."""

    name: str
    size: int
    rank: int
    group: Any = None


# torch 2.13 renamed both and warns at the old names, which 2.11 has alone
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- local arithmetic -----------------------------------------------------------------------------


def split_parts(x: torch.Tensor, placement: Placement, n: int) -> torch.Tensor:
    """[.., split·n·k, ..] -> [n, .., split·k, ..]: the n shards of a whole tensor, stacked."""
    d, split = placement.dim, placement.split
    shape = x.shape
    parts = x.reshape(*shape[:d], split, n, shape[d] // (split * n), *shape[d + 1 :])
    stacked = parts.movedim(d + 1, 0)
    return stacked.reshape(n, *shape[:d], shape[d] // n, *shape[d + 1 :])


def join_parts(stacked: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The inverse of `split_parts`."""
    d, split = placement.dim, placement.split
    n, *shape = stacked.shape
    parts = stacked.reshape(n, *shape[:d], split, shape[d] // split, *shape[d + 1 :])
    return parts.movedim(0, d + 1).reshape(*shape[:d], shape[d] * n, *shape[d + 1 :])


def local_part(x: torch.Tensor, placement: Placement, n: int, rank: int) -> torch.Tensor:
    """This rank's shard of a whole tensor."""
    if placement.split == 1:
        size = x.shape[placement.dim] // n
        return x.narrow(placement.dim, rank * size, size)
    return split_parts(x, placement, n)[rank]


# --- collectives ----------------------------------------------------------------------------------


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    out = x.contiguous().clone()
    dist.all_reduce(out, group=axis.group)
    return out


def all_gather(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    source = x.contiguous()
    out = torch.empty((axis.size * source.numel(),), dtype=x.dtype, device=x.device)
    _ALL_GATHER(out, source.view(-1), group=axis.group)
    return join_parts(out.view(axis.size, *x.shape), placement)


def reduce_scatter(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    parts = split_parts(x, placement, axis.size).contiguous()
    out, work = reduce_scatter_flat(parts.view(axis.size, -1), axis)
    work.wait()
    return out.view(parts.shape[1:])


def reduce_scatter_flat(parts: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, dist.Work]:
    """Start summing `parts` [n, k] over the axis, row r for rank r: (this rank's row, its work)."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    work = _REDUCE_SCATTER(out, parts.reshape(-1), group=axis.group, async_op=True)
    return out, work


def all_to_all(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    if source.dim == target.dim:
        return local_part(all_gather(x, source, axis), target, axis.size, axis.rank).contiguous()
    parts = split_parts(x, target, axis.size).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out.view(-1), parts.view(-1), group=axis.group)
    return join_parts(out, source)


def on_first(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The value on the first rank, zero on the others: a whole tensor made partial."""
    return x if axis.rank == 0 else torch.zeros_like(x)


# --- transitions ----------------------------------------------------------------------------------

Move = Callable[[torch.Tensor, Placement, Placement, Axis], torch.Tensor]


def _keep(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return x.view_as(x)


def _reduce(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return all_reduce(x, axis)


def _slice(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return local_part(x, target, axis.size, axis.rank).contiguous()


def _slice_back(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return local_part(x, source, axis.size, axis.rank).contiguous()


def _gather(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return all_gather(x, source, axis)


def _gather_back(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return all_gather(x, target, axis)


def _scatter(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return reduce_scatter(x, target, axis)


def _scatter_back(
    x: torch.Tensor, source: Placement, target: Placement, axis: Axis
) -> torch.Tensor:
    return reduce_scatter(x, source, axis)


def _swap(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return all_to_all(x, source, target, axis)


def _swap_back(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return all_to_all(x, target, source, axis)


def _mask(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    return on_first(x, axis)


MOVES: dict[tuple[str, str], tuple[Move, Move]] = {
    ("R", "Rp"): (_keep, _reduce),
    ("R", "P"): (_mask, _keep),
    ("R", "S"): (_slice, _gather_back),
    ("P", "R"): (_reduce, _keep),
    ("P", "Rp"): (_reduce, _reduce),
    ("P", "S"): (_scatter, _gather_back),
    ("S", "S"): (_swap, _swap_back),
    ("S", "R"): (_gather, _slice_back),
    ("S", "Rp"): (_gather, _scatter_back),
    ("Rp", "R"): (_keep, _mask),
}


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source: Placement, target: Placement, axis: Axis
    ) -> torch.Tensor:
        ctx.states = source, target, axis
        return MOVES[source.kind, target.kind][0](x, source, target, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        source, target, axis = ctx.states
        return MOVES[source.kind, target.kind][1](grads[0], source, target, axis), None, None, None


class Reshard(nn.Module):
    """One transition on one axis, as a module of a lowered graph."""

    def __init__(self, source: Placement, target: Placement, axis: Axis) -> None:
        super().__init__()
        self.source, self.target, self.axis = source, target, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Transition.apply(x, self.source, self.target, self.axis)

    def extra_repr(self) -> str:
        return f"{self.source} -> {self.target} on {self.axis.name}"
