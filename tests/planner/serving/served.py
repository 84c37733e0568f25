"""Small causal language models, and prices of their forwards on plain clusters."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from meshwright.planner.serving import Forwards
from meshwright.profiles.cluster import Cluster
from meshwright.serving import forwards_of

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "max_position_embeddings": 256,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 4,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=4, n_head=8, vocab_size=96, n_positions=256)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "grouped": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=24)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SMALL, num_key_value_heads=2, head_dim=8, sliding_window=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SMALL, num_key_value_heads=4)
    ),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    ),
    "latent": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**SMALL, **LATENT, num_key_value_heads=8)
    ),
}  # fmt: skip


def forwards(name: str, on: Cluster, *, length: int = 8, **given: Any) -> Forwards:
    with torch.device("meta"):
        model = MODELS[name]()
    ids = torch.zeros(2, length, dtype=torch.int64)
    return forwards_of(model, on, example_inputs={"input_ids": ids, "labels": ids}, **given)
