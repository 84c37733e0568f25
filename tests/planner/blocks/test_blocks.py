"""Blocks of every kind of model: where they are cut, which are alike, what crosses between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block, Graph, verify_graph
from meshwright.costmodel.operators.flops import op_flops
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks.cut import activations_at_cuts, cut_blocks
from meshwright.planner.tracing.trace import trace
from tests.helpers.traced import hugging_face

WIDTH = 16


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.norm = nn.BatchNorm2d(outputs)
        self.down: nn.Module = nn.Identity()
        if inputs != outputs:
            self.down = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += self.down(x)
        return torch.relu_(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.layer1 = nn.Sequential(*(Residual(4, 4, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1), Residual(8, 8, 1))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(F.max_pool2d(self.stem(x), 2)))
        return self.fc(x.mean((2, 3)))


class UNet(nn.Module):
    """Two levels down, two up, with skip connections; as containers or by names of their own."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named
        sizes = [(3, 4), (4, 8), (8, 8), (16, 8), (12, 4)]
        convolutions = [nn.Conv2d(i, o, 3, padding=1) for i, o in sizes]
        if named:
            self.one, self.two, self.mid, self.three, self.four = convolutions
        else:
            self.down = nn.ModuleList(convolutions[:2])
            self.mid = convolutions[2]
            self.up = nn.ModuleList(convolutions[3:])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = (self.one, self.two) if self.named else self.down
        up = (self.three, self.four) if self.named else self.up
        kept = []
        for layer in down:
            kept.append(torch.relu(layer(x)))
            x = F.max_pool2d(kept[-1], 2)
        x = torch.relu(self.mid(x))
        for layer in up:
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


