"""Models of torch.nn, and as users write them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.zoo.registry import IMAGES, SMALL, VOCAB, Built, entry, ids, pixels, random_numbers


class Seq2Seq(nn.Module):
    """`nn.Transformer` between embeddings and a head."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, ffn: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.transformer = nn.Transformer(
            width, heads, layers, layers, ffn, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        hidden = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(hidden)


class LSTM(nn.Module):
    """A language model of `nn.LSTM` layers."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class NanoBlock(nn.Module):
    """Fused QKV, written as in many small GPT repositories."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(w, dim=2)
        q, k, v = (t.view(b, s, self.heads, w // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, s, w))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """A GPT in one file, embeddings tied, returning (logits, loss)."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(NanoBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return {"logits": logits, "loss": loss}


class FunctionalMLP(nn.Module):
    """Parameters in a list, no modules."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = x + torch.tanh(x @ w)
        return x


class UNet(nn.Module):
    """Down and up again with skips across; group norm, strided and transposed convolutions."""

    def __init__(self, channels: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(channels))
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1)
        self.down = nn.ModuleList(self._block(a, b, 2) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(self._block(2 * a, a, 1) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(channels[0], classes, 1)

    @staticmethod
    def _block(inner: int, outer: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride=stride, padding=1), nn.GroupNorm(4, outer), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)


def sequence_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@entry("nn.Transformer", "torch")
def _transformer(size: str, rows: int) -> Built:
    vocab, length = (VOCAB, 16) if size == SMALL else (32000, 512)
    sizes = (64, 4, 2, 128) if size == SMALL else (1024, 16, 6, 4096)
    tokens = ids(rows, length, vocab)
    return Built(
        model=Seq2Seq(vocab, *sizes),
        batch=(tokens, tokens.clone(), tokens.clone()),
        loss_fn=sequence_loss,
    )


@entry("nn.LSTM", "torch")
def _lstm(size: str, rows: int) -> Built:
    vocab, length = (VOCAB, 16) if size == SMALL else (32000, 256)
    model = LSTM(vocab, *((32, 2) if size == SMALL else (2048, 4)))
    tokens = ids(rows, length, vocab)
    return Built(model=model, batch=(tokens, tokens.clone()), loss_fn=sequence_loss)


@entry("nanoGPT", "user")
def _nanogpt(size: str, rows: int) -> Built:
    vocab, length = (VOCAB, 16) if size == SMALL else (50304, 1024)
    model = NanoGPT(vocab, *((64, 4, 4) if size == SMALL else (1600, 25, 48)), length)
    tokens = ids(rows, length, vocab)
    return Built(model=model, batch={"idx": tokens, "targets": tokens.clone()})


@entry("functional MLP", "user")
def _functional(size: str, rows: int) -> Built:
    width, layers = (32, 8) if size == SMALL else (8192, 16)
    x = torch.randn(rows, width, generator=random_numbers(), device="cpu")
    return Built(model=FunctionalMLP(width, layers), batch=(x, x.clone()), loss_fn=F.mse_loss)


@entry("U-Net", "user", IMAGES)
def _unet(size: str, rows: int) -> Built:
    channels = (16, 32, 64) if size == SMALL else (64, 128, 256, 512, 1024)
    side, classes = (16, 4) if size == SMALL else (256, 21)
    labels = torch.randint(classes, (rows, side, side), generator=random_numbers(), device="cpu")
    return Built(
        model=UNet(channels, classes), batch=(pixels(rows, side), labels), loss_fn=F.cross_entropy
    )
