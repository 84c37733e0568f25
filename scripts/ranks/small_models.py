"""Small models, and batches for them, whose plans are run on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

LENGTH, VOCABULARY, CLASSES = 128, 2048, 32


def gpt2(*, n_embd: int = 256, n_layer: int = 4) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_embd // 32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


class Residual(nn.Module):
    """Two convolutions with batch norm around a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b1 = nn.BatchNorm2d(outputs)
        self.c2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        return F.relu(y + self.skip(x))


class ConvNet(nn.Module):
    """A stem, six residual blocks that halve the image twice, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        widths = (32, 32, 64, 64, 128, 128)
        pairs = zip((32, *widths), widths, strict=False)
        self.layers = nn.ModuleList(Residual(a, b, 1 if a == b else 2) for a, b in pairs)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch for it, and the loss where the model does not return one."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[..., torch.Tensor] | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


def tokens(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, 3, 32, 32, generator=generator),
        torch.randint(CLASSES, (rows,), generator=generator),
    )


CASES: Mapping[str, Case] = {
    "tiny": Case(build=lambda: gpt2(n_embd=64, n_layer=2), batch=tokens),
    "gpt2": Case(build=gpt2, batch=tokens),
    "llama": Case(build=llama, batch=tokens),
    "bert": Case(build=bert, batch=tokens),
    "conv": Case(build=ConvNet, batch=images, loss_fn=F.cross_entropy),
}
