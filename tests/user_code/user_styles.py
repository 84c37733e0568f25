"""User models whose layers are usual and written in ways of their own: regions, attention,
functional code, operators in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.user_code.user_parts import (
    CLASSES,
    HEADS,
    LENGTH,
    WIDTH,
    Batch,
    Mlp,
    Stack,
    UserModel,
    mean_square,
    sequences,
    vectors,
)

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


STYLES: Mapping[str, UserModel] = {
    "checkpointed": UserModel(
        build=functools.partial(Checkpointed, dropout=0.2),
        batch=vectors,
        loss_fn=F.cross_entropy,
        own_masks=True,
    ),
    "autocast": UserModel(build=Autocast, batch=vectors, loss_fn=F.cross_entropy, tolerance=2e-2),
    "mixed types": UserModel(build=MixedTypes, batch=vectors, loss_fn=F.cross_entropy),
    "devices": UserModel(build=Devices, batch=vectors),
    "complex rotary": UserModel(build=ComplexRotary, batch=sequences, loss_fn=mean_square),
    "einsum attention": UserModel(build=EinsumAttention, batch=sequences, loss_fn=F.cross_entropy),
    "torch attention": UserModel(build=TorchAttention, batch=padded, loss_fn=F.cross_entropy),
    "vmapped": UserModel(build=Vmapped, batch=vectors, loss_fn=F.cross_entropy),
    "in place": UserModel(build=InPlace, batch=vectors, loss_fn=F.cross_entropy),
    "densely connected": UserModel(
        build=DenselyConnected, batch=sequences, loss_fn=F.cross_entropy
    ),
    "straight through": UserModel(build=StraightThrough, batch=vectors, loss_fn=F.cross_entropy),
    "float buffers": UserModel(build=FloatBuffers, batch=vectors, loss_fn=F.cross_entropy),
}
