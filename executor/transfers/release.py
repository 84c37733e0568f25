"""Release of sent values: a stage's backward needs the graph behind an output, not its values.

Autograd starts a backward at a tensor of the right shape, whatever its memory holds; so the memory
of an output is given back once its messages have left, if nobody else has it: its operator may
have saved it, another operator of the stage, or a stage on the same rank. The stage therefore
hands out another tensor on the same memory, and whoever else has that memory is seen by a count.
"""

from __future__ import annotations

from typing import Any

import torch

ALONE = 2  # uses of a memory that one tensor has: the tensor's, and that of whoever asks


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data  # `detach()` would keep hold of x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def handed(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of x, with its gradient, that may be released once x is gone."""
    handed_on: torch.Tensor = _Handed.apply(x)  # type: ignore[no-untyped-call]
    return handed_on


def release(x: torch.Tensor) -> bool:
    """Give back the memory of a tensor made by `handed`, if no other tensor has it; whether that is
    so. The tensor keeps its shape and its place in autograd's graph."""
    storage = x.untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) > ALONE:
        return False
    storage.resize_(0)
    return True
