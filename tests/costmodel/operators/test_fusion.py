"""What stays in registers, by hand, on a layer with two residual connections; chains by definition
on chains drawn at random."""

from collections import OrderedDict
from collections.abc import Mapping
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.operators.fusion import Fusion, fuse, is_free
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.costmodel.sharding.layouts import BlockLayouts
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import setting_on
from tests.helpers.tiers import second_tier

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)).mul(2.0))
        y = self.out(self.norm(x)).mul(0.5)
        return x + torch.softmax(y, -1).flatten(0, 1).view(x.shape)


@cache
def stack() -> tuple[Graph, FactorTable, Block]:
    batch = torch.zeros(4, 3, WIDTH), torch.zeros(4, 3, WIDTH)
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(Layer(), Layer(), Layer())))
    graph = trace(model, batch, loss_fn=F.mse_loss, batch_size=4)
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    return graph, table, next(block for block in graph.blocks if block.name == "layers.1")


def named(found: Fusion) -> tuple[set[str], set[tuple[str, int]], set[str]]:
    """The fusion of the middle layer, by operator and occurrence instead of by name."""
    _, _, block = stack()
    keys = {op.name: op.key.split(":")[1] for op in block.ops}
    made = {op.results[0]: keys[op.name] for op in block.ops}
    return (
        {made[value] for value in found.internal if value in made},
        {(keys[name], i) for name, i in found.free_reads if name in keys},
        {keys[name] for name in found.joined if name in keys},
    )


def test_chains_and_norms_are_one_kernel_each() -> None:
    graph, table, block = stack()
    assert [op.short for op in block.ops if is_free(table, op)] == ["flatten", "view"]
    assert fuse(graph, table, "none") == Fusion()
    assert named(fuse(graph, table, "pointwise")) == (
        {"gelu", "mul#1", "softmax"},
        {("mul", 0), ("softmax", 0), ("add#1", 1)},
        {"mul", "softmax", "add#1"},
    )
    # the norm joins the first addition. Its sum is written all the same: the second addition
    # needs a product that needs the norm
    graph, table, _ = stack()
    assert named(fuse(graph, table, "full")) == (
        {"gelu", "mul#1", "softmax"},
        {("mul", 0), ("layer_norm", 0), ("softmax", 0), ("add#1", 1)},
        {"mul", "layer_norm", "softmax", "add#1"},
    )


def test_the_host_issues_a_fused_kernel_once() -> None:
    graph, table, block = stack()
    on = Cluster.from_catalog("h100-sxm")
    device, found = on.device, fuse(graph, table, "pointwise")
    pricer = Pricer(graph=graph, table=table, setting=setting_on(on, rows=4), fusion=found)
    layouts = BlockLayouts(graph, table, block, 1)
    for op in block.ops:
        issued = 0.0 if op.name in found.joined else 0.5 if is_free(table, op) else 1.0
        (way,) = layouts.options(op)
        assert pricer.op_cost(op, way).forward_host_s == issued * device.host_overhead_s


STEPS = ("relu", "linear", "norm", "skip")


class Chain(nn.Module):
    """Steps on one tensor; "skip" adds the value of two steps before."""

    def __init__(self, steps: tuple[str, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.last = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x, x]
        for step, linear in zip(self.steps, self.parts, strict=True):
            y = made[-1]
            if step == "relu":
                made.append(F.relu(y))
            elif step == "linear":
                made.append(linear(y))
            elif step == "norm":
                made.append(F.layer_norm(y, (WIDTH,)))
            else:
                made.append(y + made[-3])
        return self.last(made[-1])


@second_tier("a layer by hand stays, whose chains end at products, norms and sums")
@settings(max_examples=15)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=7).map(tuple))
def test_chains_fuse_as_far_as_no_product_lies_between(steps: tuple[str, ...]) -> None:
    """Paths enumerated: a read is free if no path from its value passes an operator with a kernel
    of its own; a value is internal if all its reads are free and it stays in its block."""
    graph = trace(Chain(("relu", *steps)), (torch.zeros(2, WIDTH),) * 2, loss_fn=F.mse_loss)
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    for level in ("pointwise", "full"):
        check_fusion(graph, table, level)


def check_fusion(graph: Graph, table: FactorTable, level: str) -> None:
    found = fuse(graph, table, level)
    fused = {"relu", "add", *(["layer_norm"] if level == "full" else [])}

    def reaches(source: str, target: str, makers: Mapping[str, Op]) -> bool:
        return target == source or (
            target in makers and any(reaches(source, v, makers) for v in makers[target].operands)
        )

    def clear(source: str, target: str, makers: Mapping[str, Op]) -> bool:
        """Whether every path from value to value makes only values that fuse."""
        if target == source or target not in makers:
            return True
        op = makers[target]
        passing = [v for v in op.operands if reaches(source, v, makers)]
        return not passing or (op.short in fused and all(clear(source, v, makers) for v in passing))

    for block in graph.blocks:
        makers = {r: op for op in block.ops for r in op.results}
        free = {
            (op.name, i)
            for op in block.ops
            for i, value in enumerate(op.operands)
            if op.short in fused
            and value in makers
            and makers[value].short in fused
            and all(clear(value, v, makers) for v in op.operands if reaches(value, v, makers))
        }
        reads = {
            v: [(op.name, i) for op in block.ops for i, o in enumerate(op.operands) if o == v]
            for v in makers
        }
        assert {r for r in found.free_reads if r[0] in {op.name for op in block.ops}} == free
        for value, at in reads.items():
            inside = bool(at) and set(at) <= free and value not in block.outputs
            assert (value in found.internal) == inside
