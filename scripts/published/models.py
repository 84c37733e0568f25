"""Reference models: decoder-only Transformers by their published dims.

Only shapes matter here: these models live on `meta`, are traced, and never hold a weight. One class
covers the families: GPT (layer norm, biases, learned positions, two-matrix MLP) and Llama (RMS
norm, no biases, rotary positions, gated MLP, fewer key-value heads).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.moe import MoE
from meshwright.profiles.inputs import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): queries and keys have `plain` + `rotary`
    dims per head, values `value`; keys and values are made from `kv_rank` numbers per token,
    queries from `q_rank` (0: from the token itself)."""

    q_rank: int
    kv_rank: int = 512
    plain: int = 128
    rotary: int = 64
    value: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerDims:
    """Sizes and style of a decoder-only Transformer.

    `attention` is "fused" (scores never written: flash, SDPA) or "written" (scores, softmax and
    their product as separate kernels). `activation` is "gelu", "relu2" (squared ReLU) or "swiglu"
    (gated). `positions` is "learned", "rotary" or "none" (ALiBi adds no tensor of its own).
    `causal` is False for encoders. `head_dim` is hidden / heads where it is 0; `latent` makes the
    attention multi-head latent attention.

    With `experts`, all layers but the first `dense_layers` send each token to `topk` experts of
    width `expert_ffn`, and to a shared one of width `shared_ffn` where that is not 0; `ffn` is the
    width of the dense layers.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    activation: str = "gelu"
    norm: str = "layer"
    positions: str = "learned"
    bias: bool = True
    attention: str = "fused"
    dropout: float = 0.0
    tied: bool = True
    causal: bool = True
    head_dim: int = 0
    latent: Latent | None = None
    experts: int = 0
    topk: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
            if self.hidden % self.heads:
                raise ArgumentError(
                    "without a head_dim, hidden must be a multiple of heads",
                    place=f"hidden={self.hidden}, heads={self.heads}",
                    way_out="give head_dim, or another of the two",
                )
        if self.heads % self.kv_heads:
            raise ArgumentError(
                "heads must be a multiple of kv_heads",
                place=f"heads={self.heads}, kv_heads={self.kv_heads}",
                way_out="give another of the two",
            )
        if self.experts and not (self.expert_ffn and 1 <= self.topk <= self.experts):
            raise ArgumentError(
                "experts need a width, and topk from 1 to experts",
                place=f"experts={self.experts}, topk={self.topk}, expert_ffn={self.expert_ffn}",
                way_out="give expert_ffn, and topk in that range",
            )


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        # as eager PyTorch composes it, in fp32; a compiler or a hand-written kernel fuses it
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled.to(x.dtype) * self.weight


def _norm(dims: TransformerDims) -> nn.Module:
    return nn.LayerNorm(dims.hidden) if dims.norm == "layer" else RMSNorm(dims.hidden)


class Attention(nn.Module):
    """Multi-head attention with grouped queries: [b, s, hidden] -> [b, s, hidden].

    Queries, keys and values of a group of heads lie together, so that one split serves all.
    """

    def __init__(self, dims: TransformerDims) -> None:
        super().__init__()
        self.dims = dims
        wide = (dims.heads + 2 * dims.kv_heads) * dims.head_dim
        self.qkv = nn.Linear(dims.hidden, wide, bias=dims.bias)
        self.proj = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=dims.bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        dims = self.dims
        b, s, _ = x.shape
        group = dims.heads // dims.kv_heads
        parts = self.qkv(x).view(b, s, dims.kv_heads, group + 2, dims.head_dim)
        q = parts[:, :, :, :group].flatten(2, 3).transpose(1, 2)
        k, v = parts[:, :, :, group].transpose(1, 2), parts[:, :, :, group + 1].transpose(1, 2)
        if dims.positions == "rotary":
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if dims.attention == "fused":
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dims.dropout, is_causal=dims.causal, enable_gqa=group > 1
            )
        else:
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = q @ k.transpose(-2, -1) * dims.head_dim**-0.5
            weights = F.softmax(scores.masked_fill(mask, -10000.0), -1)
            y = F.dropout(weights, dims.dropout) @ v
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, s, dims.heads * dims.head_dim))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention: [b, s, hidden] -> [b, s, hidden].

    Only the narrow latent is common to all heads; one rotary key serves them all.
    """

    def __init__(self, dims: TransformerDims, latent: Latent) -> None:
        super().__init__()
        self.heads, self.latent = dims.heads, latent
        wide = dims.heads * (latent.plain + latent.rotary)
        self.q_norm = RMSNorm(latent.q_rank) if latent.q_rank else None
        self.q_down = nn.Linear(dims.hidden, latent.q_rank, bias=False) if latent.q_rank else None
        self.q_up = nn.Linear(latent.q_rank or dims.hidden, wide, bias=False)
        self.kv_down = nn.Linear(dims.hidden, latent.kv_rank + latent.rotary, bias=False)
        self.kv_norm = RMSNorm(latent.kv_rank)
        self.kv_up = nn.Linear(
            latent.kv_rank, dims.heads * (latent.plain + latent.value), bias=False
        )
        self.proj = nn.Linear(dims.heads * latent.value, dims.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        of = self.latent
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(self.q_down(x)))
        else:
            q = self.q_up(x)
        q = q.view(b, s, self.heads, of.plain + of.rotary).transpose(1, 2)
        narrow, turned = self.kv_down(x).split([of.kv_rank, of.rotary], -1)
        kv = self.kv_up(self.kv_norm(narrow))
        kv = kv.view(b, s, self.heads, of.plain + of.value).transpose(1, 2)
        k, v = kv.split([of.plain, of.value], -1)
        q_plain, q_turned = q.split([of.plain, of.rotary], -1)
        q = torch.cat([q_plain, _rotate(q_turned, cos, sin)], -1)
        turned = _rotate(turned.unsqueeze(1), cos, sin).expand(b, self.heads, s, of.rotary)
        y = F.scaled_dot_product_attention(q, torch.cat([k, turned], -1), v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, s, self.heads * of.value))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    left, right = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, dims: TransformerDims) -> None:
        super().__init__()
        self.activation = dims.activation
        self.up = nn.Linear(dims.hidden, dims.ffn, bias=dims.bias)
        if dims.activation == "swiglu":
            self.gate = nn.Linear(dims.hidden, dims.ffn, bias=dims.bias)
        self.down = nn.Linear(dims.ffn, dims.hidden, bias=dims.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            inner = F.silu(self.gate(x)) * self.up(x)
        elif self.activation == "gelu":
            inner = F.gelu(self.up(x))
        else:
            inner = F.relu(self.up(x)).square()
        out: Tensor = self.down(inner)
        return out


class Layer(nn.Module):
    def __init__(self, dims: TransformerDims, *, sparse: bool) -> None:
        super().__init__()
        self.dropout = dims.dropout
        self.norm1, self.norm2 = _norm(dims), _norm(dims)
        self.attention = LatentAttention(dims, dims.latent) if dims.latent else Attention(dims)
        self.mlp: nn.Module = (
            MLP(dims)
            if not sparse
            else MoE(
                hidden=dims.hidden,
                ffn=dims.expert_ffn,
                experts=dims.experts,
                topk=dims.topk,
                shared=dims.shared_ffn,
            )
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x), cos, sin, mask), self.dropout)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout)


