"""Factors across a graph: that heads, groups, the batch and copies of tokens are found where nobody
named them; which degrees divide them, counted rank by rank."""

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import leaf
from meshwright.costmodel.graph import Graph, Op, TensorMeta
from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, copies_of, inside_experts
from meshwright.costmodel.sharding.data_axis import data_layout
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.costmodel.sharding.sequence import SequenceFactor
from meshwright.costmodel.sharding.strategies import (
    Placement,
    R,
    can_hold,
    divides,
    largest_part,
    splitting_degrees,
)
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.tracing.trace import trace
from tests.costmodel.traces import analysed
from tests.helpers.tiers import tiered
from tests.helpers.traced import with_forward
from tests.models.experts_models import batch, language_model, token_loss


def parameter(graph: Graph, fqn: str) -> str:
    return next(value for value, name in graph.parameters.items() if name == fqn)


def ops(graph: Graph, short: str) -> list[Op]:
    return [op for op in graph.ops if op.short == short]


def sizes(table: FactorTable, value: str) -> list[list[int]]:
    return [[table.sizes[a] for a in dim] for dim in table.dims[value]]


@pytest.mark.parametrize("leafed", [False, True])
def test_the_batch_goes_on_behind_an_operator_without_a_rule(leafed: bool) -> None:
    """Its rows are sliced again; what has other sizes, or is a weight, stays without a batch."""

    def mixed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.renorm(x, 2, 0, 1.0) @ w, w.sum(0)

    apply = leaf(mixed) if leafed else lambda x, w: (torch.renorm(x, 2, 0, 1.0), w.sum(0))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y, z = apply(self.first(x), self.first.weight)
        return (self.last(y) + z).mean()

    model = with_forward(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 8))
    graph = trace(model, (torch.rand(5, 8),), batch_size=4)
    table = analyse(graph)
    (op,) = ops(graph, "leaf" if leafed else "renorm")
    layout = data_layout(graph, table, 2)
    assert layout.strategies[op.name].name == "replicate" and layout.gathered == (op.key,)
    first, last = ops(graph, "linear")
    for call in (first, last):
        assert layout.strategies[call.name].operands[0] == Placement("S", 0)
        assert not table.has_batch(call.operands[1])
    assert table.has_batch(op.results[0])
    assert not any(table.has_batch(value) for value in op.results[1:])


def test_fused_qkv_is_parts_heads_head_dim_of_each_layers_own() -> None:
    graph, table = analysed("gpt2")
    weight = parameter(graph, "transformer.h.0.attn.c_attn.weight")
    assert sizes(table, weight) == [[16], [3, 4, 4]]
    parts, heads, head_dim = table.dims[weight][1]
    attention = ops(graph, "scaled_dot_product_attention")[0]
    for value in (*attention.operands[:3], *attention.results):
        assert table.dims[value][1] == (heads,)
        assert table.dims[value][3] == (head_dim,)
        assert all(parts not in dim for dim in table.dims[value])
    out = parameter(graph, "transformer.h.0.attn.c_proj.weight")  # contracts the heads
    assert table.dims[out][0][0] == heads
    call = next(op for op in graph.ops if out in op.operands)
    assert any(heads in dim for dim in table.dims[call.operands[1]])
    assert all(heads not in dim for dim in table.dims[call.results[0]])
    weights = [parameter(graph, f"transformer.h.{i}.attn.c_attn.weight") for i in (0, 1)]
    first, second = (table.dims[w] for w in weights)
    assert not set(first[1]) & set(second[1])
    assert first[0] == second[0]  # the residual stream is one


def test_grouped_queries_are_kv_heads_times_group_and_gate_and_up_share_a_factor() -> None:
    graph, table = analysed("llama")
    q, k, v, o = (parameter(graph, f"model.layers.0.self_attn.{n}_proj.weight") for n in "qkvo")
    assert sizes(table, q)[0] == [2, 2, 4]
    assert sizes(table, k)[0] == [2, 4]
    kv_heads, group, _ = table.dims[q][0]
    assert table.dims[k][0][0] == table.dims[v][0][0] == kv_heads
    assert group not in table.dims[k][0]
    assert table.dims[o][1][:2] == (kv_heads, group)
    gate, up, down = (
        parameter(graph, f"model.layers.1.mlp.{n}_proj.weight") for n in ("gate", "up", "down")
    )
    assert table.dims[gate][0] == table.dims[up][0] == table.dims[down][1]  # the hidden factor


NAMES = tiered(("gpt2", "llama", "bert", "t5"), ("gpt2", "llama").__contains__, "two decoders stay")


@pytest.mark.parametrize("name", NAMES)
def test_batch_is_on_every_activation(name: str) -> None:
    graph, table = analysed(name)
    assert table.batch is not None
    assert table.sizes[table.batch] == 5
    made = {r for op in graph.ops for r in op.results}
    with_rows = {value for value in made if graph.values[value].numel % 5 == 0}
    assert len(with_rows) > 0.9 * len(made)  # position embeddings have none
    for value in with_rows:
        assert table.has_batch(value), f"{value}: {graph.values[value].shape}"
    for value in (*graph.parameters, *graph.buffers):
        assert not table.has_batch(value)


