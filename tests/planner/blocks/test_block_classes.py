"""Classes of blocks: the structural hash sees shapes and wiring, not numbers."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block, class_hash
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.tracing.trace import trace


def _linear(width: int, scale: float, grad: bool = True) -> Block:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    model[1].requires_grad_(grad)
    batch = (torch.rand(3, width), torch.rand(3, width))
    graph = trace(model, batch, loss_fn=lambda y, t: F.mse_loss(y * scale, t))
    block = cut_blocks(graph, analyse(graph)).blocks[-1]
    return dataclasses.replace(block, class_id=class_hash(graph, block, exact=False))


def test_class_ignores_numbers_but_not_shapes() -> None:
    base = _linear(8, 0.25)
    assert _linear(8, 1e-05).class_id == base.class_id
    assert _linear(8, -2.0).class_id == base.class_id
    assert _linear(10, 0.25).class_id != base.class_id
    assert _linear(8, 0.25, grad=False).class_id != base.class_id


def test_exact_class_sees_numbers() -> None:
    found = set()
    for scale in (0.25, 0.5):
        graph = trace(
            nn.Linear(4, 4), (torch.rand(3, 4),), loss_fn=lambda y, s=scale: (y * s).sum()
        )
        block = cut_blocks(graph, analyse(graph)).blocks[0]
        found.add(class_hash(graph, block, exact=True))
    assert len(found) == 2


def test_class_sees_the_wiring() -> None:
    """x·x + y and x·y + x are the same operators on the same shapes."""

    class Wired(nn.Module):
        def __init__(self, crossed: bool) -> None:
            super().__init__()
            self.a, self.b, self.crossed = nn.Linear(4, 4), nn.Linear(4, 4), crossed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, y = self.a(x), self.b(x)
            return (x * y + x if self.crossed else x * x + y).sum()

    graphs = [trace(Wired(crossed), (torch.rand(3, 4),)) for crossed in (True, False)]
    ids = [cut_blocks(g, analyse(g)).blocks[-1].class_id for g in graphs]
    assert ids[0] != ids[1]
