"""Models of transformers that answer by the pixel, the point or the query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scripts.zoo.from_transformers import built, transformers_library
from scripts.zoo.more_transformers import PATCHES, Options, other
from scripts.zoo.registry import IMAGES, SMALL, Built, entry, ids, pixels, random_numbers


def depths(rows: int, small: bool) -> dict[str, Tensor]:
    side = 32 if small else 384
    return {
        "pixel_values": pixels(rows, side),
        "labels": ids(rows, side * side, 4).view(-1, side, side),
    }


other(
    "DPT",
    "DPTConfig",
    "DPTForSemanticSegmentation",
    {
        **PATCHES,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
        "is_hybrid": False,
        "num_labels": 4,
        "reassemble_factors": [4, 2, 1, 0.5],
        "auxiliary_loss_weight": 0.4,
        "semantic_classifier_dropout": 0.0,
    },
    depths,
)


def prompted(rows: int, small: bool) -> dict[str, Tensor]:
    side = 64 if small else 1024
    points = side * torch.rand(rows, 1, 2, 2, generator=random_numbers(), device="cpu")
    return {"pixel_values": pixels(rows, side), "input_points": points,
            "targets": (pixels(rows, side // 4, 1) > 0).float()}  # fmt: skip


def mask_loss(output: Any, masks: Tensor) -> Tensor:
    """Of the three masks predicted for a point, all against one."""
    logits = output["pred_masks"] if isinstance(output, dict) else output.pred_masks
    return torch.nn.functional.binary_cross_entropy_with_logits(
        logits.squeeze(1), masks.expand(-1, logits.shape[2], -1, -1)
    )


other(
    "SAM",
    "SamConfig",
    "SamModel",
    {
        "vision_config": {
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 4,
            "image_size": 64,
            "num_attention_heads": 4,
            "patch_size": 16,
            "window_size": 2,
            "num_pos_feats": 8,
            "mlp_dim": 64,
            "global_attn_indexes": [1, 3],
        },
        "prompt_encoder_config": {
            "hidden_size": 16,
            "image_size": 64,
            "patch_size": 16,
            "mask_input_channels": 4,
        },
        "mask_decoder_config": {
            "hidden_size": 16,
            "mlp_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "attention_downsample_rate": 2,
            "iou_head_depth": 2,
            "iou_head_hidden_dim": 16,
        },
    },
    prompted,
    loss_fn=mask_loss,
)


def detected(rows: int, small: bool) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows, 64 if small else 800), "targets": ids(rows, 5, 4)}


def detection_loss(output: Any, classes: Tensor) -> Tensor:
    """The classes of queries, matched in order: DETR's own matching is scipy's."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), classes)


DETECTOR: Options = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 5, "num_labels": 3,
    "dropout": 0.0,
}  # fmt: skip


@entry("DETR", "transformers", IMAGES)
def _detr(size: str, rows: int) -> Built:
    backbone = transformers_library().ResNetConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], embedding_size=8, out_features=["stage4"]
    )
    options = (
        {**DETECTOR, "backbone_config": backbone}
        if size == SMALL
        else {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone_config": transformers_library().ResNetConfig(out_features=["stage4"]),
        }
    )
    model = built("DetrConfig", "DetrForObjectDetection", options)
    return Built(model=model, batch=detected(rows, size == SMALL), loss_fn=detection_loss)