def test_the_batch_survives_being_flattened_but_one_row_has_none() -> None:
    graph, table = analysed("gpt2")
    (loss,) = ops(graph, "cross_entropy_loss")
    logits, labels = loss.operands
    assert [table.sizes[a] for a in table.dims[logits][0]] == [5, 6]
    assert table.dims[logits][0] == table.dims[labels][0]
    assert table.find(logits, table.dims[logits][0][1]) == (0, 5)
    batch = (torch.rand(1, 4), torch.rand(1, 4))
    assert analyse(trace(nn.Linear(4, 4), batch, loss_fn=F.mse_loss)).batch is None


@pytest.mark.parametrize("name", NAMES)
def test_atoms_multiply_to_every_dim_and_letters_name_them(name: str) -> None:
    graph, table = analysed(name)
    for value, meta in graph.values.items():
        assert tuple(math.prod(dim) for dim in sizes(table, value)) == meta.shape
    for op in (*graph.derived, *graph.ops):
        made, letters = table.ops[op.name], table.letters[op.name]
        for letter, atoms in letters.items():
            assert math.prod(table.sizes[a] for a in atoms) == made.sizes[letter]
        sides = zip((*op.operands, *op.results), (*made.operands, *made.results), strict=True)
        for value, dims in sides:
            for atoms, names in zip(table.dims[value], dims, strict=True):
                if names and all(made.kinds[n] != "whole" for n in names):
                    assert atoms == tuple(a for n in names for a in letters.get(n, ()))


MOST, MAJOR, MINOR = 12, 2, 4


def table(sizes: dict[int, int], *, alone: bool) -> FactorTable:
    return FactorTable(
        dims={"x": (tuple(sizes),)}, ops={}, letters={}, sizes=sizes, batch=None,
        tokens=SequenceFactor(atom=None), alone=frozenset(sizes) if alone else frozenset(),
    )  # fmt: skip


@pytest.mark.parametrize("size", range(1, MOST))
def test_every_rank_has_a_part_of_what_is_divided(size: int) -> None:
    """An even one; of a factor that stands alone the last part may be smaller, not empty."""
    for degree in range(1, MOST):
        each = largest_part(size, degree)
        assert each * degree >= size > (each - 1) * degree
        parts = [range(size)[k * each : (k + 1) * each] for k in range(degree)]
        even = {len(part) for part in parts} == {each}
        assert divides(table({0: size}, alone=False), 0, degree) == even
        assert divides(table({0: size}, alone=True), 0, degree) == all(map(len, parts))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_an_inner_factor_is_held_where_each_of_the_outer_parts_divides(degree: int) -> None:
    meta = TensorMeta(shape=(MAJOR * MINOR,), dtype=torch.float32)
    graph: Any = SimpleNamespace(values={"x": meta})
    found = table({0: MAJOR, 1: MINOR}, alone=True)
    inner, outer = Placement("S", 0, MAJOR), Placement("S", 0)
    assert can_hold(graph, found, "x", inner, degree) == (MINOR % degree == 0)
    assert can_hold(graph, found, "x", outer, degree) == (MAJOR * MINOR % degree == 0)
    assert can_hold(graph, found, "x", R, degree)
    assert not can_hold(graph, found, "x", Placement("S", 1), degree)


def test_degrees_that_an_error_offers_are_those_that_split() -> None:
    graph, found = analysed("gpt2")
    head = [op for op in graph.ops if op.short in ("linear", "addmm")][-1]
    sizes = found.ops[head.name].sizes
    for letter in ("in", "out"):
        offered = splitting_degrees(graph, found, head, letter, most=MOST)
        size = sizes[letter]
        (atom,) = found.letters[head.name][letter]
        wanted = [d for d in range(2, size + 1) if divides(found, atom, d)]
        assert offered == tuple(wanted[:MOST]) and len(wanted) > 2
    assert splitting_degrees(graph, found, head, "in", most=999)[-1] == sizes["in"]
    assert splitting_degrees(graph, found, head, "no letter") == ()


@cache
def routed() -> Graph:
    return trace(
        language_model("routed", "none"),
        batch(4, 0),
        loss_fn=lambda made, targets: token_loss(made[0], targets) + made[1],
    )


def test_copies_lie_between_dispatch_and_combine_where_no_block_ends() -> None:
    graph = routed()
    table = analyse(graph)
    assert table.copies == copies_of(graph.ops)
    assert table.experts and not table.experts & table.alone  # shared out evenly
    for op in graph.ops:
        inside = table.copies.intersection(op.results)
        assert bool(inside) or op.short != DISPATCH
        assert not inside or op.short != COMBINE
        assert not inside or ".experts" in op.module
    away = 0
    for k, op in enumerate(graph.ops):  # counted along the way
        assert (k in inside_experts(graph.ops)) == bool(away)
        away += (op.short == DISPATCH) - (op.short == COMBINE)
    for block in cut_blocks(graph, table).blocks:
        shorts = [op.short for op in block.ops]
        assert shorts.count(DISPATCH) == shorts.count(COMBINE)