class Transformer(nn.Module):
    """(ids, labels), both (batch, seq_len) -> mean cross-entropy."""

    def __init__(self, dims: TransformerDims) -> None:
        super().__init__()
        self.dims = dims
        self.embedding = nn.Embedding(dims.vocab, dims.hidden)
        if dims.positions == "learned":
            self.positions = nn.Embedding(dims.seq_len, dims.hidden)
        self.layers = nn.ModuleList(
            Layer(dims, sparse=bool(dims.experts) and k >= dims.dense_layers)
            for k in range(dims.layers)
        )
        self.norm = _norm(dims)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        if dims.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        dims = self.dims
        x = self.embedding(ids)
        steps = torch.arange(dims.seq_len, device=ids.device)
        if dims.positions == "learned":
            x = x + self.positions(steps)
        x = F.dropout(x, dims.dropout)
        width = dims.latent.rotary if dims.latent else dims.head_dim
        half = torch.arange(0, width, 2, device=ids.device) / width
        angle = steps[:, None] * 10000.0**-half
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos(), angle.sin()
        mask = steps[:, None] < steps[None, :] if dims.causal else steps[:, None] < 0
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(dims: TransformerDims) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and a sample batch of two rows, both on `meta`."""
    with torch.device("meta"):
        model = Transformer(dims)
        ids = torch.zeros(2, dims.seq_len, dtype=torch.long)
    return model, (ids, ids)
