"""What is kept of tokens, beside the caches that transformers makes, and by formulas."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from meshwright import MeshwrightError
from meshwright.costmodel.operators import Problem
from meshwright.planner.serving.cache import attentions
from meshwright.profiles.cluster import Cluster
from meshwright.serving import windows_of
from tests.helpers.planning import cut
from tests.planner.serving.served import LATENT, MODELS, SMALL, forwards

ON = Cluster.from_catalog("h100-sxm", devices_per_node=4)
LENGTH = 40


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "grouped", "mistral", "gemma3", "qwen2", "phi", "mixtral"]
)
def test_bytes_are_those_of_the_librarys_cache(name: str) -> None:
    """A forward over 40 tokens in fp32; windows of 24 keep 23, as the next token is in them."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(3, LENGTH, dtype=torch.int64), past_key_values=cache, use_cache=True)
    found = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    assert all(layer.keys.dtype == torch.float32 for layer in cache.layers)
    kept = forwards(name, ON, precision="fp32").attention.values()
    windows = windows_of(model)
    assert [layer.window for layer in kept] == [*windows]
    seen = [layer.tokens(LENGTH) - (layer.window is not None) for layer in kept]
    assert [3 * layer.kept * n for layer, n in zip(kept, seen, strict=True)] == found


def test_heads_of_their_own_take_4blh_bytes() -> None:
    rows, layers, hidden, length = 3, SMALL["num_hidden_layers"], SMALL["hidden_size"], 100
    found = forwards("llama", ON, precision="bf16")
    assert rows * sum(found.kept_bytes(1, length)) == 4 * rows * layers * hidden * length


def test_a_latent_value_is_kept_whole_on_every_rank() -> None:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: the latent numbers and a key of positions."""
    found = forwards("latent", ON)
    each = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert {layer.kept for layer in found.attention.values()} == {each}
    assert found.kept_bytes(4, 10) == found.kept_bytes(1, 10)
    assert sum(found.kept_bytes(1, 10)) == 4 * 2 * each * 10


def test_ranks_keep_their_heads_and_copies_where_there_are_fewer() -> None:
    found = forwards("grouped", ON)  # two heads
    whole, halves, quarters = (sum(found.kept_bytes(tp, 10)) for tp in (1, 2, 4))
    assert whole == 2 * halves == 2 * quarters


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ k.mT).softmax(-1) @ v).sum()


class Ahead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).sum()


def test_attention_that_looks_ahead_is_refused() -> None:
    graph = cut(Ahead(), (torch.zeros(2, 4, 8),)).graph
    with pytest.raises(MeshwrightError, match=r"looks ahead; legal: causal"):
        attentions(graph)


def test_ranks_have_equally_many_heads() -> None:
    found = forwards("grouped", Cluster.from_catalog("h100-sxm", devices_per_node=6))
    assert [tp for tp in (1, 2, 3, 6) if found.legal(tp)] == [1, 2]  # of eight heads


def test_other_attention_is_refused() -> None:
    graph = cut(Eager(), (torch.zeros(2, 4, 8),)).graph
    with pytest.raises(MeshwrightError, match=r"scaled_dot_product_attention.*sdpa"):
        attentions(graph)
    served = forwards("llama", ON)
    assert isinstance(served.problem, Problem)
    with pytest.raises(MeshwrightError, match="3 windows were given for 4 layers"):
        attentions(served.graph, [None] * 3)
