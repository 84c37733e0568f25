"""Segments of a stage's blocks: forwards that keep what enters, and run again in the backward.

The forward of a segment builds no graph. Its backward runs it once more with one, on the same
values and random states, and goes back through that at once. Gradients of parameters that one block
alone reads arrive at their leaves; others are among what enters, so that autograd adds up what all
their readers make before it is a leaf's. What the blocks keep then is their own policies' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Run: TypeAlias = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, differentiable: Sequence[bool], _: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        made = run(given)
        plain = [x for x, own in zip(made, differentiable, strict=True) if not own]
        ctx.mark_non_differentiable(*plain)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            made = ctx.run(given)
        pairs = [(x, g) for x, g in zip(made, grads, strict=True) if g is not None]
        roots, seeds = [x for x, _ in pairs], [g for _, g in pairs]
        del made, pairs
        torch.autograd.backward(roots, seeds)
        return None, None, None, *(x.grad for x in given)


def run_segment(
    run: Run, differentiable: Sequence[bool], given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The results of `run(given)`, of which those have a gradient that are `differentiable`, and
    whose backward runs it again. Parameters are read by `run` itself."""
    # parameters may have gradients where no input has
    anchor = torch.empty(0, requires_grad=True)
    made: tuple[torch.Tensor, ...] = _Again.apply(run, differentiable, anchor, *given)  # type: ignore[no-untyped-call]
    return made
