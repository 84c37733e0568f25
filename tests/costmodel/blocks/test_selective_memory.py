"""What selective recompute repeats and keeps, beside what hooks see."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.costmodel.blocks.selective import selective_ops
from tests.costmodel.blocks.test_block_memory import Stack, graph_of
from tests.costmodel.memory.saved_tensors import ledger, memories, predicted, setup
from tests.helpers.planning import cut
from tests.models.architectures import SEQUENCE


@pytest.mark.parametrize("name", ["gpt2_eager", "gpt2_eager_dropout", "bert_eager_dropout"])
def test_selective_recompute_repeats_scores_and_probabilities(name: str) -> None:
    of = graph_of(name, 4)
    block = of.graph.blocks[1]
    ops = {op.name: op for op in block.ops}
    picked = [ops[op] for op in selective_ops(block, of.graph, of.table)]
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
        of = graph_of(name, 4)
        for block in of.graph.blocks:
            assert not selective_ops(block, of.graph, of.table)


def test_written_out_dropout_of_an_attention_operator_is_repeated() -> None:
    of = graph_of("gpt2_dropout", 4)
    block = of.graph.blocks[1]
    (name,) = selective_ops(block, of.graph, of.table)
    assert {op.name: op.short for op in block.ops}[name] == "scaled_dot_product_attention"


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
        return Stack(*(Core(width, again) for _ in range(layers)))

    of = setup(cut(model(False), batch, F.mse_loss, precision="fp32"))
    graph, table = of.of.graph, of.of.table
    ran = model(True)
    with ledger() as kept:
        F.mse_loss(ran(batch[0]), batch[1])
    saved = sum(
        memory.saved_bytes_repeating(selective_ops(block, graph, table))
        for block, memory in zip(of.blocks, memories(of).values(), strict=True)
    )
    held = dict.fromkeys(value for block in of.blocks for value in block.inputs)
    nbytes = saved + sum(graph.values[value].nbytes for value in held)
    assert nbytes == kept.nbytes([*ran.parameters(), *batch])
    assert nbytes < predicted(of)
