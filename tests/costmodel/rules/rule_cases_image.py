"""Operator calls that verify the sharding rules of images: convolutions, norms, resampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.costmodel.rules.rule_cases import Case, case, k, w, x

aten = torch.ops.aten

CONVOLUTIONS = [
    case("conv1d", "R S(0) S(1) P", lambda a, f: F.conv1d(a, f, stride=2), x(4, 8, 10),
         w(12, 8, 3)),
    case("conv2d", "R S(0) S(1) P", F.conv2d, x(4, 8, 5, 6), w(12, 8, 3, 3), w(12)),
    case("conv2d strided", "R S(0) S(1) P", lambda a, f: F.conv2d(a, f, None, 2, 1), x(4, 8, 6, 6),
         w(12, 8, 3, 3)),
    case("conv2d same", "R S(0) S(1) P", lambda a, f: F.conv2d(a, f, padding="same"), x(4, 8, 6, 6),
         w(12, 8, 3, 3)),
    case("conv2d grouped", "R S(0) S(1) S(1/4) P", lambda a, f, b: F.conv2d(a, f, b, groups=4),
         x(4, 8, 6, 6), w(16, 2, 3, 3), w(16)),
    case("conv2d depthwise", "R S(0) S(1)", lambda a, f, b: F.conv2d(a, f, b, groups=8),
         x(4, 8, 6, 6), w(8, 1, 3, 3), w(8)),
    case("conv2d multiplied", "R S(0) S(1) S(1/8)",
         lambda a, f: F.conv2d(a, f, groups=8, padding="same"), x(4, 8, 6, 6), w(16, 1, 3, 3)),
    case("conv2d one image", "R", lambda a, f: F.conv2d(a[0], f), x(4, 8, 6, 6), w(12, 8, 3, 3),
         known=False),
    case("conv3d", "R S(0) S(1) P", F.conv3d, x(4, 4, 3, 3, 3), w(8, 4, 2, 2, 2)),
    case("conv_transpose1d", "R S(0) S(1) P", lambda a, f, b: F.conv_transpose1d(a, f, b, stride=2),
         x(4, 8, 6), w(8, 12, 3), w(12)),
    case("conv_transpose2d", "R S(0) S(1) P", lambda a, f, b: F.conv_transpose2d(a, f, b, 2),
         x(4, 8, 3, 3), w(8, 12, 2, 2), w(12)),
    case("conv_transpose2d grouped", "R S(0) S(1) S(1/4) P",
         lambda a, f: F.conv_transpose2d(a, f, groups=4), x(4, 8, 3, 3), w(8, 2, 2, 2)),
    case("conv_transpose3d", "R S(0) S(1) P", F.conv_transpose3d, x(4, 4, 3, 3, 3),
         w(4, 8, 2, 2, 2)),
]  # fmt: skip

NORMS = [
    case("group_norm", "R S(0) S(1)", lambda a, g, b: F.group_norm(a, 4, g, b), x(4, 8, 3, 5), w(8),
         w(8)),
    case("group_norm plain", "R S(0)", lambda a: F.group_norm(a, 1), x(4, 8, 3)),
    case("instance_norm", "R S(0) S(1)", lambda a, g, b: F.instance_norm(a, None, None, g, b),
         x(4, 8, 3, 5), w(8), w(8)),
    case("batch_norm train", "R S(0) S(1)", lambda a, m, v, g, b: F.batch_norm(a, m, v, g, b, True),
         x(4, 8, 3, 5), k(8), k(8), w(8), w(8)),
    case("batch_norm eval", "R S(0) S(1)", lambda a, m, v, g, b: F.batch_norm(a, m, v, g, b, False),
         x(4, 8, 3, 5), k(8), k(8), w(8), w(8)),
    case("batch_norm untracked", "R S(0) S(1)",
         lambda a, g, b: F.batch_norm(a, None, None, g, b, True), x(4, 8, 3), w(8), w(8)),
    case("batch_norm plain", "R S(0) S(1)",
         lambda a, m, v: F.batch_norm(a, m, v, training=True, momentum=0.3), x(4, 8), k(8), k(8)),
    case("batch_norm over time", "R S(0) S(1)",
         lambda a, m, v: F.batch_norm(a.transpose(0, 1).flatten(0, 1), m, v, None, None, True),
         x(4, 6, 8), k(8), k(8)),
    # 7 rows: the parts differ
    case("batch_norm of a table", "R S(0) S(1)",
         lambda a, t, m, v, g, b: (F.batch_norm(t, m, v, g, b, True), a), x(4, 8), w(7, 8), k(8),
         k(8), w(8), w(8)),
]  # fmt: skip

POOLING = [
    case("max_pool2d", "R S(0) S(1)", lambda a: F.max_pool2d(a, 2), x(4, 8, 6, 6)),
    case("max_pool2d one image", "R", lambda a: F.max_pool2d(a[0], 2), x(4, 8, 6, 6), known=False),
    case("avg_pool2d", "R S(0) S(1)", lambda a: F.avg_pool2d(a, 2), x(4, 8, 6, 6)),
    case("adaptive_avg_pool2d", "R S(0) S(1)", lambda a: F.adaptive_avg_pool2d(a, 1),
         x(4, 8, 6, 6)),
    case("max_pool1d", "R S(0) S(1)", lambda a: F.max_pool1d(a, 2), x(4, 8, 6)),
    case("avg_pool1d", "R S(0) S(1)", lambda a: F.avg_pool1d(a, 2), x(4, 8, 6)),
    case("adaptive_avg_pool1d", "R S(0) S(1)", lambda a: F.adaptive_avg_pool1d(a, 2), x(4, 8, 6)),
    case("max_pool3d", "R S(0) S(1)", lambda a: F.max_pool3d(a, 2), x(4, 6, 2, 4, 4)),
    case("avg_pool3d", "R S(0) S(1)", lambda a: F.avg_pool3d(a, 2), x(4, 6, 2, 4, 4)),
    case("adaptive_avg_pool3d", "R S(0) S(1)", lambda a: F.adaptive_avg_pool3d(a, 1),
         x(4, 6, 2, 4, 4)),
    case("adaptive_max_pool1d", "R S(0) S(1)", lambda a: F.adaptive_max_pool1d(a, 2), x(4, 8, 6)),
    case("adaptive_max_pool2d", "R S(0) S(1)", lambda a: F.adaptive_max_pool2d(a, 1),
         x(4, 8, 6, 6)),
    case("adaptive_max_pool3d", "R S(0) S(1)", lambda a: F.adaptive_max_pool3d(a, 1),
         x(4, 6, 2, 4, 4)),
]  # fmt: skip


def _up(mode: str, *shape: int, factor: float = 2) -> list[Case]:
    rank = len(shape) - 2
    name = {"linear": ("linear", "bilinear", "trilinear")[rank - 1]}.get(mode, mode)
    return [
        case(
            f"upsample_{name}{rank}d", "R S(0) S(1)",
            lambda a: F.interpolate(a, scale_factor=factor, mode=name), x(*shape),
        )
    ]  # fmt: skip


RESAMPLING = [
    *_up("nearest", 4, 6, 3), *_up("nearest", 4, 6, 3, 5), *_up("nearest", 4, 6, 2, 3, 3),
    *_up("linear", 4, 6, 3), *_up("linear", 4, 6, 3, 5), *_up("linear", 4, 6, 2, 3, 3),
    *_up("bicubic", 4, 6, 4, 5),
    case("upsample_bilinear2d sized", "R S(0) S(1)",
         lambda a: F.interpolate(a, (4, 7), mode="bilinear"), x(4, 6, 3, 5)),
    case("pixel_shuffle", "R S(0) S(1) S(2) S(3) P", lambda a: F.pixel_shuffle(a, 2),
         x(4, 8, 6, 4)),
    case("pixel_unshuffle", "R S(0) S(1) S(2) S(3) P", lambda a: F.pixel_unshuffle(a, 2),
         x(4, 6, 8, 4)),
    case("channel_shuffle", "R S(0) S(1) S(1/4) S(2) P", lambda a: F.channel_shuffle(a, 2),
         x(4, 8, 6)),
    case("im2col", "R S(0) S(1) P", lambda a: F.unfold(a, 2), x(4, 6, 5, 4)),
    case("col2im", "R S(0) S(1) P", lambda a: F.fold(a, (5, 4), 2), x(4, 24, 12)),
    case("grid_sampler", "R S(0) S(1) S(2) S(3)",
         lambda a, g: F.grid_sample(a, g.tanh(), align_corners=False), x(4, 8, 5, 6),
         x(4, 4, 6, 2)),
]  # fmt: skip

IMAGES = [*CONVOLUTIONS, *NORMS, *POOLING, *RESAMPLING]
