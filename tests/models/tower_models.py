"""Models of towers that meet at the end: in a layer that is trained, and in nothing but a loss over
all pairs of rows."""

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.models.architectures import VOCAB as IDS
from tests.models.branching_models import t5
from tests.models.models import Case, adamw, pair_batch, sgd

WIDTH, PIXELS, TOKENS, VOCAB, CLASSES = 16, 6, 5, 24, 7


class Layer(nn.Module):
    """Attention and a feed-forward part, of plain products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.down(F.gelu(self.up(x)))


class Towers(nn.Module):
    """An image's tower and a text's, of `layers` each, and a classifier over both."""

    def __init__(self, layers: tuple[int, int] = (2, 2)) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Linear(12, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.image = nn.ModuleList(Layer() for _ in range(layers[0]))
        self.text = nn.ModuleList(Layer() for _ in range(layers[1]))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def towers(self, pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.patches(pixels)
        for layer in self.image:
            x = layer(x)
        x, y = x.mean(1), self.tokens(ids)
        for layer in self.text:
            y = layer(y)
        return x, y.mean(1)

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat(self.towers(pixels, ids), -1))


class Dropped(Layer):
    """A layer with dropout of its results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Dropping(Towers):
    """The same towers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.ModuleList(Dropped() for _ in self.image)
        self.text = nn.ModuleList(Dropped() for _ in self.text)


class Pairs(Towers):
    """Scores of all pairs of rows: behind the towers nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x, y = self.towers(pixels, ids)
        return x @ y.T


def towers_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(step)
    pixels = torch.randn(rows, PIXELS, 12, generator=random)
    ids = torch.randint(VOCAB, (rows, TOKENS), generator=random)
    return pixels, ids, torch.randint(CLASSES, (rows,), generator=random)


def pairs_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    return (*towers_batch(rows, step)[:2], torch.arange(rows))


class Clip(transformers.CLIPModel):
    """A model of transformers that makes its loss, over all pairs of rows."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        return super().forward(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def clip() -> nn.Module:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = {"vocab_size": VOCAB, "max_position_embeddings": TOKENS, "eos_token_id": VOCAB - 1}
    ends = {"bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**tower, **text, **ends, "num_hidden_layers": 2},
        vision_config={**tower, "num_hidden_layers": 3, "image_size": 8, "patch_size": 4},
        projection_dim=8,
        logit_scale_init_value=1.0,  # where gradients of the pairs cancel least
    )
    return Clip(config).train()


def clip_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(2, VOCAB - 1, (rows, TOKENS), generator=random)
    ids[:, -1] = VOCAB - 1
    pixels = torch.randn(rows, 3, 8, 8, generator=random)
    return {"input_ids": ids, "pixel_values": pixels}


_SHARDINGS = {"*.*.up": "colwise", "*.*.qkv": "colwise"}
TOWERS = {
    "towers": Case(
        build=Towers, batch=towers_batch, optimizer=sgd, loss_fn=F.cross_entropy,
        shardings=_SHARDINGS,
    ),
    "dropping": Case(
        build=Dropping, batch=towers_batch, optimizer=adamw, loss_fn=F.cross_entropy,
        shardings=_SHARDINGS,
    ),
    "pairs": Case(
        build=Pairs, batch=pairs_batch, optimizer=sgd, loss_fn=F.cross_entropy,
        shardings=_SHARDINGS,
    ),
    "clip": Case(
        build=clip, batch=clip_batch, optimizer=sgd,
        shardings={"*_model.encoder.layers.*.mlp.fc1": "colwise"},
    ),
    "shallow": Case(  # an encoder beside what of a decoder doesn't read it
        build=lambda: t5(vocab=IDS, layers=1), batch=pair_batch, optimizer=adamw,
    ),
}  # fmt: skip
