"""Replicas that train apart, on one device, by the words of DiLoCo's algorithm (2311.08105)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.helpers import tiny

ROWS, LR = 8, 1e-2
Weights = dict[str, torch.Tensor]


def in_blocks(x: torch.Tensor, block: int = 256) -> torch.Tensor:
    """A flat tensor rounded to 127 steps of the largest of each run of elements."""
    parts = []
    for part in x.split(block):
        scale = part.abs().max() / 127
        parts.append((part / scale).round() * scale if scale else torch.zeros_like(part))
    return torch.cat(parts)


@dataclass(slots=True, kw_only=True)
class Alone:
    """R inner loops and the outer step of torch's own SGD, with Nesterov's momentum, on the weights
    of `fragments`: lists of names, the j-th at steps of its own."""

    replicas: int
    every: int
    fragments: Sequence[Sequence[str]]
    lr: float = 0.7
    momentum: float = 0.9
    bits: int = 32
    tied: bool = False
    skips: frozenset[tuple[int, int]] = frozenset()  # (replica, step) without an optimizer's step
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    outer: Weights = field(default_factory=dict)
    steppers: list[torch.optim.SGD] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.models = [tiny.net(tied=self.tied) for _ in range(self.replicas)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=LR) for m in self.models]
        named = dict(self.models[0].named_parameters())
        self.outer = {name: nn.Parameter(x.detach().clone()) for name, x in named.items()}
        for names in self.fragments:
            outer = [self.outer[name] for name in names]
            self.steppers.append(
                torch.optim.SGD(outer, lr=self.lr, momentum=self.momentum, nesterov=True)
                if self.momentum
                else torch.optim.SGD(outer, lr=self.lr)
            )

    def step(self, batch: Sequence[torch.Tensor]) -> list[float]:
        """A step of every replica on its rows, and the meetings after it."""
        losses = []
        for r, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            ids, targets = (x.chunk(self.replicas)[r] for x in batch)
            optimizer.zero_grad()
            loss = tiny.loss(model(ids), targets)
            loss.backward()
            if (r, self.steps) not in self.skips:
                optimizer.step()
            losses.append(float(loss))
        self.steps += 1
        for j in range(len(self.fragments)):
            if (self.steps - j * self.every // len(self.fragments)) % self.every == 0:
                self.meet(j)
        return losses

    def meet(self, j: int) -> None:
        names = self.fragments[j]
        changes = []
        for model in self.models:
            here = dict(model.named_parameters())
            flat = torch.cat([(self.outer[n] - here[n]).detach().flatten() for n in sorted(names)])
            changes.append(in_blocks(flat) if self.bits == 8 else flat)
        mean, at = torch.stack(changes).mean(0), 0
        for name in sorted(names):
            size = self.outer[name].numel()
            self.outer[name].grad = mean[at : at + size].view(self.outer[name].shape)
            at += size
        self.steppers[j].step()
        with torch.no_grad():
            for model in self.models:
                for name, x in model.named_parameters():
                    if name in names:
                        x.copy_(self.outer[name])

    def weights(self, replica: int) -> Weights:
        return {n: x.detach().clone() for n, x in self.models[replica].named_parameters()}


def all_names(tied: bool = False) -> list[str]:
    return [name for name, _ in tiny.net(tied=tied).named_parameters()]


def nearly(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Every tensor of the two is the same but for rounding."""
    for name, x in wanted.items():
        off = float((found[name].detach() - x.detach()).abs().max())
        assert off <= 1e-5, (name, off)


def planned(world: int, **options: Any) -> Any:
    """The tiny model under a plan with replicas, on ranks that run."""
    tied = options.pop("tied", False)
    model = options.pop("model", None) or tiny.net(tied=tied)
    return tiny.planned(model, world, **{"global_batch_size": ROWS, "profile": False, **options})


def copies(x: Mapping[str, torch.Tensor]) -> Weights:
    return {name: copy.deepcopy(value.detach()) for name, value in x.items()}
