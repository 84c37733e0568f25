"""Models of seven families on meta, of sizes at which weights and activations both matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

META = torch.device("meta")
VOCABULARY = 8192
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to make a model, and two rows of its batch."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, torch.Tensor]]


def _on_meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        with META:
            return make()

    return made


def _tokens(length: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(2, length, dtype=torch.int64, device=META)
    return {"input_ids": ids, "labels": ids}


def _gpt(**dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=6, n_embd=768, n_head=12, n_positions=512, vocab_size=VOCABULARY,
        use_cache=False, **dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=12,
        vocab_size=VOCABULARY, max_position_embeddings=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=512, d_kv=64, d_ff=2048, num_layers=4, num_heads=8, vocab_size=VOCABULARY,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _moe() -> nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[128, 256, 512, 1024], depths=[2, 2, 3, 2],
        num_labels=1000,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config)


def _images() -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.empty(2, 3, 128, 128, device=META),
        "labels": torch.empty(2, dtype=torch.int64, device=META),
    }


FAMILIES: Mapping[str, Family] = MappingProxyType({
    "gpt": Family(model=_on_meta(partial(_gpt, **WITHOUT_DROPOUT)), batch=lambda: _tokens(256)),
    "dropout": Family(model=_on_meta(_gpt), batch=lambda: _tokens(256)),  # of a tenth
    "llama": Family(model=_on_meta(_llama), batch=lambda: _tokens(256)),
    "bert": Family(model=_on_meta(_bert), batch=lambda: _tokens(256)),
    "t5": Family(model=_on_meta(_t5), batch=lambda: _tokens(256)),
    "moe": Family(model=_on_meta(_moe), batch=lambda: _tokens(256)),
    "resnet": Family(model=_on_meta(_resnet), batch=_images),
})  # fmt: skip


def batch_of(family: str) -> dict[str, Any]:
    """Two rows of a family's batch, as keyword arguments."""
    return dict(FAMILIES[family].batch())
