"""Moving a tensor between states on one mesh axis: one autograd function, one table.

A state covers value and gradient (see `costmodel.sharding.strategies`), so each transition has one
forward and one backward action, and the backward of `a -> b` is what its gradient's state demands.
Collectives are plain and blocking on the tensor's own stream; on an axis of one rank every
transition is the identity and is never emitted.

A dim that the axis doesn't divide is cut as torch's `Shard` cuts it: n ranks hold ⌈size/n⌉ elements
each but the last, which holds what is left (`costmodel.sharding.strategies` allows no empty part).
Collectives move equal parts, filled up with zeros that are cut off again on arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshwright.costmodel.sharding import Placement, largest_part


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as seen from this rank: its process group, size and this rank's coordinate."""

    name: str
    size: int
    rank: int
    group: Any = None

    @property
    def group_name(self) -> str:
        """Name of the group in the operators of compiled graphs."""
        name: str = self.group.group_name
        return name

    def part(self, size: int) -> tuple[int, int]:
        """Start of this rank's part of a dim, and its number of elements."""
        return part_of(size, self.size, self.rank)

    def fewer(self, split: int) -> int:
        """Parts of a dim on this rank, of so many that its own are among."""
        return split // self.size

    def local(self, x: torch.Tensor, placement: Placement) -> torch.Tensor:
        """This rank's shard of a whole tensor."""
        return local_part(x, placement, self.size, self.rank)


@dataclass(frozen=True, slots=True)
class SliceAxis(Axis):
    """The token slices of a micro-batch, of which this is the one numbered `rank`: an axis in time,
    on which nothing travels. `bounds` are the slices' first tokens, and the number of all."""

    bounds: tuple[int, ...] = ()

    def part(self, size: int) -> tuple[int, int]:
        """Start and size of the slice in a dim that has the tokens, each as often."""
        each = size // self.bounds[-1]
        first, end = self.bounds[self.rank : self.rank + 2]
        return first * each, (end - first) * each

    def fewer(self, split: int) -> int:
        """Parts of a dim in the slice, of so many that its tokens are among."""
        return self.part(split)[1]

    def local(self, x: torch.Tensor, placement: Placement) -> torch.Tensor:
        """The slice of a tensor that has all tokens."""
        d, split = placement.dim, placement.split
        parts: torch.Tensor = x.unflatten(d, (split, -1))
        start, size = self.part(parts.shape[d + 1])
        return torch.narrow(parts, d + 1, start, size).flatten(d, d + 1)


def slice_axes(sizes: Sequence[int]) -> list[SliceAxis]:
    """The axes of slices of so many tokens each, one for each of them."""
    bounds = (0, *accumulate(sizes))
    return [SliceAxis("slice", len(sizes), k, bounds=bounds) for k in range(len(sizes))]


# torch 2.13 renamed both and warns at the old names, which 2.11 has alone
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waiting(Protocol):
    """An operation under way until `wait` returns."""

    def wait(self) -> Any: ...


# --- local arithmetic -----------------------------------------------------------------------------


def part_of(size: int, n: int, rank: int) -> tuple[int, int]:
    """Start of the part of one of n ranks in a dim of `size`, and its number of elements."""
    part_size = largest_part(size, n)
    start = min(rank * part_size, size)
    return start, min(part_size, size - start)


