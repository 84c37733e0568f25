"""What leaves cost: their kernels counted, their seconds and bytes.

Oracles: torch's saved-tensor hooks, closed forms, the same operators outside of a leaf.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import leaf
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators.pricing import Pricer, leaf_seconds
from meshwright.costmodel.rules.leaf import LEAVES, Work, leaf_of
from meshwright.costmodel.sharding.factors import analyse
from meshwright.costmodel.sharding.strategies import strategies
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.cluster import Cluster
from tests.costmodel.memory.saved_tensors import ledger
from tests.helpers.planning import setting_on
from tests.helpers.traced import ROWS, WIDTH, rows, with_forward
from tests.models.leaf_models import LENGTH, Scan, batch, loss_fn, model_of


def leaf_in(graph: Graph) -> Op:
    (op,) = (op for op in graph.ops if op.short in LEAVES)
    return op


def around(part: nn.Module, **more: Any) -> Graph:
    model = with_forward(lambda self, x: self.p0(self.l(x)).sum())
    model.p0 = part
    return trace(model, (rows(WIDTH),), **more)


def scanning() -> Graph:
    return trace(model_of(["scan"]), batch(ROWS), loss_fn=loss_fn, precision="fp32")


def test_work_and_kernels_are_counted_on_one_run() -> None:
    work = leaf_of(leaf_in(scanning())).work
    scan, x = Scan(), torch.rand(ROWS, LENGTH, 32, requires_grad=True)
    with ledger() as kept:
        made = scan(x)["y"]
    assert work.saved_bytes == kept.nbytes([x, made, *scan.parameters()])
    assert work.numel == made.numel()
    # A scan's step: sigmoid, two products, a sum, tanh, a sum; zeros before it, a stack after
    assert leaf_of(leaf_in(scanning())).work.kernels == 6 * LENGTH + 2
    part = leaf(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    work = leaf_of(leaf_in(around(part))).work
    made = work.numel * 4
    assert work.kernels == 2
    assert (work.nbytes, work.taken) == (3 * made, (made, 4 * WIDTH**2))


@pytest.mark.parametrize("rows_run", [2**9, 2**17])
def test_a_leaf_costs_what_its_operators_cost(rows_run: int) -> None:
    """Of a product at many rows: traced at few, the bytes of its weight do not grow."""

    def seconds(part: nn.Module) -> float:
        model = nn.Sequential(nn.Linear(1024, 1024), part)
        graph = trace(model, (torch.empty(8, 1024),) * 2, loss_fn=F.mse_loss, precision="fp32")
        setting = setting_on(Cluster.from_catalog("h100-sxm"), rows=rows_run)
        table = analyse(graph)
        op = next(op for op in graph.ops if op.module == "1")
        (whole, *_) = strategies(graph, table, op, 1)
        cost = Pricer(graph=graph, table=table, setting=setting).op_cost(op, whole)
        return cost.forward_s + cost.backward_s

    kept = leaf(nn.Linear(1024, 1024), rule="b _, _ _, _ -> b _")
    assert seconds(kept) == pytest.approx(seconds(nn.Linear(1024, 1024)), rel=0.3)


def test_declared_numbers_are_taken_and_seconds_follow_them() -> None:
    def made(flops: Any, saved: Any) -> Work:
        part = leaf(nn.Tanh(), flops=flops, saved_bytes=saved)
        return leaf_of(leaf_in(around(part, batch_size=2 * ROWS))).work

    numbers = made(100, 7)
    assert (numbers.flops, numbers.saved_bytes, numbers.source) == (200, 14, "declared")
    shaped = made(lambda x: 3 * x[0], lambda x: x[1])
    assert (shaped.flops, shaped.saved_bytes) == (6 * ROWS, WIDTH)
    device = Cluster.from_catalog("h100-sxm").device
    small = leaf_of(leaf_in(scanning())).work
    small = replace(small, kernels=10, flops=0, nbytes=0, taken=(0,))
    forward = leaf_seconds(device, "bf16", small, 1.0, 0.0)
    assert forward == pytest.approx(10 * device.launch_overhead_s)
