"""Models whose tokens meet outside of attention, or in attention of other kinds."""

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from tests.models.architectures import SEQUENCE, VOCAB

WIDTH, HEADS, WINDOW = 32, 4, 6


def mistral() -> nn.Module:
    """Attention within a window shorter than the sequence."""
    config = transformers.MistralConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=SEQUENCE,
        sliding_window=WINDOW,
    )
    return transformers.MistralForCausalLM(config)


class Tokens(nn.Module):
    """A decoder with each way in which its tokens may meet: learned positions, each token mixed
    with its neighbours, attention with a bias that is learned, with another written out, with
    shared keys and fused; the mean of all tokens, the first token; a prediction less than tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Parameter(0.1 * torch.randn(1, SEQUENCE, WIDTH)),
        )
        self.bias = nn.Embedding(2 * SEQUENCE, HEADS)
        self.layers = nn.ModuleList(_Layer(kind) for kind in ("biased", "written", "shared"))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.whole = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        x = self.embed(ids) + self.positions
        x = x + 0.5 * F.pad(x, (0, 0, 1, -1)) + 0.25 * x.roll(-1, 1)
        places = torch.arange(SEQUENCE)
        apart = (places[:, None] - places[None, :]) + SEQUENCE
        bias = self.bias(apart).permute(2, 0, 1).unsqueeze(0)
        for layer in self.layers:
            x = layer(x, bias)
        x = x + self.whole(x.mean(1, keepdim=True)) + 0.1 * x[:, :1]
        logits = self.out(self.norm(x))[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


class _Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.keys = kind, 2 if kind == "shared" else HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * self.keys * WIDTH // HEADS)
        self.o, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 48),
            nn.Linear(48, WIDTH),
        )

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        k, v = self.kv(y).chunk(2, -1)
        q, k, v = (z.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for z in (self.q(y), k, v))
        y = self._attention(q, k, v, bias).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        return x + self.down(F.silu(self.up(self.norm2(x))))

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        if self.kind == "written":
            scores = q @ k.transpose(-2, -1) * 0.3
            later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
            return scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        if self.kind == "biased":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
