"""The scalars that steps return: a loss whose backward is done, and numbers on their way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.executor.errors import StateError


def with_backward_done(loss: torch.Tensor) -> torch.Tensor:
    """A step's loss, whose `backward()` says what to do instead."""
    loss_done: torch.Tensor = _BackwardIsDone.apply(loss.requires_grad_())  # type: ignore[no-untyped-call]
    return loss_done


class _BackwardIsDone(torch.autograd.Function):
    """A step's loss: `backward()` of it, or of what is made of it, says that it is done."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StateError(
            "train_step has run the backward already, and added the gradients to .grad",
            place="loss.backward()",
            legal="the loss' value",
            way_out="drop this line (and a GradScaler: train_step scales and unscales), and step "
            "the optimizer",
        )


class PendingScalar(torch.Tensor):
    """An fp32 scalar that is waited for when it is first read. `detach()` doesn't read it."""

    _read: Callable[[], torch.Tensor]

    @staticmethod
    def of(read: Callable[[], torch.Tensor]) -> PendingScalar:
        """The scalar that `read` returns, on the host."""
        scalar: PendingScalar = torch.Tensor._make_subclass(PendingScalar, torch.full((), math.nan))
        scalar._read = read
        return scalar

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach and isinstance(args[0], PendingScalar):
            return args[0]
        arguments = pytree.tree_map(
            lambda x: x._read() if isinstance(x, PendingScalar) else x, (args, kwargs or {})
        )
        return func(*arguments[0], **arguments[1])
