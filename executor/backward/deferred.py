"""Weight gradients computed later than input gradients: the W of schedules that split the backward.

In the backward of a product with a weight, I needs the gradient of the input alone, which the stage
before waits for; the gradient of the weight, as much work again, may fill a bubble. A deferred
product hands its operands to a queue instead of computing it, so that nothing is computed twice and
no graph is kept for W: only the product's input and its output's gradient are; of an input that is
made again for the backward not even that is, but what it is made of (`repeated.later`). Gradients
of all other parameters (norms, embeddings) are small and computed with I.

    linear     y = x wᵀ + b     ∂w = ∂yᵀ x    ∂b = Σ ∂y
    addmm      y = x w + b      ∂w = xᵀ ∂y    ∂b = Σ ∂y
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.costmodel.precisions import TENSOR
from meshwright.costmodel.rules import TRAITS
from meshwright.executor.backward import eight_bits
from meshwright.executor.backward.repeated import Later, later


class DeferredGradient(NamedTuple):
    """A leaf, what computes its gradient, and what of that is made again first."""

    leaf: torch.Tensor
    compute: Callable[[], torch.Tensor]
    reads: Later | None = None


class WeightGradientQueue:
    """Weight gradients deferred by the I that runs, in the order of the backward."""

    def __init__(self) -> None:
        self.items: list[DeferredGradient] = []

    def take(self) -> list[DeferredGradient]:
        """Remove and return the gradients of one micro-batch."""
        taken, self.items = self.items, []
        return taken


def accumulate(
    deferred: list[DeferredGradient], after_accumulate: Callable[[torch.Tensor], None]
) -> None:
    """Compute deferred gradients, add each to its leaf's `.grad` as autograd would, and call
    `after_accumulate` with the leaf. Empties the list. What one reads is gathered beside the one
    before it."""
    with torch.no_grad():
        while deferred:
            for item in deferred[:2]:
                if item.reads is not None:
                    item.reads.start()
            leaf, compute, _ = item = deferred.pop(0)
            gradient = compute()
            del compute, item
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
            after_accumulate(leaf)


class _Product(torch.autograd.Function):
    """The product x w of x (.., in) and w (in, out), or (out, in) if `transposed`, whose backward
    queues the weight's gradient, and the bias' if `defer_bias`; in 8 bits unless `by` is
    None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        queue: WeightGradientQueue,
        transposed: bool,
        defer_bias: bool,
        by: str | None,
    ) -> torch.Tensor:
        ctx.later = later(x)
        if ctx.later is None:
            ctx.save_for_backward(x)
        ctx.leaves = weight, bias
        ctx.queue = queue
        ctx.transposed = transposed
        ctx.defer_bias = defer_bias
        ctx.by = by
        if by is not None:
            return eight_bits.forward(x, weight, bias, transposed=transposed, by=by)
        if transposed:
            product: torch.Tensor = F.linear(x, weight, bias)
        else:
            product = x @ weight if bias is None else torch.addmm(bias, x, weight)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reads, ctx.later = ctx.later, None
        # with its graph it would hold what the stage received, and its gradient
        saved = () if reads else tuple(x.detach() for x in ctx.saved_tensors)
        (grad,) = grads
        weight, bias = ctx.leaves
        transposed, by = ctx.transposed, ctx.by
        narrow = eight_bits.Gradient(grad.reshape(-1, grad.shape[-1]), by or TENSOR)

        def weight_gradient() -> torch.Tensor:
            x: torch.Tensor = reads.read() if reads else saved[0]
            if by is not None:
                return eight_bits.of_w(narrow, x, transposed=transposed)
            rows, out = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            left, right = (out, rows) if transposed else (rows, out)
            return torch.mm(left.t(), right)

        def bias_gradient() -> torch.Tensor:
            return grad.reshape(-1, grad.shape[-1]).sum(0)

        if weight.requires_grad:
            ctx.queue.items.append(DeferredGradient(weight, weight_gradient, reads))
        of_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            if ctx.defer_bias:
                ctx.queue.items.append(DeferredGradient(bias, bias_gradient))
            else:
                of_bias = bias_gradient()
        of_input = None
        if ctx.needs_input_grad[0] and by is not None:
            of_input = eight_bits.of_x(narrow, weight, grad.shape, transposed=transposed)
            narrow.once = None  # until it is wanted, 16 bits are kept
        elif ctx.needs_input_grad[0]:
            of_input = grad @ (weight if transposed else weight.t())
        return of_input, None, of_bias, None, None, None, None


_product: Callable[..., torch.Tensor] = _Product.apply


class DeferredProduct(nn.Module):
    """`linear`, `addmm`, `mm` or `matmul` whose backward defers the weight's gradient, and the
    bias' with `defer_bias`; in 8 bits where `by` says how they are scaled."""

    def __init__(
        self, operator: str, queue: WeightGradientQueue, *, defer_bias: bool, by: str | None = None
    ) -> None:
        super().__init__()
        product = TRAITS[operator].product
        assert product is not None
        self.product = product
        self.queue = queue
        self.defer_bias = defer_bias
        self.by = by

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        at = self.product
        bias = args[at.bias] if len(args) > 2 else None
        x, weight = args[at.x], args[at.weight]
        return _product(x, weight, bias, self.queue, at.transposed, self.defer_bias, self.by)
