"""Writes into memory, assigned buffers and regions of the traced program, as plain values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced import WIDTH, agree, rows, run, with_forward

from planner.functional import overload
from planner.trace import trace


def _residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    y += self.l(torch.relu_(self.l(x)))
    return y.square().sum()


def _rows_and_columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).clone()
    y[:, 0] = 0
    y[..., 1:] = y[..., :-1].clone()
    y[0].mul_(2.0)
    y[1:, 2].fill_(3.0)
    return y.square().sum()


def _through_views(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).clone()
    flat, turned = y.view(-1), y.t()
    flat.mul_(2.0)
    turned[1].add_(x[:, 1])
    y.permute(1, 0).unsqueeze(0).mul_(3.0)
    return (y * flat.view(y.shape) * turned.t()).sum()


def _masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).clone()
    y[y > 0.1] = 1.0
    return y.masked_fill_(x > 0.5, 0.0).square().sum()


def _copied(self: Any, x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(x.shape[0], 2 * WIDTH)
    out[:, :WIDTH] = self.l(x)
    out[:, WIDTH:].copy_(x.double())
    return out.square().sum()


@pytest.mark.parametrize(
    "forward", [_residual, _rows_and_columns, _through_views, _masked, _copied]
)
def test_writes_become_values(forward: Callable[..., torch.Tensor]) -> None:
    graph = agree(with_forward(forward), (rows(WIDTH),))
    assert not [op.target for op in graph.ops if overload(op.target)._schema.is_mutable]


def test_assigned_and_written_buffers_are_updates() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.steps.add_(1)
        return (y - self.mean).square().sum()

    def prepare(self: nn.Module) -> None:
        self.register_buffer("mean", torch.rand(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    model, batch = with_forward(forward, prepare), (rows(WIDTH),)
    graph = trace(model, batch)
    values = run(graph, model, batch)
    eager = copy.deepcopy(model)
    eager(*batch)
    updated = {graph.buffers[b]: values[new] for b, new in graph.updates.items()}
    assert updated.keys() == {"mean", "steps"}
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(updated[name], buffer)


def test_no_grad_regions_are_opened() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.l(x)
            target.relu_()
            with torch.enable_grad():
                kept = self.l(x)
        return (self.l(x) - target).square().sum() + kept.sum()

    graph = agree(with_forward(forward), (rows(WIDTH),))
    flows = [graph.values[op.results[0]].requires_grad for op in graph.ops[:3]]
    assert flows == [False, False, True]


def test_autocast_regions_become_casts() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.relu(self.l(x))
            with torch.autocast("cpu", enabled=False):
                y = self.l(y.float())
            return F.mse_loss(self.l(y), x)

    graph = agree(with_forward(forward), (rows(WIDTH),))
    linears = [op for op in graph.ops if op.short == "linear"]
    dtypes = [graph.values[op.results[0]].dtype for op in linears]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
