"""A shift of tokens by one where they are split: each rank needs one token of a neighbour.

    pad     y[i] = x[i-1], or x[i+1]; what has no neighbour is filled
    roll    the same, round the ends

The tokens lie in chunks, one per rank or, in zigzag, two. Every chunk's token at the end that is
passed on is gathered from all ranks (n tokens, or 2n); of these each rank takes the ones that come
before, or after, its own chunks. In the backward their gradients go back by a reduce-scatter.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.costmodel.sharding import RP, Placement, Shift
from meshwright.executor.resharding import Axis, Reshard, zigzag_chunks


class Halo(nn.Module):
    """Tokens along `shift.dim` moved by one, on this rank's part of them."""

    def __init__(self, shift: Shift, axis: Axis, *, zigzag: bool) -> None:
        super().__init__()
        self.shift, self.axis = shift, axis
        self.own = [axis.rank]
        order = list(range(axis.size))
        if zigzag:
            order = zigzag_chunks(axis.size)
            self.own = order[2 * axis.rank : 2 * axis.rank + 2]
        self.places = [order.index(k) for k in range(len(order))]  # of each chunk, as gathered
        self.gather = Reshard(Placement("S", shift.dim), RP, axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim, later = self.shift.dim, self.shift.by > 0
        chunks = x.chunk(len(self.own), dim)
        length = chunks[0].shape[dim]
        ends = [c.narrow(dim, length - 1 if later else 0, 1) for c in chunks]
        passed = self.gather(torch.cat(ends, dim))
        moved = []
        for k, chunk in zip(self.own, chunks, strict=True):
            entering = self._entering(passed, k)
            interior = chunk.narrow(dim, 0 if later else 1, length - 1)
            moved += [entering, interior] if later else [interior, entering]
        return torch.cat(moved, dim)

    def _entering(self, passed: torch.Tensor, k: int) -> torch.Tensor:
        """The token that comes into the k-th chunk."""
        source, count = k - self.shift.by, len(self.places)
        token = passed.narrow(self.shift.dim, self.places[source % count], 1)
        if 0 <= source < count or self.shift.wraps:
            return token
        # in the graph all the same: every rank takes part in the backward's reduce-scatter
        everywhere = torch.ones((), dtype=torch.bool, device=token.device)
        return token.masked_fill(everywhere, self.shift.fill)

    def extra_repr(self) -> str:
        return f"{self.shift} on {self.axis.name}"
