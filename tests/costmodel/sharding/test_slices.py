"""Token slices: the models that may be cut so, and why others may not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import FactorTable, analyse, slice_layout, why_not_sliced
from meshwright.planner.tracing.trace import trace
from tests.costmodel.sharding.test_sequence import (
    LENGTH,
    WIDTH,
    WORDS,
    Head,
    cropped,
    decoder,
    last,
    loss,
    mixed,
    padded,
    rolled,
    summed,
)
from tests.costmodel.traces import analysed
from tests.helpers.traced import with_forward
from tests.parity.parity_cells import graph_of


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def attending(net: nn.Module, tokens: Tensor, labels: Tensor, **given: Any) -> Tensor:
    q, k, v = map(heads, net.parts(net.embed(tokens)).chunk(3, -1))
    x = F.scaled_dot_product_attention(q, k, v, **given)
    return net.words(x.transpose(1, 2).flatten(2))


def causal(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(attending(net, tokens, labels, is_causal=True), labels)


def open_ended(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(attending(net, tokens, labels), labels)


def masked(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    return loss(attending(net, tokens, labels, attn_mask=mask), labels)


def dropping(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(attending(net, tokens, labels, is_causal=True, dropout_p=0.1), labels)


def averaged(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    x = net.embed(tokens)
    return loss(net.words(x - x.mean(1, keepdim=True)), labels)


def weighed(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    x = net.embed(tokens)
    return loss(net.words(x.softmax(1)), labels)


def squared(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Of a mean, which slices have parts of."""
    return loss(net.words(net.embed(tokens)), labels) ** 2


def penalised(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """With a term that no token is in, which counts once."""
    return loss(net.words(net.embed(tokens)), labels) + 0.1 * net.words.weight.square().sum()


def counting(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    net.steps.add_(1)
    return loss(net.words(net.embed(tokens)), labels)


def of_head(head: Head) -> tuple[Graph, FactorTable]:
    with torch.device("meta"):
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        parts: dict[str, nn.Module] = {
            "embed": nn.Embedding(WORDS, WIDTH), "words": nn.Linear(WIDTH, WORDS),
        }  # fmt: skip
        if head in (causal, open_ended, masked, dropping):
            parts["parts"] = nn.Linear(WIDTH, 3 * WIDTH)
        net = with_forward(head, **parts)
        if head is counting:
            net.register_buffer("steps", torch.zeros((), dtype=torch.long))
        graph = trace(net, (ids, ids))
    return graph, analyse(graph)


@pytest.mark.parametrize("head", [causal, padded, penalised])
def test_what_depends_on_earlier_tokens_through_causal_attention_is_sliced(head: Head) -> None:
    graph, table = of_head(head)
    assert why_not_sliced(graph, table) == ""
    layout = slice_layout(graph, table)
    assert layout.states[graph.loss].kind == "P" and not layout.zigzag


@pytest.mark.parametrize("case", ["gpt2_tied", "llama", "llama_lora"])
def test_decoders_are_sliced(case: str) -> None:
    of = graph_of(case, 4)
    assert why_not_sliced(of.graph, of.table) == ""


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (open_ended, "is attention that is not causal by itself"),
        (masked, "is attention that is not causal by itself"),
        (dropping, "needs whole sequences"),
        (averaged, "needs whole sequences"),
        (weighed, "needs whole sequences"),
        (squared, "needs whole sequences"),
        (counting, "each forward writes 1 of the model's buffers"),
    ],
)
def test_what_reads_other_tokens_is_not(head: Head, why: str) -> None:
    assert why in why_not_sliced(*of_head(head))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (mixed, "needs tokens of the next slice, or the one before"),
        (rolled, "needs tokens of the next slice, or the one before"),
        (cropped, "needs whole sequences"),
        (last, "needs whole sequences"),
        (summed, "cumsum needs whole sequences"),
    ],
)
def test_nor_is_what_moves_tokens(head: Head, why: str) -> None:
    assert why in why_not_sliced(*decoder(head))


def test_nor_are_models_without_one_sequence() -> None:
    assert "inputs without one sequence dim" in why_not_sliced(*analysed("t5"))
    resnet = graph_of("resnet", 4)
    assert "no input has a sequence dim" in why_not_sliced(resnet.graph, resnet.table)
