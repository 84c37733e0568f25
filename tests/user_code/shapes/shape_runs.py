"""Steps on batches of other shapes than planned, against one device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright import Cluster, Overrides, auto_parallelize
from tests.parity.parity_reference import difference

ROWS, LENGTH, VOCAB, RANKS = 8, 16, 96, 2
# (rows, tokens): as planned, shorter and odd, longer, seen before, fewer rows, and both
SHAPES = ((8, 16), (8, 13), (8, 24), (8, 16), (8, 13), (6, 16), (4, 20))
MEGATRON: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": "colwise.1",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.wte": "vocab",
    },
    "llama": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.embed_tokens": "vocab",
    },
}
ALONE: Mapping[str, Overrides] = {
    "one": Overrides(num_microbatches=1),
    "2 micro-batches": Overrides(num_microbatches=2, recompute="full"),
}
LAYOUTS: Mapping[str, Overrides] = {
    "dp2": Overrides(dp=2, tp=1, pp=1, num_microbatches=2),
    "zero3": Overrides(dp=2, tp=1, pp=1, zero=3, num_microbatches=1),
    "tp2": Overrides(dp=1, tp=2, pp=1, num_microbatches=1),
    "pp2": Overrides(dp=1, tp=1, pp=2, num_microbatches=4, schedule="1f1b"),
    "pp2 zero-bubble": Overrides(dp=1, tp=1, pp=2, num_microbatches=4, schedule="zb_h1"),
}
# every layout once; shardings are of the model, so tp with both
ON_RANKS = (
    ("gpt2", "dp2"),
    ("gpt2", "tp2"),
    ("gpt2", "pp2 zero-bubble"),
    ("llama", "zero3"),
    ("llama", "tp2"),
    ("llama", "pp2"),
)


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def batch(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Every row begins with some padding, of its own length; labels there are ignored."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length), generator=drawn)
    mask = torch.arange(length) >= torch.arange(rows)[:, None] % 4
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def run(kind: str, overrides: Overrides, ranks: int = 1) -> dict[str, float]:
    """The worst difference of losses, evaluations and gradients over the shapes."""
    model = built(kind)
    alone = copy.deepcopy(model)
    if overrides.tp == 2:
        overrides = dataclasses.replace(overrides, shardings=MEGATRON[kind])
    result = auto_parallelize(
        model,
        Cluster.local(ranks, measure=False),
        example_inputs=batch(4, LENGTH, 0),
        global_batch_size=ROWS,
        precision="fp32",
        overrides=overrides,
    )
    mine = torch.optim.SGD(result.parameters(), lr=0.5)
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    found = {"loss": 0.0, "evaluated": 0.0, "gradient": 0.0}
    for step, (rows, length) in enumerate(SHAPES):
        given = batch(rows, length, step)
        model.eval()
        evaluated = float(result.eval_step(given))
        model.train()
        mine.zero_grad()
        loss = float(result.train_step(given))
        plain.zero_grad()
        wanted = alone(**given).loss
        wanted.backward()
        gradients = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        off = {
            "loss": abs(loss - float(wanted)),
            "evaluated": abs(evaluated - float(wanted)),
            "gradient": difference(result.runtime.full_gradients(), gradients)[0],
        }
        found = {name: max(found[name], off[name]) for name in found}
        mine.step()
        plain.step()
    return found
