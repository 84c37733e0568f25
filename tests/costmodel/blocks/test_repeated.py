"""Which operators recompute policies repeat, against all sets there are; what is kept, beside what
hooks see."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.costmodel.blocks.memory import BlockMemory
from meshwright.costmodel.blocks.policies import PARTIAL
from meshwright.costmodel.blocks.repeated import least_kept, repeated_ops
from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.memory.storage import Storage
from tests.costmodel.blocks.test_block_memory import stack
from tests.costmodel.memory.saved_tensors import ledger, memories, predicted, setup
from tests.costmodel.traces import graph_of
from tests.helpers.planning import cut
from tests.models.architectures import SEQUENCE
from tests.models.models import Traced


def again(policy: str, block: Block, of: Traced) -> list[Op]:
    """The operators of a block that a policy repeats."""
    return [block.ops[k] for k in sorted(repeated_ops(block, of.graph, of.table)[policy])]


# --- the cut --------------------------------------------------------------------------------------


@st.composite
def memories_and_costs(draw: st.DrawFn) -> tuple[BlockMemory, dict[str, int]]:
    """Up to seven operators that each read some values before them and make one or two."""
    values = [Storage(float(draw(st.integers(1, 9))), "input")]
    entering, makers, reads = set(values), {}, {}
    for k in range(draw(st.integers(1, 7))):
        name = f"op{k}"
        reads[name] = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2)))
        for _ in range(draw(st.integers(1, 2))):
            made = Storage(float(draw(st.integers(1, 9))))
            makers[made] = name
            values.append(made)
    kept = frozenset(draw(st.sets(st.sampled_from(values))))
    outside = frozenset(entering | draw(st.sets(st.sampled_from(values), max_size=1)))
    memory = BlockMemory(kept=kept, leaving={}, outside=outside, makers=makers, reads=reads)
    may = draw(st.sets(st.sampled_from(sorted(reads))))
    return memory, {name: draw(st.integers(0, 6)) for name in sorted(may)}


@given(memories_and_costs())
def test_no_set_of_operators_keeps_less_for_its_cost(
    given: tuple[BlockMemory, dict[str, int]],
) -> None:
    memory, costs = given

    def price(names: Collection[str]) -> float:
        return memory.saved_bytes_repeating(names) + sum(costs[name] for name in names)

    sets = itertools.chain.from_iterable(
        itertools.combinations(sorted(costs), count) for count in range(len(costs) + 1)
    )
    found = least_kept(memory, costs)
    assert found <= costs.keys()
    assert price(found) == min(map(price, sets))
    # a cheaper repeat is no reason to repeat less
    assert found <= least_kept(memory, {name: cost // 2 for name, cost in costs.items()})


@pytest.mark.parametrize("name", ["gpt2_tied", "llama", "bert_eager_dropout", "moe", "t5"])
def test_each_policy_keeps_no_more_than_the_one_before(name: str) -> None:
    of = setup(graph_of(name))
    for block, memory in zip(of.blocks, memories(of).values(), strict=True):
        names = [
            {op.name for op in again(policy, block, of.of)}
            for policy in PARTIAL
            if policy != "alternate"
        ]
        kept = [memory.saved_bytes, *map(memory.saved_bytes_repeating, names)]
        assert all(a <= b for a, b in itertools.pairwise(names))
        assert all(a >= b for a, b in itertools.pairwise(kept))


def test_products_are_repeated_by_what_they_make() -> None:
    """Of Llama's: gate and up widen, and the last product's result is nobody's."""
    of = graph_of("llama")
    block = of.graph.blocks[1]
    made = {policy: {op.key for op in again(policy, block, of)} for policy in PARTIAL}
    products = {
        policy: {key.split(":")[0].rsplit(".", 1)[-1] for key in keys if key.endswith(":linear")}
        for policy, keys in made.items()
    }
    assert products["pointwise"] == set()
    assert products["widening"] >= {"gate_proj", "up_proj"}
    assert "down_proj" not in products["products"]
    assert any(key.endswith("act_fn:silu") for key in made["pointwise"])


# --- attention that is written out ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2_eager", "gpt2_eager_dropout", "bert_eager_dropout"])
def test_selective_recompute_repeats_scores_and_probabilities(name: str) -> None:
    of = graph_of(name)
    block = of.graph.blocks[1]
    picked = again("selective", block, of)
    squares = {op.short for op in picked}
    assert {"matmul", "softmax"} <= squares
    assert ("dropout" in squares) == name.endswith("dropout")
    assert not squares & {"linear", "addmm", "gelu", "layer_norm"}
    assert all(
        of.graph.values[v].shape[-2:] == (SEQUENCE, SEQUENCE) for op in picked for v in op.results
    )
    assert sum(op.short == "matmul" for op in picked) == 1


def test_fused_attention_and_convolutions_are_not_repeated() -> None:
    for name in ("gpt2_tied", "resnet", "mlp"):
        of = graph_of(name)
        for block in of.graph.blocks:
            assert not again("selective", block, of)


def test_written_out_dropout_of_an_attention_operator_is_repeated() -> None:
    of = graph_of("gpt2_dropout")
    block = of.graph.blocks[1]
    (op,) = again("selective", block, of)
    assert op.short == "scaled_dot_product_attention"


class Core(nn.Module):
    """Attention of one head, run again in the backward if asked to."""

    def __init__(self, width: int, again: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.again = again

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(1, 2)) * 0.1).softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.q(x), self.k(x), self.v(x)
        mixed = checkpoint(self.core, *qkv, use_reentrant=False) if self.again else self.core(*qkv)
        return x + self.o(mixed)


def test_repeated_operators_keep_what_a_checkpoint_around_them_keeps() -> None:
    """The product that reads the probabilities keeps its other operand either way."""
    width, layers = 16, 3
    batch = torch.randn(4, 24, width), torch.randn(4, 24, width)

    def model(again: bool) -> nn.Module:
        return stack(*(Core(width, again) for _ in range(layers)))

    of = setup(cut(model(False), batch, F.mse_loss, precision="fp32"))
    graph = of.of.graph
    ran = model(True)
    with ledger() as kept:
        F.mse_loss(ran(batch[0]), batch[1])
    saved = sum(
        memory.saved_bytes_repeating({op.name for op in again("selective", block, of.of)})
        for block, memory in zip(of.blocks, memories(of).values(), strict=True)
    )
    held = dict.fromkeys(value for block in of.blocks for value in block.inputs)
    nbytes = saved + sum(graph.values[value].nbytes for value in held)
    assert nbytes == kept.nbytes([*ran.parameters(), *batch])
    assert nbytes < predicted(of)
