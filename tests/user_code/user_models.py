"""Small models as users write them, each with a habit that a planner may trip over.

Here are those of outputs, losses, state and what is trained; ways to write a layer are in
`user_styles.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.user_code.user_parts import (
    CLASSES,
    HEADS,
    LAYERS,
    LENGTH,
    VOCAB,
    WIDTH,
    Batch,
    Mlp,
    Stack,
    UserModel,
    sequences,
    token_loss,
    tokens,
    vectors,
)
from tests.user_code.user_state import STATES
from tests.user_code.user_styles import STYLES

# --- outputs, inputs and losses -------------------------------------------------------------------


class KeywordsOnly(nn.Module):
    """Keyword arguments alone, some of them None, flags or numbers; a dict as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = Stack(VOCAB)

    def forward(
        self,
        *,
        ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
        scaled: bool = False,
        repeats: int = 1,
    ) -> dict[str, Any]:
        x = self.embed(ids)
        if mask is not None:
            x = x * mask[..., None]
        for _ in range(repeats):
            x = x + extra if extra is not None else x * 1.5
        logits = self.body(x * WIDTH**0.5 if scaled else x)
        loss = None if labels is None else token_loss(logits, labels)
        return {"logits": logits, "loss": loss, "states": [x, {"scaled": scaled}]}


def keywords(rows: int) -> Batch:
    mask = torch.ones(rows, LENGTH)
    mask[:, -2:] = 0.0
    return {**tokens(rows), "mask": mask, "extra": None, "scaled": True, "repeats": 2}


@dataclass
class Answer:
    """A plain dataclass as an output, unknown to pytree."""

    logits: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class DataclassOutput(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Answer:
        logits = super().forward(x)
        return Answer(logits=(logits, x), loss=F.cross_entropy(logits, labels))


class TwoHeads(Stack):
    """A nested output for a loss of three terms over a dict of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return {"heads": (self.head(x), self.value(states[1])[..., 0]), "states": states}


def three_losses(output: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits, value = output["heads"]
    main = F.cross_entropy(logits, targets["label"], label_smoothing=0.1)
    auxiliary = F.mse_loss(value, targets["value"])
    return main + 0.1 * auxiliary + 1e-2 * logits.logsumexp(-1).square().mean()


def two_targets(rows: int) -> Batch:
    x, label = vectors(rows)
    return {"x": x, "targets": {"label": label, "value": torch.randn(rows)}}


class SharedTable(nn.Module):
    """Positional inputs: two with rows, one without, which all rows share; targets are a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = Stack()

    def forward(
        self, x: torch.Tensor, other: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joined = self.first(x) * torch.sigmoid(self.second(other)) + positions
        return self.body(joined).mean(1), joined


def tuple_loss(
    output: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    return F.cross_entropy(output[0], targets[0]) + F.l1_loss(output[1].mean(1), targets[1])


def table_batch(rows: int) -> Batch:
    x, label = sequences(rows)
    return x, torch.randn_like(x), torch.randn(LENGTH, WIDTH), (label, torch.randn(rows, WIDTH))


# --- state ----------------------------------------------------------------------------------------


class OwnStatistics(Stack):
    """Buffers written in forward: a counter, a mean of the batch kept by assignment and a variance
    kept in place, both used by the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.variance.mul_(0.9).add_(x.var(0, unbiased=False), alpha=0.1)
        return super().forward((x - self.mean) * torch.rsqrt(self.variance + 1e-5))


class HiddenStatistics(Stack):
    """A mean of activations, read before it is renewed, and its reader behind more layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        old = self.mean
        self.mean = 0.9 * self.mean + 0.1 * self.layers[1](x).mean(0).detach()
        x = self.layers[2](x) * torch.exp(self.mean)
        return self.head(self.layers[3](x - old) + self.layers[1](x))


class Albert(nn.Module):
    """One layer used six times, and one norm shared by all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer, self.norm = Mlp(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(6):
            x = self.norm(self.layer(x))
        return token_loss(self.head(x), labels)


class TiedTranslator(nn.Module):
    """nn.Transformer with one table for source, target and output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.inner = nn.Transformer(
            WIDTH, HEADS, 2, 2, 32, dropout=0.0, activation="gelu", batch_first=True
        )
        self.decoder_embed = self.embed
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        out = self.inner(
            self.embed(source),
            self.decoder_embed(target[:, :-1]),
            tgt_mask=ahead,
            tgt_is_causal=True,
        )
        return token_loss(self.head(out), target[:, 1:])


def translations(rows: int) -> Batch:
    return torch.randint(VOCAB, (rows, LENGTH)), torch.randint(VOCAB, (rows, LENGTH + 1))


# --- what is trained ------------------------------------------------------------------------------


def frozen_backbone() -> nn.Module:
    model = Stack()
    model.layers.requires_grad_(False)
    return model


class Lora(nn.Module):
    """A frozen linear layer and its two trained factors, as adapter libraries wrap one."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.b = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": 2.0 / rank}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        for name in self.a:
            result = result + self.b[name](self.a[name](x)) * self.scaling[name]
        return result


def lora() -> nn.Module:
    model = Stack().requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Lora(layer.up), Lora(layer.down)
    return model


class Collections(nn.Module):
    """Parameters in lists and dicts, some of them unused by this forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)
        )
        self.biases = nn.ParameterDict({f"b{k}": torch.zeros(WIDTH) for k in range(LAYERS + 1)})
        self.heads = nn.ModuleDict({n: nn.Linear(WIDTH, CLASSES) for n in ("used", "unused")})
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, weight in enumerate(self.weights):
            x = x + torch.tanh(x @ weight + self.biases[f"b{k}"])
        return sum(head(x) for name, head in self.heads.items() if name == "used") * self.scale


class Parametrized(nn.Module):
    """Weights that are functions of parameters; spectral norm steps its power iteration too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 32))
        self.down = parametrizations.spectral_norm(nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(F.gelu(self.up(x))))


USERS: Mapping[str, UserModel] = {
    "keywords only": UserModel(build=KeywordsOnly, batch=keywords),
    "dataclass output": UserModel(build=DataclassOutput, batch=vectors),
    "three losses": UserModel(build=TwoHeads, batch=two_targets, loss_fn=three_losses),
    "shared table": UserModel(build=SharedTable, batch=table_batch, loss_fn=tuple_loss),
    "own statistics": UserModel(build=OwnStatistics, batch=vectors, loss_fn=F.cross_entropy),
    "hidden statistics": UserModel(build=HiddenStatistics, batch=vectors, loss_fn=F.cross_entropy),
    "albert": UserModel(build=Albert, batch=tokens),
    "tied translator": UserModel(build=TiedTranslator, batch=translations),
    "frozen backbone": UserModel(build=frozen_backbone, batch=vectors, loss_fn=F.cross_entropy),
    "lora": UserModel(build=lora, batch=vectors, loss_fn=F.cross_entropy),
    "collections": UserModel(build=Collections, batch=vectors, loss_fn=F.cross_entropy),
    "parametrized": UserModel(build=Parametrized, batch=vectors, loss_fn=F.cross_entropy),
    **STYLES,
    **STATES,
}
