"""Models of the zoo that are no plain stack: an encoder-decoder, a mixture of experts, a U-Net.

What they ask of a pipeline that a stack does not: an encoder's output that every later stage reads,
one position bias for all layers of a tower, a loss term that every layer adds to, skip connections
over several cuts, and dims that the batch's factor is folded into.
"""

import torch
import transformers
from torch import nn
from torch.nn import functional as F


def t5(*, vocab: int, inner: int = 64, layers: int = 2) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=vocab,
        d_model=32,
        d_kv=8,
        d_ff=inner,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="gated-silu",
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config).train()


class Experts(nn.Module):
    """Each token's `topk` of stacked gated experts, in the dense form: every expert sees every
    token, and what the router did not choose is weighted by zero."""

    def __init__(self, *, width: int, inner: int, experts: int, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output, and its load-balancing loss: Σ_e (share of tokens) · (mean weight),
        times the number of experts (Switch Transformer, arXiv 2101.03961)."""
        weights = self.router(x).softmax(-1)
        chosen = (weights >= weights.topk(self.topk).values[..., -1:]).to(x.dtype)
        kept = weights * chosen
        inner = F.silu(torch.einsum("bsh,ehf->bsef", x, self.gate))
        inner = inner * torch.einsum("bsh,ehf->bsef", x, self.up)
        out = torch.einsum("bsef,efh->bsh", inner * kept.unsqueeze(-1), self.down)
        balance = (chosen.mean((0, 1)) * weights.mean((0, 1))).sum() * weights.shape[-1]
        return out, balance


class MoELayer(nn.Module):
    def __init__(self, *, width: int, heads: int, experts: int, topk: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.experts = Experts(width=width, inner=2 * width, experts=experts, topk=topk)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, s, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            m(y).view(b, s, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, -1))
        out, balance = self.experts(self.norm2(x))
        return x + out, balance


class MoE(nn.Module):
    """A language model of expert layers; returns logits and the sum of the layers' balance."""

    def __init__(self, *, vocab: int, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            MoELayer(width=width, heads=4, experts=4, topk=2) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids)
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.out(self.norm(x)), total


def moe_loss(made: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    logits, balance = made
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * balance


class ConvPair(nn.Module):
    """Two convolutions, each normalised per image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.n1 = nn.GroupNorm(2, outputs)
        self.c2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.n2 = nn.GroupNorm(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.n2(self.c2(F.silu(self.n1(self.c1(x))))))


class UNet(nn.Module):
    """Two levels down and up again; each level up reads what the same level down made."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([ConvPair(width, width), ConvPair(width, 2 * width)])
        self.middle = ConvPair(2 * width, 2 * width)
        self.up = nn.ModuleList([ConvPair(4 * width, 2 * width), ConvPair(3 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(x), []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = level(torch.cat([x, skips.pop()], 1))
        return self.out(x)
