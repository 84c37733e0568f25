"""Models of transformers that are made of parts, or see and hear."""

from __future__ import annotations

from typing import Any

import torch

from scripts.zoo.from_transformers import built, decoder, transformers_library, vision
from scripts.zoo.registry import IMAGES, SMALL, VOCAB, Built, entry, ids, pixels, random_numbers

vision(
    "ConvNeXt",
    "ConvNext",
    small={"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.0},
    published={"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 3, 27, 3]},
)


@entry("SegFormer", "transformers", IMAGES)
def _segformer(size: str, rows: int) -> Built:
    small = {
        "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "decoder_hidden_size": 32,
        "num_attention_heads": [1, 2, 4, 4], "drop_path_rate": 0.0,
        "hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
    }  # fmt: skip
    published = {
        "depths": [3, 6, 40, 3],
        "hidden_sizes": [64, 128, 320, 512],
        "decoder_hidden_size": 768,
    }
    classes, side = (8, 32) if size == SMALL else (150, 512)
    options = small if size == SMALL else published
    model = built(
        "SegformerConfig", "SegformerForSemanticSegmentation", {"num_labels": classes, **options}
    )
    labels = torch.randint(classes, (rows, side, side), generator=random_numbers(), device="cpu")
    return Built(model=model, batch={"pixel_values": pixels(rows, side), "labels": labels})


@entry("Whisper", "transformers")
def _whisper(size: str, rows: int) -> Built:
    small = {
        "vocab_size": VOCAB, "num_mel_bins": 8, "d_model": 64, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 16,
        "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    published = {
        "vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32,
        "decoder_layers": 32, "encoder_attention_heads": 20, "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    }  # fmt: skip
    model = built(
        "WhisperConfig", "WhisperForConditionalGeneration", small if size == SMALL else published
    )
    config: Any = model.config
    frames = 2 * config.max_source_positions
    features = torch.randn(
        rows, config.num_mel_bins, frames, generator=random_numbers(), device="cpu"
    )
    length = 16 if size == SMALL else config.max_target_positions
    return Built(
        model=model,
        batch={"input_features": features, "labels": ids(rows, length, config.vocab_size)},
    )


@entry("CLIP", "transformers", IMAGES)
def _clip(size: str, rows: int) -> Built:
    text: dict[str, Any] = {"vocab_size": 49408}
    image: dict[str, Any] = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "patch_size": 14,
    }  # fmt: skip
    text |= {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    if size == SMALL:
        tower = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        text = {
            **tower,
            "vocab_size": VOCAB,
            "max_position_embeddings": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        image = {**tower, "image_size": 32, "patch_size": 8}
    model = built(
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": text,
            "vision_config": image,
            "projection_dim": 32 if size == SMALL else 768,
        },
    )
    length, side = (16, 32) if size == SMALL else (77, 224)
    return Built(
        model=model,
        batch={
            "input_ids": ids(rows, length, text["vocab_size"]),
            "pixel_values": pixels(rows, side),
            "return_loss": True,
        },
    )


@entry("LLaVA", "transformers")
def _llava(size: str, rows: int) -> Built:
    transformers = transformers_library()
    if size == SMALL:
        image = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        }
        text, side, patches, length, token = decoder(vocab_size=VOCAB), 32, 16, 24, VOCAB - 1
    else:
        image = {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        }
        text = {"vocab_size": 32064}
        side, patches, length, token = 336, 576, 1024, 32000
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**image),
        text_config=transformers.LlamaConfig(**text),
        image_token_id=token,
        image_seq_length=patches,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    tokens = ids(rows, length, token)
    tokens[:, 1 : 1 + patches] = token
    return Built(
        model=model,
        batch={"input_ids": tokens, "labels": tokens.clone(), "pixel_values": pixels(rows, side)},
    )
