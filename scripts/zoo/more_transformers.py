"""More models of transformers, by the sizes that their configs spell: families that differ in
attention, positions, norms, recurrences, inputs or losses from those of `from_transformers.py`.

The published size is the config's default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scripts.zoo.from_transformers import BERT_PLAIN, NO_DROPOUT, built, decoder, language, vision
from scripts.zoo.registry import (
    IMAGES,
    SMALL,
    Built,
    entry,
    ids,
    masked_batch,
    pixels,
    random_numbers,
)

Options = dict[str, Any]
ENCODER_DECODER: Options = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}  # fmt: skip
BERT_SMALL: Options = {**BERT_PLAIN, "max_position_embeddings": 64}

Models = tuple[tuple[str, str, Options], ...]  # name, stem of the classes, the small size
CAUSAL: Models = (
    ("BLOOM", "Bloom", {"hidden_size": 64, "n_layer": 4, "n_head": 4}),
    ("OPT", "OPT", {**decoder(), "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0}),
    ("GPT-NeoX", "GPTNeoX", decoder(rotary_pct=0.25)),
    ("GPT-J", "GPTJ", {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8, **NO_DROPOUT}),
    ("Falcon", "Falcon", decoder(new_decoder_architecture=False)),
    ("Falcon-Mamba", "FalconMamba", {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}),
    ("StableLM", "StableLm", decoder(kv_heads=2)),
    ("Phi", "Phi", decoder()),
    ("Cohere", "Cohere", decoder(kv_heads=2)),
    ("Granite", "Granite", decoder(kv_heads=2)),
    ("StarCoder2", "Starcoder2", decoder(4, 2, residual_dropout=0.0, embedding_dropout=0.0)),
    ("CodeGen", "CodeGen", {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8}),
    (
        "GLM4-MoE",
        "Glm4Moe",
        decoder(
            kv_heads=2,
            head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
        ),
    ),
    (
        "Zamba2",
        "Zamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "chunk_size": 8,
            "intermediate_size": 64,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    ("XGLM", "XGLM", {"d_model": 64, "ffn_dim": 128, "num_layers": 4, "attention_heads": 4,
                      "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}),
)  # fmt: skip

MASKED: Models = (
    ("RoBERTa", "Roberta", BERT_SMALL),
    ("ALBERT", "Albert", {**BERT_SMALL, "embedding_size": 32}),
    ("ELECTRA", "Electra", {**BERT_SMALL, "embedding_size": 32}),
    (
        "DistilBERT",
        "DistilBert",
        {"dim": 64, "hidden_dim": 128, "n_layers": 4, "n_heads": 4, "dropout": 0.0,
         "attention_dropout": 0.0},
    ),
    ("MPNet", "MPNet", BERT_SMALL),
    ("Longformer", "Longformer", {**BERT_SMALL, "attention_window": 4}),
    ("BigBird", "BigBird", {**BERT_SMALL, "attention_type": "original_full"}),
    ("RoFormer", "RoFormer", {**BERT_SMALL, "embedding_size": 64}),
    ("FNet", "FNet", BERT_SMALL),
    ("ModernBERT", "ModernBert", {**BERT_SMALL, "pad_token_id": 0}),
)  # fmt: skip
TRANSLATION: Models = (
    ("Pegasus", "Pegasus", ENCODER_DECODER),
    ("M2M-100", "M2M100", {**ENCODER_DECODER, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    ("LED", "LED", {**ENCODER_DECODER, "attention_window": 4, "max_encoder_position_embeddings": 64,
                    "max_decoder_position_embeddings": 64}),
)  # fmt: skip
for _name, _stem, _small in CAUSAL:
    language(_name, _stem, small=_small, published={})
for _head, _models in (("ForMaskedLM", MASKED), ("ForConditionalGeneration", TRANSLATION)):
    for _name, _stem, _small in _models:
        language(
            _name, _stem, head=_head, length=512, make=masked_batch, small=_small, published={}
        )

PATCHES: Options = {**BERT_PLAIN, "image_size": 32, "patch_size": 8}
CLASSIFIERS: Models = (
    ("DeiT", "DeiT", PATCHES),
    ("BEiT", "Beit", {**PATCHES, "drop_path_rate": 0.0, "use_relative_position_bias": True}),
    ("DINOv2", "Dinov2", {**PATCHES, "drop_path_rate": 0.0}),
    (
        "PVT",
        "PvtV2",
        {
            "image_size": 32,
            "hidden_sizes": [16, 32],
            "depths": [2, 2],
            "num_encoder_blocks": 2,
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "drop_path_rate": 0.0,
        },
    ),
    (
        "PoolFormer",
        "PoolFormer",
        {
            "hidden_sizes": [16, 32],
            "depths": [2, 2],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "drop_path_rate": 0.0,
        },
    ),
)
for _name, _stem, _small in CLASSIFIERS:
    vision(_name, _stem, small=_small, published={})


def waves(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, generator=random_numbers(), device="cpu")


def other(
    name: str,
    config: str,
    model: str,
    small: Options,
    batch: Callable[[int, bool], dict[str, Tensor]],
    rows: int = IMAGES,
    loss_fn: Callable[..., Any] | None = None,
    refused: str = "",
) -> None:
    """Any other model of transformers; `batch(rows, small)` are its inputs."""

    @entry(name, "transformers", rows, refused)
    def build(size: str, rows: int) -> Built:
        made = built(config, model, small if size == SMALL else {})
        for module in made.modules():  # some configs have no word for it
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return Built(model=made, batch=batch(rows, size == SMALL), loss_fn=loss_fn)


AUDIO: Options = {
    **BERT_PLAIN, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (4, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0, "layerdrop": 0.0, "final_dropout": 0.0, "num_labels": 8,
    "classifier_proj_size": 16,
}  # fmt: skip


def spoken(rows: int, small: bool) -> dict[str, Tensor]:
    return {"input_values": waves(rows, 512 if small else 16000), "labels": ids(rows, 1, 2)[:, 0]}


for _name, _stem in (("Wav2Vec2", "Wav2Vec2"), ("HuBERT", "Hubert"), ("WavLM", "WavLM")):
    other(
        _name,
        f"{_stem}Config",
        f"{_stem}ForSequenceClassification",
        {**AUDIO, "apply_spec_augment": False},
        spoken,
    )
other(
    "Wav2Vec2, defaults",
    "Wav2Vec2Config",
    "Wav2Vec2ForSequenceClassification",
    {**AUDIO, "mask_time_length": 2},
    spoken,
    refused="calls numpy.random.rand",
)


def clips(rows: int, small: bool) -> dict[str, Tensor]:
    side, frames = (32, 4) if small else (224, 16)
    return {
        "pixel_values": pixels(rows, side, 3 * frames).unflatten(1, (frames, 3)),
        "labels": ids(rows, 1, 2)[:, 0],
    }


VIDEO: Options = {**PATCHES, "num_frames": 4, "num_labels": 8}
for _name, _stem in (("VideoMAE", "VideoMAE"), ("TimeSformer", "Timesformer")):
    other(_name, f"{_stem}Config", f"{_stem}ForVideoClassification", VIDEO, clips)


def towers(rows: int, small: bool) -> dict[str, Any]:
    length, side = (16, 32) if small else (64, 224)
    return {"input_ids": ids(rows, length, 128), "pixel_values": pixels(rows, side),
            "return_loss": True}  # fmt: skip


other(
    "SigLIP",
    "SiglipConfig",
    "SiglipModel",
    {"text_config": {**BERT_SMALL, "vocab_size": 128}, "vision_config": PATCHES},
    towers,
)


def spectra(rows: int, small: bool) -> dict[str, Tensor]:
    length, bins = (32, 16) if small else (1024, 128)
    return {"input_values": waves(rows, length * bins).view(rows, length, bins),
            "labels": ids(rows, 1, 2)[:, 0]}  # fmt: skip


other(
    "AST",
    "ASTConfig",
    "ASTForAudioClassification",
    {**BERT_PLAIN, "patch_size": 8, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8,
     "time_stride": 8, "num_labels": 8},
    spectra,
)  # fmt: skip


def series(rows: int, small: bool) -> dict[str, Tensor]:
    length = 32 if small else 512
    values = waves(rows, 2 * length * 4).view(rows, 2 * length, 4)
    return {"past_values": values[:, :length], "future_values": values[:, length : length + 8]}


other(
    "PatchTST",
    "PatchTSTConfig",
    "PatchTSTForPrediction",
    {
        "num_input_channels": 4,
        "context_length": 32,
        "prediction_length": 8,
        "patch_length": 4,
        "patch_stride": 4,
        "d_model": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "ffn_dim": 64,
        "norm_type": "layernorm",
        "head_dropout": 0.0,
        "attention_dropout": 0.0,
        "ff_dropout": 0.0,
    },
    series,
)
