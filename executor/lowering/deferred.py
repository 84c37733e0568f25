"""Weight gradients computed later than input gradients: the W of schedules that split the backward.

In the backward of a product with a weight, I needs the gradient of the input alone, which the stage
before waits for; the gradient of the weight, as much work again, may fill a bubble. A deferred
product hands its operands to a queue instead of computing it, so that nothing is computed twice and
no graph is kept for W: only the product's input and its result's gradient are. Gradients of all
other parameters (norms, embeddings) are small and come out with I.

    linear     y = x wᵀ + b     ∂w = ∂yᵀ x    ∂b = Σ ∂y
    addmm      y = x w + b      ∂w = xᵀ ∂y    ∂b = Σ ∂y
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Gradient = Callable[[], torch.Tensor]


class Later:
    """Queue of weight gradients of the micro-batch whose I runs."""

    def __init__(self) -> None:
        self.items: list[tuple[torch.Tensor, Gradient]] = []

    def take(self) -> list[tuple[torch.Tensor, Gradient]]:
        """What I has put off; the queue is empty after it."""
        taken, self.items = self.items, []
        return taken


def accumulate(
    items: list[tuple[torch.Tensor, Gradient]], made: Callable[[torch.Tensor], None]
) -> None:
    """Compute gradients that were put off, and add each to its leaf's, as autograd would."""
    with torch.no_grad():
        while items:
            leaf, gradient = items.pop(0)
            found = gradient()
            leaf.grad = found if leaf.grad is None else leaf.grad.add_(found)
            made(leaf)


class _Product(torch.autograd.Function):
    """x w, with w as [in, out] or transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        later: Later,
        transposed: bool,
        bias_too: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.leaves, ctx.later = (weight, bias), later
        ctx.transposed, ctx.bias_too = transposed, bias_too
        if transposed:
            return F.linear(x, weight, bias)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), grad, (weight, bias) = ctx.saved_tensors, grads[0], ctx.leaves
        transposed = ctx.transposed

        def of_weight() -> torch.Tensor:
            rows, out = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            return out.t() @ rows if transposed else rows.t() @ out

        if weight.requires_grad:
            ctx.later.items.append((weight, of_weight))
        of_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            if ctx.bias_too:
                ctx.later.items.append((bias, lambda: grad.reshape(-1, grad.shape[-1]).sum(0)))
            else:
                of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        into = None
        if ctx.needs_input_grad[0]:
            into = grad @ (weight if transposed else weight.t())
        return into, None, of_bias, None, None, None


class DeferredProduct(nn.Module):
    """`linear`, `addmm`, `mm` or `matmul` with a weight whose gradient is put off, and with `bias`
    that of the bias, too."""

    def __init__(self, operator: str, later: Later, *, bias: bool) -> None:
        super().__init__()
        self.operator, self.later, self.bias = operator, later, bias

    def forward(self, *args: torch.Tensor | None) -> torch.Tensor:
        if self.operator == "addmm":
            bias, x, weight = args
        else:
            x, weight, bias = (*args, None)[:3]
        transposed = self.operator == "linear"
        return _Product.apply(x, weight, bias, self.later, transposed, self.bias)
