"""Seconds of forwards: by hand where memory alone takes time, and where products alone do."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.planner.serving import Asked, Servings
from meshwright.planner.serving.price import COMPUTED, STREAMED
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster
from tests.planner.serving.served import MODELS, SMALL, forwards

BANDWIDTH = 1e6


def of_memory(devices: int = 1) -> Cluster:
    """Products and messages take no time, and nothing is launched."""
    made = cluster(devices, flops=1e30, memory_bandwidth=BANDWIDTH, bandwidth=1e8)
    return dataclasses.replace(made, device=dataclasses.replace(made.device, memory_bytes=1 << 40))


def test_a_token_reads_all_weights_but_the_table_and_what_is_kept() -> None:
    """Bytes of bf16 over the bandwidth, all of which these products reach, and for what is kept
    over the part of it that is reached; activations of one row beside them."""
    on = of_memory()
    served = Servings(forwards("llama", on, precision="bf16"), Asked(prompt=100, new=29))
    weights = sum(p.numel() for p in MODELS["llama"]().parameters())
    weights -= SMALL["vocab_size"] * SMALL["hidden_size"]  # one row of it is looked up
    read_s = 2 * weights / BANDWIDTH
    kept_s = sum(served.forwards.kept_bytes(1, 129)) / (STREAMED * BANDWIDTH)
    found = served.priced(1, 1, 1).token_s
    assert read_s + kept_s < found < 1.1 * (read_s + kept_s)
    # of eight rows the weights are read once
    eight = served.priced(1, 1, 8).token_s
    assert read_s + 8 * kept_s < eight < read_s + 8 * kept_s + 8 * 0.1 * (read_s + kept_s)


def test_a_tensor_axis_reads_its_part() -> None:
    alone, both = (
        Servings(forwards("llama", of_memory(2), precision="bf16"), Asked(prompt=100, new=29))
        .priced(tp, 1, 1)
        .token_s
        for tp in (1, 2)
    )
    assert both == pytest.approx(alone / 2, rel=0.1)


def test_tied_weights_lie_on_a_stage_once() -> None:
    found, blocks = forwards("gpt2", of_memory(), precision="bf16"), MODELS["gpt2"]()
    last = len(found.graph.blocks)
    whole = 2 * sum(p.numel() for p in blocks.parameters())
    assert found.weight_bytes(1, 0, last) == whole
    table = 2 * blocks.transformer.wte.weight.numel()
    both = found.weight_bytes(1, 0, last // 2) + found.weight_bytes(1, last // 2, last)
    assert both == whole + table  # two stages hold it


def test_prompts_take_their_products() -> None:
    """Two FLOPs for each weight of a layer and token, and attention's; logits of the last token."""
    flops = 1e6
    on = cluster(1, flops=flops, memory_bandwidth=1e30, bandwidth=1e30)
    served = Servings(forwards("llama", on, precision="bf16"), Asked(prompt=64, new=1))
    sizes = {n: p.numel() for n, p in MODELS["llama"]().named_parameters() if p.ndim == 2}
    head, table = sizes.pop("lm_head.weight"), sizes.pop("model.embed_tokens.weight")
    assert head == table
    layers, hidden = SMALL["num_hidden_layers"], SMALL["hidden_size"]
    products = 2 * (64 * sum(sizes.values()) + head)
    attention = layers * 4 * hidden * 64 * 64 / 2
    found = served.priced(1, 1, 1).first_s
    assert (products + attention) / flops == pytest.approx(found, rel=0.02)


def test_logits_are_made_of_the_last_token_of_each_row() -> None:
    """The head's weights are read once, and multiplied by as many tokens as there are rows."""
    served = Servings(forwards("llama", of_memory(), precision="bf16"), Asked(prompt=64, new=1))
    head_s = sum(block.head_s for block in served.forwards.blocks(1, 1.0))
    table = 2 * SMALL["vocab_size"] * SMALL["hidden_size"]
    assert head_s == pytest.approx(table / BANDWIDTH, rel=0.1)
    body_s = sum(block.body_s for block in served.forwards.blocks(1, 64.0))
    read_s = sum(served.forwards.attention_s(1, 1, 64, 64))
    assert served.priced(1, 1, 1).first_s == pytest.approx(body_s + head_s + read_s)


def test_experts_without_a_token_are_not_read() -> None:
    """Of four experts one token chooses two: 1 − (3/4)² of them on average."""
    on = of_memory()
    served = forwards("mixtral", on, precision="bf16")
    few, many = (sum(x.body_s for x in served.blocks(1, tokens)) for tokens in (1.0, 1e4))
    experts = sum(p.numel() for n, p in MODELS["mixtral"]().named_parameters() if "experts" in n)
    others = sum(
        p.numel() for n, p in MODELS["mixtral"]().named_parameters()
        if "experts" not in n and p.ndim == 2 and "embed" not in n and "lm_head" not in n
    )  # fmt: skip
    read = 2 * ((1 - (3 / 4) ** 2) * experts / STREAMED + others) / BANDWIDTH
    assert read < few < 1.2 * read  # activations beside weights
    assert many > few


def test_few_rows_go_by_streaming_and_many_as_in_training() -> None:
    served = forwards("llama", Cluster.from_catalog("h100-sxm", devices_per_node=1))
    per_token = [
        sum(x.body_s for x in served.blocks(1, tokens)) / tokens for tokens in (1.0, 16.0, 4096.0)
    ]
    assert per_token[0] > 4 * per_token[1]
    assert per_token[1] > per_token[2]
    assert 0 < COMPUTED < 1