def split_parts(x: torch.Tensor, placement: Placement, n: int) -> torch.Tensor:
    """[.., split·n·k, ..] -> [n, .., split·k, ..]: the n shards of a whole tensor, stacked; of a
    dim that n doesn't divide, the last are filled up with zeros."""
    d, split = placement.dim, placement.split
    if x.shape[d] % n:
        x = _filled(x, d, n * largest_part(x.shape[d], n))
    shape = x.shape
    parts = x.reshape(*shape[:d], split, n, shape[d] // (split * n), *shape[d + 1 :])
    stacked = parts.movedim(d + 1, 0)
    return stacked.reshape(n, *shape[:d], shape[d] // n, *shape[d + 1 :])


def join_parts(
    stacked: torch.Tensor, placement: Placement, size: int | None = None
) -> torch.Tensor:
    """The inverse of `split_parts`; `size` of the whole dim, where parts are filled up."""
    d, split = placement.dim, placement.split
    n, *shape = stacked.shape
    parts = stacked.reshape(n, *shape[:d], split, shape[d] // split, *shape[d + 1 :])
    joined = parts.movedim(0, d + 1).reshape(*shape[:d], shape[d] * n, *shape[d + 1 :])
    return joined if size is None else _cut(joined, d, size)


def local_part(x: torch.Tensor, placement: Placement, n: int, rank: int) -> torch.Tensor:
    """This rank's shard of a whole tensor."""
    if placement.split == 1:
        return x.narrow(placement.dim, *part_of(x.shape[placement.dim], n, rank))
    return split_parts(x, placement, n)[rank]


def _filled(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """`x` with zeros behind it along a dim, up to `size`."""
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


def _cut(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The inverse of `_filled`."""
    return x if x.shape[dim] == size else x.narrow(dim, 0, size).contiguous()


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


def all_gather(
    x: torch.Tensor, placement: Placement, axis: Axis, size: int | None = None
) -> torch.Tensor:
    """The whole of a split tensor; `size` of the whole dim, where the axis may not divide it."""
    if size is not None:
        x = _filled(x, placement.dim, largest_part(size, axis.size))
    if torch.compiler.is_compiling():
        flat = x.reshape(-1)
        out = _done(_OPERATORS.all_gather_into_tensor(flat, axis.size, axis.group_name))
        return join_parts(out.view(axis.size, *x.shape), placement, size)
    out, work = all_gather_flat(x.reshape(-1), axis)
    work.wait()
    return join_parts(out.view(axis.size, *x.shape), placement, size)


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
    part_size = axis.part(x.shape[placement.dim])[1]
    if torch.compiler.is_compiling():
        flat = parts.view(-1)
        out = _OPERATORS.reduce_scatter_tensor(flat, "sum", axis.size, axis.group_name)
        return _cut(_done(out).view(parts.shape[1:]), placement.dim, part_size)
    out, work = reduce_scatter_flat(parts.view(axis.size, -1), axis)
    work.wait()
    return _cut(out.view(parts.shape[1:]), placement.dim, part_size)


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


def all_to_all(
    x: torch.Tensor, source: Placement, target: Placement, axis: Axis, size: int | None = None
) -> torch.Tensor:
    """Split otherwise; `size` of the whole source dim, where the axis may not divide it."""
    if source.dim == target.dim:
        gathered = all_gather(x, source, axis, size)
        return local_part(gathered, target, axis.size, axis.rank).contiguous()
    if size is not None:
        x = _filled(x, source.dim, largest_part(size, axis.size))
    part_size = axis.part(x.shape[target.dim])[1]
    parts = split_parts(x, target, axis.size).contiguous()
    if torch.compiler.is_compiling():
        sizes = [1] * axis.size
        out = _done(_OPERATORS.all_to_all_single(parts, sizes, sizes, axis.group_name))
    else:
        out = torch.empty_like(parts)
        dist.all_to_all_single(out.view(-1), parts.view(-1), group=axis.group)
    return _cut(join_parts(out, source, size), target.dim, part_size)


def _done(x: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = _OPERATORS.wait_tensor(x)
    return done


def on_first(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The value on the first rank, zero on the others: a whole tensor made partial."""
    return x if axis.rank == 0 else torch.zeros_like(x)


# --- transitions ----------------------------------------------------------------------------------

# the last argument is the size of the whole dim of what is joined, where the axis doesn't divide it
Move = Callable[[torch.Tensor, Placement, Placement, Axis, int | None], torch.Tensor]


def _keep(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.view_as(x)


def _pass_on(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """A gradient as it came, not as a new view: by the number of its owners autograd knows whether
    a leaf may take it as its `.grad`."""
    return x


def _reduce(x: torch.Tensor, a: Placement, b: Placement, axis: Axis, *_: Any) -> torch.Tensor:
    return all_reduce(x, axis)


def _slice(x: torch.Tensor, a: Placement, b: Placement, axis: Axis, *_: Any) -> torch.Tensor:
    return local_part(x, b, axis.size, axis.rank).contiguous()


def _slice_gradient(
    x: torch.Tensor, a: Placement, b: Placement, axis: Axis, *_: Any
) -> torch.Tensor:
    """Memory of its own: as the gradient of a leaf, a part of another's would be added to."""
    part = local_part(x, b, axis.size, axis.rank)
    return part.clone(memory_format=torch.contiguous_format)


def _gather(
    x: torch.Tensor, a: Placement, b: Placement, axis: Axis, size: int | None
) -> torch.Tensor:
    return all_gather(x, a, axis, size)


def _scatter(x: torch.Tensor, a: Placement, b: Placement, axis: Axis, *_: Any) -> torch.Tensor:
    return reduce_scatter(x, b, axis)


def _swap(
    x: torch.Tensor, a: Placement, b: Placement, axis: Axis, size: int | None
) -> torch.Tensor:
    return all_to_all(x, a, b, axis, size)


def _mask(x: torch.Tensor, a: Placement, b: Placement, axis: Axis, *_: Any) -> torch.Tensor:
    return on_first(x, axis)


def _placed(
    x: torch.Tensor, a: Placement, b: Placement, axis: Axis, size: int | None
) -> torch.Tensor:
    """A split tensor made partial: zero where others have theirs."""
    if size is not None:
        x = _filled(x, a.dim, largest_part(size, axis.size))
    parts = x.new_zeros((axis.size, *x.shape))
    parts[axis.rank] = x
    return join_parts(parts, a, size)


# (from, to) -> what is done to the value, from -> to, and to its gradient, to -> from
MOVES: dict[tuple[str, str], tuple[Move, Move]] = {
    ("R", "Rp"): (_keep, _reduce),
    ("R", "P"): (_mask, _pass_on),
    ("R", "S"): (_slice, _gather),
    ("P", "R"): (_reduce, _pass_on),
    ("P", "Rp"): (_reduce, _reduce),
    ("P", "S"): (_scatter, _gather),
    ("S", "S"): (_swap, _swap),
    ("S", "R"): (_gather, _slice_gradient),
    ("S", "Rp"): (_gather, _scatter),
    ("Rp", "R"): (_keep, _mask),
    ("Rp", "S"): (_slice, _placed),
    ("Rp", "P"): (_mask, _mask),
}


def _moved(
    move: Move,
    x: torch.Tensor,
    states: tuple[Placement, Placement],
    axis: Axis,
    size: int | None,
    zigzag: Zigzag,
) -> torch.Tensor:
    """A tensor moved from one state to another, with tokens put in zigzag where they are split, and
    back in order where they are joined."""
    source, target = states
    if zigzag[1]:
        x = into_zigzag(x, target, axis.size)
    x = move(x, source, target, axis, size)
    return out_of_zigzag(x, source, axis.size) if zigzag[0] else x


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        source: Placement,
        target: Placement,
        axis: Axis,
        size: int | None,
        zigzag: Zigzag,
    ) -> torch.Tensor:
        # the gradient is joined where the value is split: of a dim that is whole here
        full_size = x.shape[target.dim] if target.sharded and target.split == 1 else None
        same = source.sharded and target.sharded and source.dim == target.dim
        ctx.states = source, target, axis, None if same else full_size, zigzag
        move = MOVES[source.kind, target.kind][0]
        return _moved(move, x, (source, target), axis, size, zigzag)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, target, axis, size, zigzag = ctx.states
        move = MOVES[source.kind, target.kind][1]
        moved = _moved(move, grads[0], (target, source), axis, size, zigzag[::-1])
        return moved, None, None, None, None, None


class Reshard(nn.Module):
    """One transition on one axis, as a module of a lowered graph; `size` of the source's whole dim,
    where the axis doesn't divide it; `zigzag` says where tokens lie so."""

    def __init__(
        self,
        source: Placement,
        target: Placement,
        axis: Axis,
        size: int | None = None,
        zigzag: Zigzag = (False, False),
    ) -> None:
        super().__init__()
        self.source, self.target, self.axis, self.size = source, target, axis, size
        self.zigzag = zigzag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.source, self.target
        moved: torch.Tensor = _Transition.apply(x, *states, self.axis, self.size, self.zigzag)  # type: ignore[no-untyped-call]
        return moved

    @property
    def gathers(self) -> bool:
        """Whether it makes a whole of the ranks' parts."""
        return self.source.sharded and not self.target.sharded

    def start(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start gathering again what a forward gathered; what is returned waits for it."""
        size = self.size
        if size is not None:
            x = _filled(x, self.source.dim, largest_part(size, self.axis.size))
        out, work = all_gather_flat(x.reshape(-1), self.axis)
        shape = self.axis.size, *x.shape

        def gathered() -> torch.Tensor:
            work.wait()
            return join_parts(out.view(shape), self.source, size)

        return gathered

    def extra_repr(self) -> str:
        return f"{self.source} -> {self.target} on {self.axis.name}"


# --- zigzag ---------------------------------------------------------------------------------------

# Zigzag: of a sequence in 2n chunks, rank r has the chunks r and 2n-1-r, so that causal scores are
# equal work for all (`costmodel/sharding/context_axis.py`).


Zigzag = tuple[bool, bool]  # whether tokens lie so in the source, and in the target


def zigzag_chunks(n: int) -> list[int]:
    """The chunks of a sequence of 2n in the order in which n ranks have them, two each: rank r has
    r and 2n-1-r."""
    return [k for r in range(n) for k in (r, 2 * n - 1 - r)]


def into_zigzag(x: torch.Tensor, placement: Placement, n: int) -> torch.Tensor:
    """A whole tensor with its tokens in zigzag, to be split."""
    return _chunks_moved(x, placement, zigzag_chunks(n))


def out_of_zigzag(x: torch.Tensor, placement: Placement, n: int) -> torch.Tensor:
    """The inverse of `into_zigzag`, of what was joined."""
    order = zigzag_chunks(n)
    return _chunks_moved(x, placement, sorted(range(2 * n), key=order.__getitem__))


def _chunks_moved(x: torch.Tensor, placement: Placement, order: list[int]) -> torch.Tensor:
    d, split, chunks = placement.dim, placement.split, len(order)
    chunk_size = x.shape[d] // (split * chunks)
    parts = x.reshape(*x.shape[:d], split, chunks, chunk_size, *x.shape[d + 1 :])
    index = torch.tensor(order, device=x.device)
    return parts.index_select(d + 1, index).reshape(x.shape)
