"""Models of torchvision and timm."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.zoo.registry import IMAGES, SMALL, Built, entry, ids, pixels

_KEPT: list[Any] = []  # libraries of operators live as long as their objects


def declare_torchvision_operators() -> None:
    """Beside a torch of another build torchvision's compiled operators are missing, and two of them
    are looked up at import."""
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


@entry("ResNet-50", "torchvision", IMAGES)
def _resnet(size: str, rows: int) -> Built:
    declare_torchvision_operators()
    models = importlib.import_module("torchvision.models")
    if size == SMALL:
        model = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=8)
        return Built(model=model, batch=_labelled(rows, 32, 8), loss_fn=F.cross_entropy)
    return Built(model=models.resnet50(), batch=_labelled(rows, 224, 1000), loss_fn=F.cross_entropy)


@entry("EfficientNet", "timm", IMAGES)
def _efficientnet(size: str, rows: int) -> Built:
    declare_torchvision_operators()
    timm = importlib.import_module("timm")
    if size == SMALL:
        model = timm.create_model("efficientnet_b0", num_classes=8)
        return Built(model=model, batch=_labelled(rows, 64, 8), loss_fn=F.cross_entropy)
    model = timm.create_model("efficientnet_b7")
    return Built(model=model, batch=_labelled(rows, 600, 1000), loss_fn=F.cross_entropy)


def _labelled(rows: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    return pixels(rows, side), ids(rows, 1, classes)[:, 0]
