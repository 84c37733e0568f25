"""Small models as users write them, each with habits that a planner may trip over: in outputs,
losses, state, what is trained, and usual layers that are written in ways of their own.

Sizes divide by 4. Activations are smooth (GELU, tanh), so that rounding can't move a value across a
kink. A batch is made for any number of rows.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.models.architectures import Lora

VOCAB, WIDTH, HEADS, LENGTH, CLASSES, LAYERS = 32, 16, 4, 12, 20, 4

Batch = dict[str, Any] | tuple[Any, ...]
LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """How to build a model and its batches. With `own_masks` its results depend on the runtime's
    dropout masks; `tolerance` is of relative differences, wider where it computes in halves. The
    buffers `once` are written by no rows, and so once a step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: LossFn | None = None
    own_masks: bool = False
    tolerance: float = 1e-5
    once: tuple[str, ...] = ()


# --- batches and losses ---------------------------------------------------------------------------


def vectors(rows: int) -> Batch:
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


def sequences(rows: int) -> Batch:
    return torch.randn(rows, LENGTH, WIDTH), torch.randint(CLASSES, (rows,))


def tokens(rows: int) -> Batch:
    ids, labels = torch.randint(VOCAB, (2, rows, LENGTH)).unbind()
    return {"ids": ids, "labels": labels}


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


class Stack(nn.Module):
    """Layers and a head; what most of these models differ from in one thing."""

    def __init__(self, outputs: int = CLASSES, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(width, dropout) for _ in range(LAYERS))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def holding(**attributes: Any) -> Callable[[nn.Module], None]:
    """Sets attributes of a model."""
    return lambda model: vars(model).update(attributes)


# --- outputs, inputs and losses -------------------------------------------------------------------


class KeywordsOnly(nn.Module):
    """Keyword arguments alone: None, flags, and numbers that choose the course or are inputs; a
    dict as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = Stack(VOCAB)

    def forward(
        self, *, ids: torch.Tensor, labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None, extra: torch.Tensor | None = None,
        scaled: bool = False, repeats: int = 1, **annealed: float,
    ) -> dict[str, Any]:  # fmt: skip
        x = self.embed(ids)
        if mask is not None:
            x = x * mask[..., None]
        for _ in range(repeats):
            x = x + extra if extra is not None else x * 1.5
        logits = self.body(x * WIDTH**0.5 if scaled else x) / annealed["temperature"]
        penalty = logits.square().mean() * (1.0 - annealed["beta"]) ** annealed["power"]
        loss = None if labels is None else token_loss(logits, labels) + penalty
        return {"logits": logits, "loss": loss, "states": [x, {"scaled": scaled}]}


def keywords(rows: int) -> Batch:
    mask = torch.ones(rows, LENGTH)
    mask[:, -2:] = 0.0
    fixed = {"mask": mask, "extra": None, "scaled": True, "repeats": 2}
    beta, temperature = torch.rand(2).tolist()
    numbers = {
        "beta": beta,
        "temperature": 0.5 + temperature,
        "power": int(torch.randint(1, 4, ())),
    }
    return {**tokens(rows), **fixed, **numbers}


@dataclass
class Answer:
    """A plain dataclass as an output, unknown to pytree."""

    logits: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class DataclassOutput(Stack):
    """Tensors made and moved where others are, as scripts for GPUs do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Answer:
        device = next(self.parameters()).device
        x = x.to(device, non_blocking=True)
        ramp = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype) / x.shape[-1]
        x = x + ramp.to(self.head.weight) + torch.zeros(WIDTH).to(x.device)
        x = torch.cat([x.new_zeros(x.shape[0], 4), x[:, 4:]], dim=1)
        logits = super().forward(x + torch.zeros_like(x, device=device))
        return Answer(logits=(logits, x), loss=F.cross_entropy(logits, labels.to(device)))


