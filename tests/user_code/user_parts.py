"""What the user models share: sizes, batches and losses, a layer and a stack of it.

Sizes divide by 4. Activations are smooth (GELU, tanh), so that rounding can't move a value across a
kink. A batch is made for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LENGTH, CLASSES, LAYERS = 32, 16, 4, 12, 20, 4

Batch = dict[str, Any] | tuple[Any, ...]
LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """How to build a model and its batches. With `own_masks` its results depend on dropout masks,
    which are the runtime's own; `tolerance` is that
    of relative differences, wider where the model itself computes in half precision."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: LossFn | None = None
    own_masks: bool = False
    tolerance: float = 1e-5


# --- batches and losses ---------------------------------------------------------------------------


def vectors(rows: int) -> Batch:
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


def sequences(rows: int) -> Batch:
    return torch.randn(rows, LENGTH, WIDTH), torch.randint(CLASSES, (rows,))


def tokens(rows: int) -> Batch:
    return {
        "ids": torch.randint(VOCAB, (rows, LENGTH)),
        "labels": torch.randint(VOCAB, (rows, LENGTH)),
    }


def mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output.mean((1, 2)) - targets).square().mean()


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# --- parts ----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """A residual layer of two products."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def layers(count: int = LAYERS, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(Mlp(**options) for _ in range(count))


class Stack(nn.Module):
    """Layers and a head; what most of these models differ from in one thing."""

    def __init__(self, outputs: int = CLASSES, **options: Any) -> None:
        super().__init__()
        self.layers = layers(**options)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def holding(**attributes: Any) -> Callable[[nn.Module], None]:
    """Sets attributes of a model."""
    return lambda model: vars(model).update(attributes)
