"""What the field knows about splitting models, found by the program without being told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.sharding.layouts import BlockLayouts
from meshwright.costmodel.sharding.strategies import Placement, Strategy
from meshwright.planner.drafts.mesh import Mesh
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import (
    Recorder,
    Traced,
    cluster,
    communication,
    cut,
    large_bert,
    large_gpt2,
    large_llama,
    linears,
    programs_of,
)

H100 = Cluster.from_catalog("h100-sxm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The cheapest assignment of all blocks as one stage, by operator key, and what it moves."""

    of: Traced
    strategies: Mapping[str, Strategy]
    moves: Mapping[str, Recorder]


def solve(
    of: Traced, on: Cluster = H100, *, tp: int = 8, rows: float = 2, m: int = 8, mode: str = "lean"
) -> Solved:
    programs = programs_of(of, on)
    setting = programs.coster.setting(Mesh(dp=1, tp=tp), rows=rows, microbatches=m)
    chain = programs.chain(setting, mode)
    assert chain is not None
    chosen: dict[str, Strategy] = {}
    moves: dict[str, Recorder] = {}
    at: dict[str, Placement] = {}
    found = chain.assignments(0, len(of.graph.blocks))
    for block in of.graph.blocks:
        assignment = found[block.name]
        chosen |= {op.key: assignment.strategies[op.name] for op in block.ops}
        layouts = BlockLayouts(of.graph, of.table, block, tp)
        moves[block.name] = communication(programs.coster.pricer(setting), layouts, assignment, at)
        at |= {v: assignment.states[v] for v in block.outputs}
    return Solved(of=of, strategies=chosen, moves=moves)


def named(found: Solved, pattern: str) -> list[str]:
    """Names of the strategies of operators whose key matches, in order."""
    return [s.name for key, s in found.strategies.items() if re.fullmatch(pattern, key)]


def test_a_perceptron_is_split_by_columns_then_rows() -> None:
    of = wide_perceptron()
    for mode in ("fast", "lean"):
        found = solve(of, rows=64, mode=mode)
        assert named(found, ".*(up|down):linear") == ["colwise", "rowwise"]
        recorders = found.moves.values()
        assert [sum(r.all_reduces()[k] for r in recorders) for k in (0, 1)] == [1.0, 1.0]


@cache
def wide_perceptron() -> Traced:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(8192))  # the input needs a gradient
            self.up, self.down = nn.Linear(8192, 32768), nn.Linear(32768, 8192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x * self.scale)))

    with torch.device("meta"):
        return cut(Wide(), (torch.empty(64, 8192), torch.empty(64, 8192)), F.mse_loss)


def test_fused_attention_is_split_by_heads() -> None:
    """`colwise.1` of c_attn divides the heads inside each of the parts q, k and v."""
    found = solve(large_gpt2())
    for k in range(2):
        layer = rf"transformer\.h\.{k}\.attn"
        assert named(found, rf"{layer}\.c_attn:addmm") == ["colwise.1"]
        assert named(found, rf"{layer}.*:scaled_dot_product_attention") == ["heads"]
        assert named(found, rf"{layer}\.c_proj:addmm")[0].startswith("rowwise")
        fused = found.strategies[f"transformer.h.{k}.attn.c_attn:addmm"]
        assert fused.results == (Placement("S", 1, 3),)


@pytest.mark.parametrize(
    ("model", "prefix", "q_k_v"),
    [
        (large_llama, r"model\.layers\.\d\.self_attn", "[qkv]_proj"),
        (large_bert, r"bert\.encoder\.layer\.\d\.attention", r"self\.(query|key|value)"),
    ],
)
def test_separate_attention_is_split_by_heads(
    model: Callable[[], Traced], prefix: str, q_k_v: str
) -> None:
    found = solve(model())
    assert [name.split(".")[0] for name in named(found, rf"{prefix}\.{q_k_v}:linear")] == (
        ["colwise"] * 6
    )
    assert named(found, rf"{prefix}.*:scaled_dot_product_attention") == ["heads"] * 2
    out = named(found, rf"{prefix}\.(o_proj|output\.dense):linear")
    assert [name.split(".")[0] for name in out] == ["rowwise"] * 2


@pytest.mark.parametrize("model", [large_gpt2, large_llama, large_bert])
def test_a_layer_costs_four_all_reduces(model: Callable[[], Traced]) -> None:
    """Two forward and two backward, whether as all-reduces or over the sequence as reduce-scatters
    with all-gathers."""
    found = solve(model())
    layers = [r for name, r in found.moves.items() if name[-1].isdigit()]
    assert [r.all_reduces() for r in layers] == [(2.0, 2.0)] * 2


def test_logits_of_a_tied_head_are_never_gathered() -> None:
    found = solve(large_gpt2())
    assert named(found, r"transformer\.wte:embedding") == ["vocab"]
    assert named(found, "lm_head:linear") == ["colwise"]
    loss = next(s for key, s in found.strategies.items() if "cross_entropy_loss" in key)
    assert loss.implementation == "cross_entropy"
    assert loss.operands[0].sharded
    vocabulary = {v for v, meta in found.of.graph.values.items() if 50304 in meta.shape[1:]}
    moved = {value for recorder in found.moves.values() for value, _, _ in recorder.moved}
    assert vocabulary
    assert not vocabulary & moved


@pytest.mark.parametrize("layers", [2, 3, 4, 6])
def test_wide_layers_on_few_rows_take_one_all_reduce_each_but_the_first(layers: int) -> None:
    """Alpa's figure: columns and rows in turn, an all-reduce after each pair in each direction. By
    what is computed and sent, that is: without tiles to fill and switches that reduce."""
    plain = cluster(4, flops=1e15, memory_bandwidth=3e12, bandwidth=4e11, latency_s=1e-6)
    found = solve(linears(8192, layers, 64), plain, tp=4, rows=64, m=1, mode="fast")
    assert sum(sum(r.all_reduces()) for r in found.moves.values()) == layers - 1


def test_over_slow_wires_nothing_is_split() -> None:
    slow = cluster(4, flops=1e15, memory_bandwidth=1e15, bandwidth=1e6)
    found = solve(linears(8192, 2, 64), slow, tp=4, rows=64, mode="fast")
    assert named(found, ".*:linear") == ["replicate", "replicate"]
    assert sum(sum(r.all_reduces()) for r in found.moves.values()) == 0
