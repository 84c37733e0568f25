"""Blocks of every kind of model: where they are cut, which are alike, what crosses between."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block, class_hash, verify_graph
from meshwright.costmodel.operators.flops import op_flops
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks.cut import crossing, cut_blocks
from meshwright.planner.tracing.trace import trace
from tests.planner.blocks.block_models import MODELS, TRANSFORMERS, classes, cut, names

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
    for k, crossed in enumerate(crossing(graph)):
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
    assert [len(crossed) for crossed in crossing(graph)] == [0, 1, 1, 1]


def test_encoder_decoder() -> None:
    graph = cut("t5")
    encoder = [f"encoder.block.{i}" for i in range(2)]
    decoder = [f"decoder.block.{i}" for i in range(2)]
    assert names(graph) == ["embed", *encoder, "encoder.final_layer_norm", *decoder, "head"]
    between = graph.blocks[3]
    encoded = set(between.outputs) & set(graph.blocks[5].inputs)
    assert len(encoded) == 1
    cuts = crossing(graph)
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
    cuts = crossing(graph)
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


# --- classes -------------------------------------------------------------------------------------


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
