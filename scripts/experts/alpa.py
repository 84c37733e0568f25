"""The models of Alpa's evaluation (Zheng et al., OSDI 2022) that the reference models don't cover.

MoE: a GPT whose every second layer sends each token to two of E experts, two matrices each (GShard;
feed-forward 8 times the hidden size in all layers). Wide-ResNet: a ResNet of bottlenecks with
`channels` filters in the first group and 3×3 convolutions `width` times as wide as their
neighbours. Only shapes matter: both live on `meta`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import FactorTable, analyse
from meshwright.moe import GroupedLinear
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.operators import combine, dispatch
from meshwright.planner.tracing import trace
from scripts.published import Transformer, TransformerDims

TOPK = 2
CLASSES = 1024
RESNET_50, RESNET_101 = (3, 4, 6, 3), (3, 4, 23, 3)  # bottlenecks at each resolution


class Experts(nn.Module):
    """Router and experts of two matrices; the router's weights are applied between them."""

    def __init__(self, *, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = GroupedLinear(experts, hidden, ffn)
        self.down = GroupedLinear(experts, ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.router(x), -1).topk(TOPK)
        y = F.gelu(self.up(dispatch(x, chosen), chosen))
        return combine(self.down(y * weights.unsqueeze(-1), chosen))


def moe(*, layers: int, hidden: int, experts: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and a sample batch of two rows."""
    dims = TransformerDims(
        layers=layers,
        hidden=hidden,
        heads=16,
        kv_heads=16,
        ffn=8 * hidden,
        vocab=32000,
        seq_len=1024,
        attention="written",
        tied=False,
    )
    with torch.device("meta"):
        model = Transformer(dims)
        for layer in list(model.layers)[1::2]:
            layer.mlp = Experts(hidden=hidden, ffn=dims.ffn, experts=experts)
        ids = torch.zeros(2, dims.seq_len, dtype=torch.long)
    return model, (ids, ids)


class Bottleneck(nn.Module):
    """1×1, 3×3 (`width` times as wide) and 1×1 convolutions around a skip connection."""

    def __init__(self, inputs: int, filters: int, width: int, stride: int) -> None:
        super().__init__()
        wide, outputs = filters * width, filters * 4
        self.conv1 = nn.Conv2d(inputs, filters, 1, bias=False)
        self.conv2 = nn.Conv2d(filters, wide, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(wide, outputs, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(filters), nn.BatchNorm2d(wide)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.skip: nn.Module | None = None
        if inputs != outputs or stride > 1:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


class WideResNet(nn.Module):
    """(images, labels) -> mean cross-entropy; `groups` are the numbers of bottlenecks at each
    resolution."""

    def __init__(self, *, groups: Sequence[int], channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, 2, 1)
        layers, inputs = [], channels
        for group, count in enumerate(groups):
            filters = channels * 2**group
            for k in range(count):
                stride = 2 if group and not k else 1
                layers.append(Bottleneck(inputs, filters, width, stride))
                inputs = 4 * filters
        self.layers = nn.ModuleList(layers)
        self.classifier = nn.Linear(inputs, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(images))))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.classifier(x.mean((2, 3))).float(), labels)


def wide_resnet(
    *, groups: Sequence[int], channels: int, width: int, size: int = 224
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and a sample batch of two images of `size` × `size`."""
    with torch.device("meta"):
        model = WideResNet(groups=groups, channels=channels, width=width)
        batch = torch.empty(2, 3, size, size), torch.zeros(2, dtype=torch.long)
    return model, batch


def traced(
    made: tuple[nn.Module, tuple[Tensor, Tensor]], precision: str
) -> tuple[Graph, FactorTable]:
    """A model with its sample batch, traced and cut into blocks."""
    model, example = made
    graph = trace(model, example, loss_fn=None, batch_size=2, precision=precision)
    table = analyse(graph)
    return cut_blocks(graph, table), table
