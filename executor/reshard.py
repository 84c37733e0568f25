"""Moving a tensor between states on one mesh axis: one autograd function, one table.

A state covers value and gradient (see `costmodel.strategies`), so each transition has one forward
and one backward action, and the backward of `a -> b` is what its gradient's state demands.
Collectives are plain and blocking on the tensor's own stream; on an axis of one rank every
transition is the identity and is never emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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

    @property
    def group_name(self) -> str:
        """What the operators of compiled graphs call the group."""
        return self.group.group_name


# torch 2.13 renamed both and warns at the old names, which 2.11 has alone
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waiting(Protocol):
    """What is under way until `wait` returns."""

    def wait(self) -> Any: ...


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

# While torch.compile traces, a collective is an operator that it knows; a call of one costs more
# than a plain collective, so only then. Their own autograd is not used: `_Transition` has it.
_OPERATORS = torch.ops._c10d_functional
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Σ (or the maximum) over the axis, as a new tensor."""
    if torch.compiler.is_compiling():
        return _done(_OPERATORS.all_reduce(x.contiguous(), op, axis.group_name))
    out = x.contiguous().clone()
    dist.all_reduce(out, op=_REDUCTIONS[op], group=axis.group)
    return out


def all_gather(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    if torch.compiler.is_compiling():
        flat = x.reshape(-1)
        out = _done(_OPERATORS.all_gather_into_tensor(flat, axis.size, axis.group_name))
        return join_parts(out.view(axis.size, *x.shape), placement)
    out, work = all_gather_flat(x.reshape(-1), axis)
    work.wait()
    return join_parts(out.view(axis.size, *x.shape), placement)


def all_gather_flat(
    x: torch.Tensor, axis: Axis, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, dist.Work]:
    """Start gathering vectors [k] of the axis' ranks as rows, into a vector [n·k] if one is given:
    ([n, k], its work)."""
    out = into
    if out is None:
        out = torch.empty((axis.size * x.numel(),), dtype=x.dtype, device=x.device)
    work = _ALL_GATHER(out, x.contiguous(), group=axis.group, async_op=True)
    return out.view(axis.size, -1), work


def reduce_scatter(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    parts = split_parts(x, placement, axis.size).contiguous()
    if torch.compiler.is_compiling():
        flat = parts.view(-1)
        out = _OPERATORS.reduce_scatter_tensor(flat, "sum", axis.size, axis.group_name)
        return _done(out).view(parts.shape[1:])
    out, work = reduce_scatter_flat(parts.view(axis.size, -1), axis)
    work.wait()
    return out.view(parts.shape[1:])


def reduce_scatter_flat(parts: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Waiting]:
    """Start summing `parts` [n, k] over the axis, row r for rank r: (this rank's row, its work),
    to be read when the work is done."""
    if parts.is_cpu:  # gloo scatters after an all-reduce: twice the bytes of an exchange and a sum
        return _ExchangeAndSum.start(parts, axis)
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    work = _REDUCE_SCATTER(out, parts.reshape(-1), group=axis.group, async_op=True)
    return out, work


@dataclass(slots=True)
class _ExchangeAndSum:
    """The work of a reduce-scatter made of an all-to-all and a sum by its receiver."""

    sent: torch.Tensor  # to live as long
    received: torch.Tensor
    work: dist.Work
    out: torch.Tensor

    @staticmethod
    def start(parts: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, _ExchangeAndSum]:
        source = parts.contiguous()
        received = torch.empty_like(source)
        work = dist.all_to_all_single(
            received.view(-1), source.view(-1), group=axis.group, async_op=True
        )
        out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
        return out, _ExchangeAndSum(source, received, work, out)

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received, 0, out=self.out)


def all_to_all(x: torch.Tensor, source: Placement, target: Placement, axis: Axis) -> torch.Tensor:
    if source.dim == target.dim:
        return local_part(all_gather(x, source, axis), target, axis.size, axis.rank).contiguous()
    parts = split_parts(x, target, axis.size).contiguous()
    if torch.compiler.is_compiling():
        sizes = [1] * axis.size
        out = _OPERATORS.all_to_all_single(parts, sizes, sizes, axis.group_name)
        return join_parts(_done(out), source)
    out = torch.empty_like(parts)
    dist.all_to_all_single(out.view(-1), parts.view(-1), group=axis.group)
    return join_parts(out, source)


def _done(x: torch.Tensor) -> torch.Tensor:
    return _OPERATORS.wait_tensor(x)


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
