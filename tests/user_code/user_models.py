"""Small models as users write them, each with a habit that a planner may trip over: in outputs,
losses, state, what is trained, and usual layers that are written in ways of their own."""

from __future__ import annotations

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
    mean_square,
    sequences,
    token_loss,
    tokens,
    vectors,
)

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


# --- numbers in the batch, teachers, attributes --------------------------------------------------


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


class Annealed(Stack):
    """Numbers in the batch: a weight, a temperature, an exponent."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, beta: float, temperature: float, power: int
    ) -> torch.Tensor:
        logits = super().forward(x) / temperature
        penalty = logits.square().mean() * (1.0 - beta) ** power
        return F.cross_entropy(logits, labels) + penalty + beta * logits.mean()


def annealed(rows: int) -> Batch:
    x, labels = vectors(rows)
    beta, temperature = torch.rand(2).tolist()
    return {
        "x": x,
        "labels": labels,
        "beta": beta,
        "temperature": 0.5 + temperature,
        "power": int(torch.randint(1, 4, ())),
    }


class Centred(Stack):
    """Tensors in plain attributes: one replaced by every forward, one written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(WIDTH)
        self.spread = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - self.centre) / self.spread
        with torch.no_grad():
            self.spread.mul_(0.9).add_(x.square().mean(0), alpha=0.1)
        self.centre = 0.9 * self.centre + 0.1 * x.mean(0).detach()
        return super().forward(x)


# --- regions --------------------------------------------------------------------------------------


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


class MixedTypes(Stack):
    """One layer in double precision, with its casts written out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.up.weight.dtype)).to(x.dtype)
        return self.head(x.to(self.head.weight.dtype)).float()


class Devices(Stack):
    """Tensors made and moved where others are, as scripts for GPUs do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        device = next(self.parameters()).device
        x = x.to(device, non_blocking=True)
        ramp = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype) / x.shape[-1]
        x = x + ramp.to(self.head.weight) + torch.zeros(WIDTH).to(x.device)
        x = torch.cat([x.new_zeros(x.shape[0], 4), x[:, 4:]], dim=1)
        noise = torch.zeros_like(x, device=device)
        return F.cross_entropy(super().forward(x + noise), labels.to(device))


# --- ways to write attention ----------------------------------------------------------------------


class ComplexRotary(nn.Module):
    """Attention with rotary positions as complex numbers, Llama's original way."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer(
            "turns", torch.polar(torch.ones_like(angles), angles), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (self.q, self.k, self.v))
        q, k = self._turned(q), self._turned(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.turns[None, : x.shape[1], None]
        return torch.view_as_real(turned).flatten(3).type_as(x)


class EinsumAttention(nn.Module):
    """Attention by einsum with an additive mask by torch.where, and a pooler of the first token."""

    def __init__(self) -> None:
        super().__init__()
        size = (HEADS, WIDTH // HEADS)
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, *size) / WIDTH**0.5)
        self.out = nn.Parameter(torch.randn(*size, WIDTH) / WIDTH**0.5)
        self.pool, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("bsd,cdhe->cbshe", x, self.qkv).unbind(0)
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


# --- ways to write the rest -----------------------------------------------------------------------


class RowScores(nn.Module):
    """A function of one row by torch.vmap, which no trace can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def scores(row: torch.Tensor, *, scale: float) -> torch.Tensor:
            return row * torch.softmax(row * scale, 0)

        return torch.vmap(functools.partial(scores, scale=0.5))(x)


class Vmapped(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scores = RowScores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scores(self.layers[0](x)))


class InPlace(Stack):
    """Activations written in place, whole and by part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for layer in self.layers:
            x = layer(x).mul_(0.5)
            x[:, :4] += 1.0
            x[:, 4:8] = torch.tanh(x[:, 4:8])
        return self.head(F.silu(x, inplace=True))


class DenselyConnected(nn.Module):
    """A list of states between layers, a dict of branches, one module called at two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({n: Mlp() for n in ("slow", "fast")})
        self.joins = nn.ModuleList(nn.Linear((k + 1) * WIDTH, WIDTH) for k in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
        parts = {n: (m(x), m(pooled)) for n, m in self.branches.items()}
        states = [parts["slow"][0] + parts["fast"][1].repeat_interleave(2, dim=1)]
        for join in self.joins:
            states.append(torch.tanh(join(torch.cat(states, dim=-1))))
        return self.head(torch.stack(states).sum(0)[:, -1])


class StraightThrough(Stack):
    """Rounding with the gradient of the identity, and a detached branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = x + (torch.round(x * 4) / 4 - x).detach()
        with torch.no_grad():
            weight = torch.sigmoid(self.layers[1](x).mean(-1, keepdim=True))
        return self.head(self.layers[2](x) * weight + self.layers[3](x).detach())


class FloatBuffers(nn.Module):
    """A float32 buffer that meets a convolution and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("blur", torch.full((4, 1, 3), 1 / 3))
        self.register_buffer("basis", torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.body = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv1d(x.unflatten(-1, (4, -1)), self.blur, padding=1, groups=4)
        return self.body(self.conv(x).flatten(1) @ self.basis)


def classifying(
    build: Callable[[], nn.Module], batch: Callable[[int], Batch] = vectors, **given: Any
) -> UserModel:
    return UserModel(build=build, batch=batch, loss_fn=F.cross_entropy, **given)


USERS: Mapping[str, UserModel] = {
    "keywords only": UserModel(build=KeywordsOnly, batch=keywords),
    "dataclass output": UserModel(build=DataclassOutput, batch=vectors),
    "three losses": UserModel(build=TwoHeads, batch=two_targets, loss_fn=three_losses),
    "shared table": UserModel(build=SharedTable, batch=table_batch, loss_fn=tuple_loss),
    "own statistics": classifying(OwnStatistics),
    "hidden statistics": classifying(HiddenStatistics),
    "albert": UserModel(build=Albert, batch=tokens),
    "tied translator": UserModel(build=TiedTranslator, batch=translations),
    "frozen backbone": classifying(frozen_backbone),
    "lora": classifying(lora),
    "collections": classifying(Collections),
    "parametrized": classifying(Parametrized),
    "checkpointed": classifying(functools.partial(Checkpointed, dropout=0.2), own_masks=True),
    "autocast": classifying(Autocast, tolerance=2e-2),
    "mixed types": classifying(MixedTypes),
    "devices": UserModel(build=Devices, batch=vectors),
    "complex rotary": UserModel(build=ComplexRotary, batch=sequences, loss_fn=mean_square),
    "einsum attention": classifying(EinsumAttention, sequences),
    "torch attention": classifying(TorchAttention, padded),
    "vmapped": classifying(Vmapped),
    "in place": classifying(InPlace),
    "densely connected": classifying(DenselyConnected, sequences),
    "straight through": classifying(StraightThrough),
    "float buffers": classifying(FloatBuffers),
    "distilled": UserModel(build=Distilled, batch=vectors),
    "annealed": UserModel(build=Annealed, batch=annealed),
    "centred": classifying(Centred),
}
