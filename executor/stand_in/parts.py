"""Parts that are read of tensors which `fully_shard` divides among ranks.

It cuts every parameter into as many parts as there are ranks and takes its own, and the size of the
first. Among a thousand ranks, on tensors without values, making the others takes longer than all of
the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param  # private


class Parts(Sequence[torch.Tensor]):
    """A tensor in `count` parts along a dim, as `torch.chunk` cuts it, each made when it is asked
    for; those beyond its end are empty."""

    def __init__(self, full: torch.Tensor, count: int, dim: int) -> None:
        self.whole, self.number, self.dim = full, count, dim
        self.length = full.size(dim)
        self.each = -(-self.length // count)

    def __len__(self) -> int:
        return self.number

    @overload
    def __getitem__(self, k: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, k: int | slice) -> Any:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(self.number))]
        if not 0 <= k < self.number:
            raise IndexError(k)
        start = k * self.each
        if self.length and start >= self.length:
            return self.whole.new_empty(0)
        return self.whole.narrow(self.dim, start, min(self.each, self.length - start))


@contextmanager
def parts_on_demand() -> Iterator[None]:
    """Context in which `fully_shard` makes only the parts that it reads."""
    module: Any = _fsdp_param
    cut = module._chunk_with_empty
    module._chunk_with_empty = lambda tensor, num_chunks, dim: Parts(tensor, num_chunks, dim)
    try:
        yield
    finally:
        module._chunk_with_empty = cut
