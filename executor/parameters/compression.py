"""Compressed sums of a bucket's gradients over the data axis (`costmodel/compressed.py`).

A rank's memory of one parameter is its error, of the gradient's elements, and under PowerSGD the
factor Q of the last step, equal on all ranks, as is what they sum to, bit by bit. Gradients of one
bucket travel together. A first Q is drawn by the parameter's name. A Q whose column a step left
without any length keeps that column of the step before.

A matrix whose gradient is zero on all ranks, as that of one that no backward reached, sends
nothing: ranks say beside what they send whether theirs is another one. Else a part of the errors
would be taken, and thrown away with the gradient.

A step that is dropped, since some gradient of it is not finite or its batch was refused, empties
the memories: what they had of it can't be told from the rest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.compressed import Compression, as_matrix
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.resharding import Axis, all_gather_flat

REMEMBERED = "meshwright.compressed"  # the memories, beside the user's objects in a checkpoint


@dataclass(slots=True, kw_only=True, eq=False)
class Memory:
    """A rank's memory of one parameter: its `error`, (rows, columns) in fp32, and PowerSGD's factor
    `q`, transposed: (rank, columns); or None."""

    fqn: str
    error: torch.Tensor
    q: torch.Tensor | None

    @staticmethod
    def of(fqn: str, shape: Sequence[int], how: Compression, device: torch.device) -> Memory:
        """The empty memory of a parameter of this local shape."""
        sides = as_matrix(shape)
        assert sides is not None
        error = torch.zeros(sides, dtype=torch.float32, device=device)
        q = first_factor(fqn, how.rank, sides[1]).to(device) if how.rank else None
        return Memory(fqn=fqn, error=error, q=q)

    def clear(self) -> None:
        """Forget all of it."""
        self.error.zero_()
        if self.q is not None:
            self.q.copy_(first_factor(self.fqn, *self.q.shape))


class Memories:
    """A rank's memories of all its parameters, by FQN, as a checkpoint has them."""

    def __init__(self, memories: Iterable[Memory]) -> None:
        self.of = {memory.fqn: memory for memory in memories}

    def clear(self) -> None:
        """Forget all of them."""
        for memory in self.of.values():
            memory.clear()

    def state_dict(self) -> dict[str, Any]:
        """Errors, which are each rank's own, and factors."""
        return {
            fqn: {"error": m.error} | ({} if m.q is None else {"q": m.q})
            for fqn, m in self.of.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of the same plan."""
        for fqn, memory in self.of.items():
            memory.error.copy_(state[fqn]["error"])
            if memory.q is not None:
                memory.q.copy_(state[fqn]["q"])


def first_factor(fqn: str, rank: int, columns: int) -> torch.Tensor:
    """PowerSGD's first Q of a parameter, transposed, the same on all ranks: normal numbers."""
    draw = torch.Generator().manual_seed(zlib.crc32(fqn.encode()))
    return torch.randn(rank, columns, generator=draw)


def compression_of(p: StageParameter, axis: Axis) -> Compression | None:
    """The compression by which a parameter's gradient is summed over an axis; None as it is."""
    how, sides = p.sharing.compression, as_matrix(p.leaf.shape)
    if how is None or sides is None or not p.sum_data:
        return None
    return how if how.shrinks(*sides, axis.size, p.stored.dtype.itemsize) else None


@dataclass(slots=True, kw_only=True, eq=False)
class CompressedSum:
    """The sum over an axis of the gradients that lie one after the other in a buffer, each with
    its memory."""

    how: Compression
    memories: Sequence[Memory]

    def run(self, x: torch.Tensor, axis: Axis) -> Iterator[None]:
        """Sum a buffer (1, columns) in place; yields while a collective is under way."""
        flat = x.view(-1)
        parts = flat.split([memory.error.numel() for memory in self.memories])
        there = torch.stack([torch.linalg.vector_norm(part) != 0 for part in parts])
        for memory, part in zip(self.memories, parts, strict=True):
            memory.error.view(-1).add_(part)
        yield from (self._factors if self.how.rank else self._largest)(parts, there, axis)

    def _factors(
        self, parts: Sequence[torch.Tensor], there: torch.Tensor, axis: Axis
    ) -> Iterator[None]:
        """PowerSGD. Factors are transposed, as products with few rows are the fastest that a CPU's
        library has of these."""
        memories = self.memories
        sums = _packed([*(_factor(m) @ m.error.T for m in memories), there.float()])
        work = dist.all_reduce(sums[0], group=axis.group, async_op=True)
        yield
        work.wait()
        *products, anywhere = sums[1]
        bases = [torch.linalg.qr(p.T).Q for p in products]
        factors = _packed([p.T @ m.error for m, p in zip(memories, bases, strict=True)])
        work = dist.all_reduce(factors[0], group=axis.group, async_op=True)
        yield
        work.wait()
        for k, (memory, p, q) in enumerate(zip(memories, bases, factors[1], strict=True)):
            q.mul_(anywhere[k] > 0)
            into = parts[k].view(memory.error.shape)
            into.copy_(p @ q)  # rounded to what the optimizer reads, which the error knows
            memory.error.sub_(into, alpha=1 / axis.size)
            warm = _factor(memory)
            warm.copy_(torch.where(q.square().sum(1, keepdim=True) > 0, q, warm))

    def _largest(
        self, parts: Sequence[torch.Tensor], there: torch.Tensor, axis: Axis
    ) -> Iterator[None]:
        """Top-k: each rank's elements are added in the order of the ranks, so that all have the
        same sums. An element that is sent is no error, but for what a rounded sum lacks of it."""
        counts = [self.how.kept(*memory.error.shape) for memory in self.memories]
        values, places = [], []
        for memory, k in zip(self.memories, counts, strict=True):
            error = memory.error.view(-1)
            at = torch.topk(error.abs(), k, sorted=False).indices
            values.append(error[at].view(torch.int32))
            places.append(at.to(torch.int32))
        told = torch.cat([*values, *places, there.int()])
        del values, places, at
        received, work = all_gather_flat(told, axis)
        yield
        work.wait()
        columns = received.split([*counts, *counts, len(counts)], 1)
        anywhere = columns[-1].sum(0) > 0
        for k, (memory, part) in enumerate(zip(self.memories, parts, strict=True)):
            error, at = memory.error.view(-1), columns[len(counts) + k]
            sent = columns[k].view(torch.float32)
            exact = part.dtype == error.dtype
            total = part.zero_() if exact else torch.zeros_like(error)
            for rank in range(axis.size):
                total.index_add_(0, at[rank], sent[rank] * anywhere[k])
            error.index_add_(0, at[axis.rank], sent[axis.rank] * anywhere[k], alpha=-1)
            if not exact:
                part.copy_(total)
                error.add_(total.sub_(part), alpha=1 / axis.size)
            del total


def _factor(memory: Memory) -> torch.Tensor:
    assert memory.q is not None
    return memory.q


def _packed(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Matrices in one buffer, and as views of it."""
    buffer = torch.cat([part.reshape(-1) for part in parts])
    views = buffer.split([part.numel() for part in parts])
    return buffer, [view.view(part.shape) for view, part in zip(views, parts, strict=True)]