class HeavyHead(nn.Module):
    """Most of the layers in a container, but heavy ones after it that have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Group(nn.Module):
    """Linears that run one after the other, or beside each other on what comes in."""

    def __init__(self, count: int, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.members = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel:
            return x + torch.stack([torch.relu(member(x)) for member in self.members]).mean(0)
        for member in self.members:
            x = torch.relu(member(x))
        return x


class Groups(nn.Module):
    """Containers in containers, none of which is most of the model."""

    def __init__(self, count: int, parallel: bool) -> None:
        super().__init__()
        self.groups = nn.ModuleList(Group(count, parallel) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = group(x)
        return x


def stack(layers: int) -> nn.Sequential:
    pairs = ((nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*(module for pair in pairs for module in pair))


IMAGE = (torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
PIXELS = (torch.rand(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long))
VECTORS = (torch.rand(6, WIDTH), torch.rand(6, WIDTH))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], Any]] = {
    "resnet": (ResNet, IMAGE, F.cross_entropy),
    "unet": (lambda: UNet(named=False), PIXELS, F.cross_entropy),
    "unet by name": (lambda: UNet(named=True), PIXELS, F.cross_entropy),
    "functional": (lambda: Functional(5), (torch.rand(6, 8), VECTORS[1]), F.mse_loss),
    "functional, no repeat": (lambda: Functional(0, 2), (torch.rand(6, 8), VECTORS[1]), F.mse_loss),
    "alternating": (Alternating, VECTORS, F.mse_loss),
    "sequential": (lambda: nn.Sequential(stack(3), nn.Linear(WIDTH, WIDTH)), VECTORS, F.mse_loss),
    "root sequential": (lambda: stack(6), VECTORS, F.mse_loss),
    "heavy head": (HeavyHead, VECTORS, F.mse_loss),
    "groups": (lambda: Groups(4, parallel=False), VECTORS, F.mse_loss),
    "pairs": (lambda: Groups(2, parallel=False), VECTORS, F.mse_loss),
    "branches": (lambda: Groups(4, parallel=True), VECTORS, F.mse_loss),
    "one layer": (lambda: nn.Linear(WIDTH, WIDTH), VECTORS, F.mse_loss),
}
TRANSFORMERS = ("gpt2", "llama", "bert", "t5")


@cache
def cut(name: str) -> Graph:
    if name in TRANSFORMERS:
        model, batch = hugging_face(name)
        graph = trace(model, batch)
    else:
        make, inputs, loss_fn = MODELS[name]
        graph = trace(make(), inputs, loss_fn=loss_fn)
    return cut_blocks(graph, analyse(graph))


def names(graph: Graph) -> list[str]:
    return [block.name for block in graph.blocks]


def classes(blocks: Sequence[Block]) -> int:
    return len({block.class_id for block in blocks})


# --- what holds for every model ------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TRANSFORMERS, *MODELS])
def test_blocks_partition_the_operators(name: str) -> None:
    graph = cut(name)
    verify_graph(graph)
    assert all(block.ops for block in graph.blocks)
    assert len(set(names(graph))) == len(graph.blocks)


@pytest.mark.parametrize("name", [*TRANSFORMERS, *MODELS])
def test_every_operand_of_a_block_is_declared(name: str) -> None:
    graph = cut(name)
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


@pytest.mark.parametrize("name", [*TRANSFORMERS, *MODELS])
def test_crossing_is_what_is_made_before_and_read_after(name: str) -> None:
    graph = cut(name)
    for k, crossed in enumerate(activations_at_cuts(graph)):
        made = {n for block in graph.blocks[:k] for n in block.outputs}
        read = {n for block in graph.blocks[k:] for n in block.inputs}
        assert set(crossed) == made & read


@pytest.mark.parametrize("name", [*TRANSFORMERS, *MODELS])
def test_no_block_is_most_of_the_model(name: str) -> None:
    graph = cut(name)
    table = analyse(graph)
    work = [sum(op_flops(table, op) for op in block.ops) for block in graph.blocks]
    products = [sum(op_flops(table, op) > 0 for op in block.ops) for block in graph.blocks]
    for load, count in zip(work, products, strict=True):
        assert count <= 1 or load <= 0.5 * sum(work)
    light = sum(load == 0 for load in work)
    assert light <= 3, "an embedding, something between containers, a loss"


# --- what each model should come out as ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("gpt2", "transformer.h"), ("llama", "model.layers"), ("bert", "bert.encoder.layer")],
)
def test_transformers(name: str, prefix: str) -> None:
    graph = cut(name)
    assert names(graph) == ["embed", f"{prefix}.0", f"{prefix}.1", "head"]
    assert classes(graph.blocks[1:3]) == 1
    assert classes(graph.blocks) == 3
    assert [len(crossed) for crossed in activations_at_cuts(graph)] == [0, 1, 1, 1]


def test_encoder_decoder() -> None:
    graph = cut("t5")
    encoder = [f"encoder.block.{i}" for i in range(2)]
    decoder = [f"decoder.block.{i}" for i in range(2)]
    assert names(graph) == ["embed", *encoder, "encoder.final_layer_norm", *decoder, "head"]
    between = graph.blocks[3]
    encoded = set(between.outputs) & set(graph.blocks[5].inputs)
    assert len(encoded) == 1
    cuts = activations_at_cuts(graph)
    assert encoded <= set(cuts[4]) and encoded <= set(cuts[5])
    assert not encoded & set(cuts[6])


def test_resnet() -> None:
    graph = cut("resnet")
    layers = [f"layer{i}.{k}" for i in (1, 2) for k in range(3)]
    assert names(graph) == ["embed", *layers, "head"]
    kinds = [block.class_id for block in graph.blocks]
    assert kinds[1] == kinds[2] == kinds[3]
    assert kinds[5] == kinds[6]
    assert classes(graph.blocks) == 5
    assert all(len(block.buffers) == 2 for block in graph.blocks[1:-1])


@pytest.mark.parametrize("name", ["unet", "unet by name"])
def test_skip_connections_cross_directly(name: str) -> None:
    graph = cut(name)
    assert len(graph.blocks) >= 5
    activations = [op.results[0] for op in graph.ops if op.short == "relu"]
    cuts = activations_at_cuts(graph)
    outer, inner = activations[:2]
    assert sum(outer in crossed for crossed in cuts) >= 3
    assert any(outer in crossed and inner in crossed for crossed in cuts)
    assert max(len(crossed) for crossed in cuts) <= 3


def test_containers_of_a_unet_and_what_is_between() -> None:
    assert names(cut("unet")) == ["down.0", "down.1", "mid", "up.0", "up.1", "head"]


def test_repeats_are_found_without_modules() -> None:
    graph = cut("functional")
    assert len(graph.blocks) == 7
    assert classes(graph.blocks[1:6]) == 1
    assert classes(graph.blocks) == 3
    assert [op.short for op in graph.blocks[1].ops] == ["matmul", "relu", "matmul", "add"]
    assert [op.short for op in graph.blocks[6].ops] == ["matmul", "tanh", "mse_loss"]


def test_a_plain_chain_is_cut_by_work() -> None:
    graph = cut("functional, no repeat")
    assert [block.ops[0].short for block in graph.blocks] == ["matmul"] * 3


def test_sequential_layers() -> None:
    assert names(cut("sequential")) == ["0.0", "0.2", "0.4", "head"]
    graph = cut("root sequential")
    assert len(graph.blocks) == 7
    assert classes(graph.blocks[1:6]) == 1


def test_a_row_of_equal_layers_in_a_container_is_opened() -> None:
    graph = cut("groups")
    assert names(graph) == [
        *(f"groups.{i}.members.{j}" for i in range(3) for j in range(4)),
        "head",
    ]
    assert classes(graph.blocks[1:-1]) == 1  # the first one's input asks for no gradient


@pytest.mark.parametrize("name", ["pairs", "branches"])
def test_few_layers_and_parallel_ones_stay_together(name: str) -> None:
    assert names(cut(name)) == ["groups.0", "groups.1", "groups.2", "head"]


def test_sums_of_the_parent_belong_to_the_layer_before() -> None:
    graph = cut("alternating")
    layers = [f"{kind}.{i}" for i in range(3) for kind in ("mixers", "scales")]
    assert names(graph) == ["embed", *layers, "head"]
    assert [[op.short for op in graph.blocks[i].ops] for i in (5, 6, 7)] == [
        ["linear", "add", "layer_norm"],
        ["linear", "add"],
        ["mse_loss"],
    ]


def test_a_heavy_head_is_cut() -> None:
    graph = cut("heavy head")
    layers = [f"layers.{i}" for i in range(8)]
    assert names(graph) == [*layers, "head.0", "head.1", "head.2"]
    assert classes(graph.blocks[1:8]) == 1
