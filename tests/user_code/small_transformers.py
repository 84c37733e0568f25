"""GPT-2 and Llama of two layers, with Megatron's shardings of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCAB = 96
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
