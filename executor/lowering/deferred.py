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

from meshwright.costmodel.rules.traits import TRAITS

Gradient = Callable[[], torch.Tensor]


class Later:
    """Queue of weight gradients of the micro-batch whose I runs."""

    def __init__(self) -> None:
        self.items: list[tuple[torch.Tensor, Gradient]] = []

    def take(self) -> list[tuple[torch.Tensor, Gradient]]:
        """The weight gradients that I has put off; the queue is empty after it."""
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
            made: torch.Tensor = F.linear(x, weight, bias)
        else:
            made = x @ weight if bias is None else torch.addmm(bias, x, weight)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), grad, (weight, bias) = ctx.saved_tensors, grads[0], ctx.leaves
        transposed = ctx.transposed

        def of_weight() -> torch.Tensor:
            rows, out = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            left, right = (out, rows) if transposed else (rows, out)
            return torch.mm(left.t(), right)

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


_product: Callable[..., torch.Tensor] = _Product.apply


class DeferredProduct(nn.Module):
    """A product of two dims with a weight whose gradient is put off, and with `bias` that of the
    bias, too."""

    def __init__(self, operator: str, later: Later, *, bias: bool) -> None:
        super().__init__()
        product = TRAITS[operator].product
        assert product is not None
        self.product, self.later, self.bias = product, later, bias

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        at = self.product
        bias = args[at.bias] if len(args) > 2 else None
        x, weight = args[at.x], args[at.weight]
        return _product(x, weight, bias, self.later, at.transposed, self.bias)