class SharedTable(nn.Module):
    """Positional inputs: two with rows, one without, which all rows share; a nested output for a
    loss of three terms over a dict of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = Stack()

    def forward(
        self, x: torch.Tensor, other: torch.Tensor, positions: torch.Tensor
    ) -> dict[str, Any]:
        joined = self.first(x) * torch.sigmoid(self.second(other)) + positions
        return {"heads": (self.body(joined).mean(1), joined), "inputs": [{"x": x}]}


def three_losses(output: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits, value = output["heads"]
    main = F.cross_entropy(logits, targets["label"], label_smoothing=0.1)
    auxiliary = F.l1_loss(value.mean(1), targets["value"])
    return main + 0.1 * auxiliary + 1e-2 * logits.logsumexp(-1).square().mean()


def table_batch(rows: int) -> Batch:
    x, label = sequences(rows)
    targets = {"label": label, "value": torch.randn(rows, WIDTH)}
    return x, torch.randn_like(x), torch.randn(LENGTH, WIDTH), targets


# --- state ----------------------------------------------------------------------------------------


class OwnStatistics(Stack):
    """What forward writes: a counter, a mean of the batch by assignment and a variance in place, as
    buffers and as plain attributes, all used by the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.centre, self.spread = torch.zeros(WIDTH), torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = (x - self.centre) / self.spread
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.variance.mul_(0.9).add_(x.var(0, unbiased=False), alpha=0.1)
            self.spread.mul_(0.9).add_(x.square().mean(0), alpha=0.1)
        self.centre = 0.9 * self.centre + 0.1 * x.mean(0).detach()
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
        found = self.embed(source), self.decoder_embed(target[:, :-1])
        out = self.inner(*found, tgt_mask=ahead, tgt_is_causal=True)
        return token_loss(self.head(out), target[:, 1:])


def translations(rows: int) -> Batch:
    return torch.randint(VOCAB, (rows, LENGTH)), torch.randint(VOCAB, (rows, LENGTH + 1))


# --- what is trained ------------------------------------------------------------------------------


def frozen_backbone() -> nn.Module:
    model = Stack()
    model.layers.requires_grad_(False)
    return model


def lora(rank: int = 4, **given: int) -> nn.Module:
    model = Stack(**given).requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Lora(layer.up, rank), Lora(layer.down, rank)
    return model


class Collections(nn.Module):
    """Parameters in lists and dicts, some of them unused by this forward; weights that are made of
    parameters, of which spectral norm steps its power iteration too."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(LAYERS, WIDTH, WIDTH) / WIDTH**0.5
        self.weights = nn.ParameterList(drawn.clone().unbind())
        self.biases = nn.ParameterDict({f"b{k}": torch.zeros(WIDTH) for k in range(LAYERS + 1)})
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 32))
        self.down = parametrizations.spectral_norm(nn.Linear(32, WIDTH))
        self.heads = nn.ModuleDict({n: nn.Linear(WIDTH, CLASSES) for n in ("used", "unused")})
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, weight in enumerate(self.weights):
            x = x + torch.tanh(x @ weight + self.biases[f"b{k}"])
        x = x + self.down(F.gelu(self.up(x)))
        return sum(head(x) for name, head in self.heads.items() if name == "used") * self.scale


class Distilled(Stack):
    """A frozen teacher in inference mode, as a context and as a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(True)

    @torch.inference_mode()
    def taught(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.teacher[:2]:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        soft = self.taught(x).clone()
        with torch.inference_mode():
            softer = self.layers[0](x) * 2
            with torch.inference_mode(mode=False):
                extra = self.layers[1](x)
        loss = F.cross_entropy(super().forward(x), labels)
        return loss + F.mse_loss(extra, soft) + (extra * softer.clone()).mean()


# --- ways to write layers -------------------------------------------------------------------------


class Checkpointed(Stack):
    """Layers under torch.utils.checkpoint, reentrant and not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if x.is_leaf else x
        for k, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=k % 2 == 0)
        return self.head(x)


class Autocast(Stack):
    """A region in half precision with a part in full precision inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[1](x)
            with torch.autocast("cpu", enabled=False):
                x = self.layers[2](x.float())
            x = self.layers[3](x)
        return self.head(x.float())


class EinsumAttention(nn.Module):
    """Attention by einsum with a mask by torch.where, and a pooler of the first token; rotary
    positions as complex numbers, Llama's original way."""

    def __init__(self) -> None:
        super().__init__()
        size = (HEADS, WIDTH // HEADS)
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, *size) / WIDTH**0.5)
        self.out = nn.Parameter(torch.randn(*size, WIDTH) / WIDTH**0.5)
        self.pool, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        rates = 100.0 ** (-torch.arange(0, size[1], 2) / size[1])
        angles = torch.outer(torch.arange(LENGTH), rates)
        turns = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turns", turns, persistent=False)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.turns[None, : x.shape[1], None]
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("bsd,cdhe->cbshe", x, self.qkv).unbind(0)
        q, k = self._turned(q), self._turned(k)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / k.shape[-1] ** 0.5
        n = torch.arange(x.shape[1], device=x.device)
        seen = (n[:, None] >= n[None, :]) & (n[None, :] != 3)
        scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        mixed = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v)
        x = x + torch.einsum("bqhe,hed->bqd", mixed, self.out)
        return self.head(torch.tanh(self.pool(x[:, 0])))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention and nn.TransformerEncoder in training mode, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def padded(rows: int) -> Batch:
    x, label = sequences(rows)
    return x, torch.arange(LENGTH).expand(rows, LENGTH) >= LENGTH - 2, label


