"""Models of transformers, from their configs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from scripts.zoo.from_torchvision import declare_torchvision_operators
from scripts.zoo.registry import (
    IMAGES,
    SMALL,
    VOCAB,
    Built,
    causal_batch,
    entry,
    image_batch,
    masked_batch,
)

Options = Mapping[str, Any]
Make = Callable[[int, int, int], Any]


def transformers_library() -> Any:
    declare_torchvision_operators()  # transformers imports torchvision where it is installed
    return importlib.import_module("transformers")


def built(config: str, model: str, options: Options) -> nn.Module:
    transformers = transformers_library()
    made = getattr(transformers, config)(**options)
    return getattr(transformers, model)(made)


def language(
    name: str,
    stem: str,
    *,
    small: Options,
    published: Options,
    length: int = 2048,
    head: str = "ForCausalLM",
    model: str = "",
    make: Make = causal_batch,
) -> None:
    """A language model `<stem><head>` (or `model`) of a `<stem>Config`; `published` sizes are those
    of its config or paper."""

    @entry(name, "transformers")
    def build(size: str, rows: int) -> Built:
        options = {"vocab_size": VOCAB, **small} if size == SMALL else dict(published)
        made = built(f"{stem}Config", model or f"{stem}{head}", options)
        config: Any = made.config
        vocab = config.get_text_config().vocab_size
        return Built(model=made, batch=make(rows, 16 if size == SMALL else length, vocab))


def vision(
    name: str,
    stem: str,
    *,
    small: Options,
    published: Options,
    side: int = 32,
    published_side: int = 224,
) -> None:
    """An image classifier `<stem>ForImageClassification`."""

    @entry(name, "transformers", IMAGES)
    def build(size: str, rows: int) -> Built:
        options = dict(small) if size == SMALL else dict(published)
        classes = 8 if size == SMALL else 1000
        model = built(
            f"{stem}Config", f"{stem}ForImageClassification", {"num_labels": classes, **options}
        )
        return Built(
            model=model, batch=image_batch(rows, side if size == SMALL else published_side, classes)
        )


def decoder(heads: int = 4, kv_heads: int = 4, layers: int = 4, **more: Any) -> dict[str, Any]:
    """Sizes that most decoder configs spell alike."""
    return {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64, **more,
    }  # fmt: skip


NO_DROPOUT = MappingProxyType({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
BERT_PLAIN = MappingProxyType({
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
})  # fmt: skip

language(
    "GPT-2",
    "GPT2",
    head="LMHeadModel",
    length=1024,
    small={"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, **NO_DROPOUT},
    published={"n_embd": 1600, "n_layer": 48, "n_head": 25},
)
language(
    "Llama 3",
    "Llama",
    small=decoder(kv_heads=2),
    published={
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
)
language(
    "Mistral",
    "Mistral",
    small=decoder(kv_heads=2, sliding_window=8),
    published={"num_hidden_layers": 32, "sliding_window": 4096},
    length=8192,
)
language(
    "Qwen2",
    "Qwen2",
    small=decoder(kv_heads=1),
    published={
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
)
language(
    "Qwen3",
    "Qwen3",
    small=decoder(kv_heads=2, head_dim=16),
    published={
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
language(
    "Gemma 2",
    "Gemma2",
    small=decoder(kv_heads=2, head_dim=16, sliding_window=8),
    published={
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
    },
)
language(
    "Gemma 3",
    "Gemma3Text",
    model="Gemma3ForCausalLM",
    small=decoder(kv_heads=2, head_dim=16, sliding_window=8),
    published={
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
    },
)
language(
    "Phi-3", "Phi3", small=decoder(kv_heads=2, pad_token_id=0), published={"num_hidden_layers": 32}
)
language(
    "OLMo 2",
    "Olmo2",
    small=decoder(),
    published={
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
)
EXPERTS = MappingProxyType({"num_experts_per_tok": 2, "output_router_logits": True})
language(
    "Mixtral",
    "Mixtral",
    small=decoder(kv_heads=2, num_local_experts=4, **EXPERTS),
    published={"num_local_experts": 8, **EXPERTS},
    length=4096,
)
language(
    "Qwen3-MoE",
    "Qwen3Moe",
    small=decoder(kv_heads=2, head_dim=16, num_experts=8, moe_intermediate_size=32, **EXPERTS),
    published={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "output_router_logits": True,
    },
    length=4096,
)
language(
    "DeepSeek-V3",
    "DeepseekV3",
    length=4096,
    small=decoder(
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
    published={},
)
language(
    "GPT-OSS",
    "GptOss",
    length=4096,
    small=decoder(
        kv_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    published={},
)
language(
    "BERT",
    "Bert",
    head="ForMaskedLM",
    length=512,
    make=masked_batch,
    small=BERT_PLAIN,
    published={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
)
language(
    "DeBERTa-v3",
    "DebertaV2",
    head="ForMaskedLM",
    length=512,
    make=masked_batch,
    small={
        **BERT_PLAIN,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "max_position_embeddings": 64,
    },
    published={
        "vocab_size": 128100,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
)
language(
    "T5",
    "T5",
    head="ForConditionalGeneration",
    length=512,
    make=masked_batch,
    small={
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    published={
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 16384,
        "num_layers": 24,
        "num_heads": 32,
        "decoder_start_token_id": 0,
    },
)
language(
    "BART",
    "Bart",
    head="ForConditionalGeneration",
    length=1024,
    make=masked_batch,
    small={
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    published={},
)
language(
    "Mamba-2",
    "Mamba2",
    length=2048,
    small={
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    published={
        "vocab_size": 50288,
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "num_heads": 80,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
    },
)
vision(
    "ViT",
    "ViT",
    small={**BERT_PLAIN, "image_size": 32, "patch_size": 8},
    published={
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
)
vision(
    "Swin",
    "Swin",
    small={
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "drop_path_rate": 0.0,
    },
    published={
        "image_size": 224,
        "embed_dim": 192,
        "depths": [2, 2, 18, 2],
        "num_heads": [6, 12, 24, 48],
        "window_size": 7,
    },
)
