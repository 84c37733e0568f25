"""Small models of each architecture."""

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

VOCAB, SEQUENCE = 96, 16


def gpt2(*, tied: bool, dropout: float = 0.0, layers: int = 3, **options: Any) -> nn.Module:
    sizes = {"n_embd": 32, "n_head": 4, "vocab_size": VOCAB}
    config = transformers.GPT2Config(
        n_layer=layers,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        **sizes | options,
    )
    return transformers.GPT2LMHeadModel(config).train()


class Lora(nn.Module):
    """A frozen linear layer and its two trained factors, as adapter libraries wrap one."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
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


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=VOCAB,
        max_position_embeddings=SEQUENCE,
        **options,
    )
    return transformers.LlamaForCausalLM(config).train()


def llama_tower() -> nn.Module:
    """Its head alone is trained."""
    model = llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def llama_lora(rank: int = 4) -> nn.Module:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        own, mlp = layer.self_attn, layer.mlp
        own.q_proj, own.v_proj = Lora(own.q_proj, rank), Lora(own.v_proj, rank)
        mlp.down_proj = Lora(mlp.down_proj, rank)
    return model


def bert(*, dropout: float = 0.0, **options: Any) -> nn.Module:
    sizes = {"num_hidden_layers": 3, "intermediate_size": 64, "vocab_size": VOCAB}
    config = transformers.BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **sizes | options,
    )
    return transformers.BertForMaskedLM(config).train()


class Residual(nn.Module):
    """Two convolutions with batch norm around a skip connection, with in-place operators."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b1 = nn.BatchNorm2d(outputs)
        self.c2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(outputs)
        self.act = nn.SiLU(inplace=True)
        self.down: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b2(self.c2(self.act(self.b1(self.c1(x)))))
        y += x if self.down is None else self.down(x)
        return self.act(y)


class ResNet(nn.Module):
    """A stem, three groups of residual blocks, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.pool = nn.AvgPool2d(3, 1, 1)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.avg = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.pool(F.silu(self.bn(self.conv(x))))))
        return self.fc(torch.relu(torch.flatten(self.avg(x), 1)))


class MLP(nn.Module):
    """Linear layers of one nn.Sequential, no further structure."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        pairs = (
            (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.net = nn.Sequential(*[module for pair in pairs for module in pair])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Recurrent(nn.Module):
    """One layer applied again and again, a bias that the loss does not depend on, and one that is
    not trained."""

    def __init__(self, width: int = 32, times: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.times = times
        self.detached = nn.Parameter(torch.ones(width))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.detached.detach() * self.frozen
        for _ in range(self.times):
            x = x + torch.tanh(self.again(x))
        return self.last(x)


class PlainBlock(nn.Module):
    """A pre-norm Transformer layer written by hand: fused QKV, explicit softmax attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (h // self.heads) ** -0.5
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """A GPT that returns logits, not a loss, and knows nothing of any library."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, width) * 0.1)
        self.layers = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        s = ids.shape[1]
        mask = torch.ones(s, s, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tokens(ids) + self.positions[:s]
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(self.norm(x))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
