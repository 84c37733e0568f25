"""Zigzag: of a sequence in 2n chunks, rank r has the chunks r and 2n-1-r, so that causal scores are
equal work for all (`costmodel/sharding/context_axis.py`)."""

from __future__ import annotations

import torch

from meshwright.costmodel.sharding import Placement

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
