"""One stage on one rank: its lowered blocks, run forward and backward one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from executor.lower import Lowered, block_salt


@dataclass(slots=True, kw_only=True)
class Pass:
    """What a forward leaves for its backward: received inputs and what was sent or is the loss."""

    received: dict[str, torch.Tensor]
    produced: dict[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class StageProgram:
    """The stage's graphs and tensors. `tensors` are parameters (leaves), buffers and constants by
    value name; `sends` are values other stages read; `loss` is set on the last stage; `updates`
    maps buffers to the values that replace them after each micro-batch; `recompute` names the
    blocks run again."""

    prologue: Lowered
    blocks: tuple[Lowered, ...]
    tensors: Mapping[str, torch.Tensor]
    sends: tuple[str, ...]
    loss: str | None
    loss_scale: float
    updates: Mapping[str, str]
    recompute: frozenset[str]
    differentiable: frozenset[str]

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: dict[str, torch.Tensor],
        counts: Mapping[str, torch.Tensor],
        rng: tuple[int, int],
    ) -> Pass:
        """Run one micro-batch. `inputs` are its raw inputs on this rank, `counts` the loss
        denominators."""
        for name, tensor in received.items():
            if name in self.differentiable:
                tensor.requires_grad_()
        values: dict[str, torch.Tensor] = {**self.tensors, **inputs, **received}
        with torch.no_grad():
            made = self.prologue.module(*[values[n] for n in self.prologue.arguments])
        values |= dict(zip(self.prologue.outputs, made, strict=True))
        for block in self.blocks:
            args = [values[n] for n in block.arguments] + [counts[n] for n in block.losses]
            if block.random:
                args.append(self._rng(block.name, rng, args))
            values |= dict(zip(block.outputs, self._run(block, args), strict=True))
        with torch.no_grad():
            for buffer, update in self.updates.items():
                self.tensors[buffer].copy_(values[update])
        kept = (*self.sends, self.loss) if self.loss else self.sends
        return Pass(received=received, produced={n: values[n] for n in kept})

    def _run(self, block: Lowered, args: list[torch.Tensor]) -> Any:
        if block.name in self.recompute:
            return checkpoint(block.module, *args, use_reentrant=False, preserve_rng_state=False)
        return block.module(*args)

    def _rng(self, name: str, rng: tuple[int, int], like: list[torch.Tensor]) -> torch.Tensor:
        seed, row = rng
        device = like[0].device
        return torch.tensor(
            [(seed ^ block_salt(name)) & 0x7FFFFFFF, row], dtype=torch.int64, device=device
        )

    def backward(
        self, done: Pass, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Backpropagate one micro-batch; returns gradients of what was received."""
        roots, seeds = [], []
        for name, tensor in done.produced.items():
            if not tensor.requires_grad:
                continue
            if name == self.loss:
                roots.append(tensor)
                seeds.append(torch.full_like(tensor, self.loss_scale))
            elif name in gradients:
                roots.append(tensor)
                seeds.append(gradients[name])
        if roots:
            torch.autograd.backward(roots, seeds)
        return {
            name: tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for name, tensor in done.received.items()
            if name in self.differentiable
        }
