"""Blocks of every kind of model: where they are cut, which are alike, what crosses between."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block, Graph, class_hash, verify_graph
from meshwright.costmodel.sharding.factors import analyse
from meshwright.moe import combine, dispatch, grouped_linear
from meshwright.planner.blocks import (
    activations_at_cuts,
    bytes_at_cuts,
    cut_blocks,
    merge_light,
    structural_hash,
    structural_starts,
)
from meshwright.planner.plan.ranges import compress_names
from meshwright.planner.tracing.trace import trace
from tests.helpers.tiers import second_tier
from tests.helpers.traced import with_forward
from tests.parity.parity_cells import graph_of

WIDTH = 16


class NamedUNet(nn.Module):
    """Two levels down, two up, with skip connections, and no containers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 4), (4, 8), (8, 8), (16, 8), (12, 4)]
        convolutions = [nn.Conv2d(i, o, 3, padding=1) for i, o in sizes]
        self.one, self.two, self.mid, self.three, self.four = convolutions
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in (self.one, self.two):
            kept.append(torch.relu(layer(x)))
            x = F.max_pool2d(kept[-1], 2)
        x = torch.relu(self.mid(x))
        for layer in (self.three, self.four):
            x = F.interpolate(x, scale_factor=2)
            x = torch.relu(layer(torch.cat([x, kept.pop()], 1)))
        return self.out(x)


class Functional(nn.Module):
    """Repeats without modules, between a stem and a head of other shapes."""

    def __init__(self, layers: int, head: int = 1) -> None:
        super().__init__()
        weight = lambda i, o: nn.Parameter(torch.randn(i, o))  # noqa: E731
        self.stem = weight(8, WIDTH)
        self.layers = nn.ParameterList(weight(WIDTH, WIDTH) for _ in range(2 * layers))
        self.head = nn.ParameterList(weight(WIDTH, WIDTH) for _ in range(head))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.stem
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + torch.relu(x @ up) @ down
        for weight in self.head:
            x = torch.tanh(x @ weight)
        return x


class Alternating(nn.Module):
    """Two containers in turn, a shared norm between, sums in the parent's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scales = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mixer, scale in zip(self.mixers, self.scales, strict=True):
            x = x + mixer(self.norm(x))
            x = x + scale(self.norm(x))
        return x


class Layers(nn.Module):
    """Linears that run one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class HeavyWeights(Layers):
    """Layers in a container, and a product of weights that takes as long for any batch."""

    def __init__(self) -> None:
        super().__init__(3)
        self.a = nn.Parameter(torch.rand(WIDTH, 2 * WIDTH))
        self.b = nn.Parameter(torch.rand(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ (self.a @ self.b)


def expert(self: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return torch.relu(grouped_linear(rows, self.weight, experts))


def routed(self: Any, x: torch.Tensor) -> torch.Tensor:
    kept, experts = self.router(x).softmax(-1).topk(2)
    rows = dispatch(x, experts)
    for layer in self.layers:
        rows = layer(rows, experts)
    return combine(rows * kept.unsqueeze(-1))


def deep_experts() -> nn.Module:
    """Experts of three layers each, in a container."""
    weights = (nn.Parameter(torch.rand(4, WIDTH, WIDTH)) for _ in range(3))
    layers = nn.ModuleList(with_forward(expert, weight=weight) for weight in weights)
    return with_forward(routed, router=nn.Linear(WIDTH, 4), layers=layers)


class HeavyHead(Layers):
    """Most of the layers in a container, but heavy ones after it that have names of their own."""

    def __init__(self) -> None:
        super().__init__(8)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(super().forward(x))))))


class Beside(Layers):
    """Linears that run beside each other on what comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([torch.relu(layer(x)) for layer in self.layers]).mean(0)


def groups(make: Callable[[], nn.Module]) -> nn.Module:
    """Containers in containers, none of which is most of the model."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = group(x)
        return x

    return with_forward(forward, groups=nn.ModuleList(make() for _ in range(3)))


def stack(layers: int) -> nn.Sequential:
    pairs = ((nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*(module for pair in pairs for module in pair))


PIXELS = (torch.rand(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long))
VECTORS = (torch.rand(6, WIDTH), torch.rand(6, WIDTH))
STEMMED = (torch.rand(6, 8), VECTORS[1])
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], Any]] = {
    "unet by name": (NamedUNet, PIXELS, F.cross_entropy),
    "functional": (lambda: Functional(5), STEMMED, F.mse_loss),
    "functional, no repeat": (lambda: Functional(0, 2), STEMMED, F.mse_loss),
    "alternating": (Alternating, VECTORS, F.mse_loss),
    "sequential": (lambda: nn.Sequential(stack(3), nn.Linear(WIDTH, WIDTH)), VECTORS, F.mse_loss),
    "root sequential": (lambda: stack(6), VECTORS, F.mse_loss),
    "heavy head": (HeavyHead, VECTORS, F.mse_loss),
    "groups": (lambda: groups(lambda: Layers(4)), VECTORS, F.mse_loss),
    "pairs": (lambda: groups(lambda: Layers(2)), VECTORS, F.mse_loss),
    "branches": (lambda: groups(lambda: Beside(4)), VECTORS, F.mse_loss),
    "one layer": (lambda: nn.Linear(WIDTH, WIDTH), VECTORS, F.mse_loss),
}