class RowScores(nn.Module):
    """A function of one row by torch.vmap, which no trace can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def scores(row: torch.Tensor, *, scale: float) -> torch.Tensor:
            return row * torch.softmax(row * scale, 0)

        return torch.vmap(functools.partial(scores, scale=0.5))(x)


class Vmapped(Stack):
    """Besides, rounding with the gradient of the identity, and a detached branch."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = RowScores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scores(self.layers[0](x))
        x = x + (torch.round(x * 4) / 4 - x).detach()
        with torch.no_grad():
            weight = torch.sigmoid(self.layers[1](x).mean(-1, keepdim=True))
        return self.head(self.layers[2](x) * weight + self.layers[3](x).detach())


class InPlace(Stack):
    """Activations written in place, whole and by part, by layers of which the first comes twice and
    the second is in double precision, with its casts written out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for layer in (*self.layers, self.layers[0]):
            x = layer(x.to(layer.up.weight.dtype)).to(x.dtype).mul_(0.5)
            x[:, :4] += 1.0
            x[:, 4:8] = torch.tanh(x[:, 4:8])
        return self.head(F.silu(x, inplace=True).to(self.head.weight.dtype)).float()


def classifying(
    build: Callable[[], nn.Module], batch: Callable[[int], Batch] = vectors, **given: Any
) -> UserModel:
    return UserModel(build=build, batch=batch, loss_fn=F.cross_entropy, **given)


SPECTRAL = tuple(f"down.parametrizations.weight.0.{vector}" for vector in ("_u", "_v"))
USERS: Mapping[str, UserModel] = {
    "keywords only": UserModel(build=KeywordsOnly, batch=keywords),
    "dataclass output": UserModel(build=DataclassOutput, batch=vectors),
    "shared table": UserModel(build=SharedTable, batch=table_batch, loss_fn=three_losses),
    "own statistics": classifying(OwnStatistics, once=("steps",)), "lora": classifying(lora),
    "hidden statistics": classifying(HiddenStatistics),
    "tied translator": UserModel(build=TiedTranslator, batch=translations),
    "frozen backbone": classifying(frozen_backbone),
    "collections": classifying(Collections, once=SPECTRAL),
    "distilled": UserModel(build=Distilled, batch=vectors),
    "checkpointed": classifying(functools.partial(Checkpointed, dropout=0.2), own_masks=True),
    "autocast": classifying(Autocast, tolerance=2e-2),
    "einsum attention": classifying(EinsumAttention, sequences),
    "torch attention": classifying(TorchAttention, padded),
    "vmapped": classifying(Vmapped), "in place": classifying(InPlace),
}  # fmt: skip