# blocks; of each, its class; its operators; the activations that cross the cut before it
CUTS = {
    "gpt2_tied": ("embed transformer.h.0-2 head", "01112", "3 35 35 35 5", "01111"),
    "llama": ("embed model.layers.0-2 head", "01112", "1 47 47 47 9", "01111"),
    "bert": ("embed bert.encoder.layer.0-2 head", "01112", "6 21 21 21 6", "01111"),
    "t5": (
        "embed encoder.block.0-1 encoder.final_layer_norm decoder.block.0-1 head",
        "0123456", "1 38 35 7 60 57 10", "0121231",
    ),
    "resnet": ("embed layer1.0-1 layer2.0-1 head", "011234", "4 7 7 9 7 5", "011111"),
    "unet": ("embed down.0-1 middle.c1 up.0-1 head", "0123456", "1 7 7 8 8 6 2", "0123211"),
    "unet by name": ("block.0-5", "012345", "2 3 3 4 4 2", "012321"),
    "functional": ("block.0-6", "0111112", "1 4 4 4 4 4 3", "0111111"),
    "functional, no repeat": ("block.0-2", "012", "1 2 3", "011"),
    # sums of the parent belong to the layer before them
    "alternating": (
        "embed mixers.0 scales.0 mixers.1 scales.1 mixers.2 scales.2 head",
        "01232345", "1 3 3 3 3 3 2 1", "01222221",
    ),
    "sequential": ("0.0 0.2 0.4 head", "0112", "2 2 2 2", "0111"),
    "root sequential": ("block.0-6", "0111112", "2 2 2 2 2 2 1", "0111111"),
    "heavy head": ("layers.0-7 head.0-2", "01111111112", "2 2 2 2 2 2 2 2 2 2 2", "01111111111"),
    # a row of equal layers in a container is opened; the first one's input asks for no gradient
    "groups": (
        "groups.0.layers.0-3 groups.1.layers.0-3 groups.2.layers.0-3 head",
        "0111111111112", "2 2 2 2 2 2 2 2 2 2 2 2 1", "0111111111111",
    ),
    # few layers, and parallel ones, stay together
    "pairs": ("groups.0-2 head", "0112", "4 4 4 1", "0111"),
    "branches": ("groups.0-2 head", "0112", "11 11 11 1", "0111"),
    "one layer": ("block.0", "0", "2", "0"),
}  # fmt: skip


@cache
def cut(name: str) -> Graph:
    if name not in MODELS:
        return graph_of(name, 4).graph
    make, inputs, loss_fn = MODELS[name]
    graph = trace(make(), inputs, loss_fn=loss_fn)
    return cut_blocks(graph, analyse(graph))


@pytest.mark.parametrize("name", CUTS)
def test_where_models_are_cut(name: str) -> None:
    graph = cut(name)
    numbers: dict[str, int] = {}
    found = (
        " ".join(compress_names([block.name for block in graph.blocks])),
        "".join(str(numbers.setdefault(b.class_id, len(numbers))) for b in graph.blocks),
        " ".join(str(len(block.ops)) for block in graph.blocks),
        "".join(str(len(crossing)) for crossing in activations_at_cuts(graph)),
    )
    assert found == CUTS[name]


# --- what holds for every model ------------------------------------------------------------------


@pytest.mark.parametrize("name", CUTS)
def test_blocks_partition_the_operators_and_declare_every_operand(name: str) -> None:
    graph = cut(name)
    verify_graph(graph)
    raw = {*graph.inputs, *graph.constants, *(r for op in graph.derived for r in op.results)}
    made: set[str] = set()
    for block in graph.blocks:
        inner = {r for op in block.ops for r in op.results}
        read = {n for op in block.ops for n in op.operands} - inner
        declared = (*block.inputs, *block.derived, *block.parameters, *block.buffers)
        assert read == set(declared)
        assert len(set(declared)) == len(declared)
        assert set(block.inputs) <= made
        assert set(block.derived) <= raw
        assert set(block.outputs) <= inner
        made |= set(block.outputs)
    wanted = {n for block in graph.blocks for n in block.inputs}
    kept = {graph.loss, *graph.updates.values()} - raw
    assert made == wanted | kept
    for k, crossed in enumerate(activations_at_cuts(graph)):
        before = {n for block in graph.blocks[:k] for n in block.outputs}
        assert set(crossed) == before & {n for block in graph.blocks[k:] for n in block.inputs}


def cut_at(model: nn.Module, rows: int) -> tuple[Block, ...]:
    batch = torch.rand(2, 6, WIDTH)
    graph = trace(model, (batch,), loss_fn=lambda y: y.square().mean(), batch_size=rows)
    return cut_blocks(graph, analyse(graph)).blocks


def test_work_is_compared_at_the_same_rows_and_one_instance_is_no_container() -> None:
    few, many = ([b.name for b in cut_at(HeavyWeights(), rows)] for rows in (2, 64))
    assert few == many == ["layers.0", "layers.1", "layers.2", "head.0", "head.1"]
    assert not any("layers" in block.name for block in cut_at(Layers(1), 64))


def test_copies_of_tokens_come_home_before_a_block_ends() -> None:
    blocks = cut_at(deep_experts(), 8)
    (inside,) = (b for b in blocks if any(op.short == "grouped_linear" for op in b.ops))
    assert [op.short for op in inside.ops].count("grouped_linear") == 3
    assert "combine" in [op.short for op in inside.ops]


def test_cuts_at_another_batch_size_are_the_same() -> None:
    """With `like`, whatever the work says; where operators differ, it is ignored."""
    graph, other = cut("sequential"), cut("root sequential")
    again = cut_blocks(dataclasses.replace(graph, blocks=()), analyse(graph), like=graph)
    assert again.blocks == graph.blocks
    merged = dataclasses.replace(graph.blocks[0], ops=graph.ops[:4])
    like = dataclasses.replace(graph, blocks=(merged, *graph.blocks[2:]))
    found = cut_blocks(dataclasses.replace(graph, blocks=()), analyse(graph), like=like)
    assert [(b.name, len(b.ops)) for b in found.blocks] == [("0.0", 4), ("0.4", 2), ("head", 2)]
    assert cut_blocks(graph, analyse(graph), like=other).blocks == graph.blocks


# --- classes: the hash sees shapes and wiring, not numbers ----------------------------------------


def _linear(width: int, scale: float, grad: bool = True, exact: bool = False) -> str:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    model[1].requires_grad_(grad)
    batch = (torch.rand(3, width), torch.rand(3, width))
    graph = trace(model, batch, loss_fn=lambda y, t: F.mse_loss(y * scale, t))
    return class_hash(graph, cut_blocks(graph, analyse(graph)).blocks[-1], exact=exact)


@second_tier("classes of blocks stay where models are cut, and of their wiring")
def test_class_ignores_numbers_but_not_shapes() -> None:
    base = _linear(8, 0.25)
    assert _linear(8, 1e-05) == _linear(8, -2.0) == base
    assert _linear(10, 0.25) != base != _linear(8, 0.25, grad=False)
    assert _linear(8, 0.25, exact=True) != _linear(8, 0.5, exact=True)


def test_class_sees_the_wiring() -> None:
    """x·x + y and x·y + x are the same operators on the same shapes."""

    def wired(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, y = self.a(x), self.b(x)
        return (x * y + x if self.crossed else x * x + y).sum()

    graphs = [
        trace(
            with_forward(wired, a=nn.Linear(4, 4), b=nn.Linear(4, 4), crossed=crossed),
            (torch.rand(3, 4),),
        )
        for crossed in (True, False)
    ]
    ids = [cut_blocks(g, analyse(g)).blocks[-1].class_id for g in graphs]
    assert ids[0] != ids[1]


# --- cuts from the operator graph alone, against definitions written out --------------------------

LAYERS = 6


@cache
def graph() -> Graph:
    return trace(Functional(LAYERS), STEMMED, loss_fn=F.mse_loss, repeats=False)


def test_bytes_at_cuts_are_made_before_and_read_after() -> None:
    ops = graph().ops
    for i, nbytes in enumerate(bytes_at_cuts(graph())):
        made = {r for op in ops[:i] for r in op.results}
        read = {name for op in ops[i:] for name in op.operands}
        assert nbytes == sum(graph().values[name].nbytes for name in made & read)


def test_layers_have_one_hash_and_the_first_operator_another() -> None:
    """After the stem a layer is two products, an activation and a sum."""
    ops = graph().ops
    hashes = {structural_hash(graph(), ops[1 + 4 * k : 5 + 4 * k]) for k in range(LAYERS)}
    assert len(hashes) == 1
    assert structural_hash(graph(), ops[:4]) not in hashes


def test_each_period_of_a_repeat_is_a_block() -> None:
    work = [float(op.short == "matmul") for op in graph().ops]
    sizes = [b - a for a, b in itertools.pairwise(sorted(structural_starts(graph(), work)))]
    assert sizes.count(4) >= LAYERS - 1


def test_runs_without_work_join_the_block_before_them() -> None:
    starts = {0: "a", 2: "b", 3: "c", 5: "d"}
    load = [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert merge_light(starts, load, set()) == {0: "b", 5: "d"}
    assert merge_light(starts, load, {3}) == {0: "b", 3: "c", 5: "d"}
