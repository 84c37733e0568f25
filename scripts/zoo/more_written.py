"""Models of other fields as their authors write them: diffusion, adapters, codebooks, adversaries,
graphs, recommendation."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.zoo.registry import IMAGES, SMALL, VOCAB, Built, entry, ids, pixels, random_numbers
from scripts.zoo.written import NanoGPT


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=random_numbers(), device="cpu")


class DiTBlock(nn.Module):
    """Attention and an MLP, shifted, scaled and gated by the timestep (arXiv:2212.09748)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(F.silu(c)).chunk(6, -1)
        b, s, w = x.shape
        h = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w)
        x = x + gate[:, None] * self.out(h)
        h = self.norm(x) * (1 + scale_2[:, None]) + shift_2[:, None]
        return x + gate_2[:, None] * self.down(F.gelu(self.up(h), approximate="tanh"))


class DiT(nn.Module):
    """Noise predicted from patches of a latent image and a timestep."""

    def __init__(self, width: int, heads: int, layers: int, side: int) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // 2) ** 2, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
        angles = t[:, None].float() * rates
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            h = block(h, c)
        predicted = F.fold(self.head(h).transpose(1, 2), x.shape[2:], kernel_size=2, stride=2)
        return {"loss": F.mse_loss(predicted, noise)}


class LoRA(nn.Module):
    """A frozen product and a trained one of low rank beside it (arXiv:2106.09685)."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Linear(inner.in_features, rank, bias=False)
        self.b = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2.0 * self.b(self.a(x))


class VQVAE(nn.Module):
    """An autoencoder over a codebook, with straight-through gradients (arXiv:1711.00937)."""

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1)
        )
        self.codebook = nn.Embedding(codes, width)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        z = self.encoder(image).permute(0, 2, 3, 1)
        e = self.codebook.weight
        distance = z.square().sum(-1, keepdim=True) - 2 * z @ e.T + e.square().sum(-1)
        q = self.codebook(distance.argmin(-1))
        kept = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        made = self.decoder((z + (q - z).detach()).permute(0, 3, 1, 2))
        return {"loss": F.mse_loss(made, image) + kept}


class Adversary(nn.Module):
    """A generator's step against a frozen discriminator."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(latent, width), nn.LeakyReLU(0.2), nn.Linear(width, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )
        self.discriminator.requires_grad_(False)

    def forward(self, z: Tensor) -> dict[str, Tensor]:
        return {"loss": F.softplus(-self.discriminator(self.generator(z))).mean()}


class GraphNet(nn.Module):
    """Convolutions over dense adjacency matrices, one graph a row; classes of graphs."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        widths = [features, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        degrees = edges.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            nodes = F.relu(layer(edges @ nodes / degrees))
        return self.head(nodes.mean(1))


class DLRM(nn.Module):
    """Dense features, embedded categories, and the products of all pairs (arXiv:1906.00091)."""

    def __init__(self, dense: int, tables: int, entries: int, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1)
        )

    def forward(self, dense: Tensor, categories: Tensor, clicked: Tensor) -> dict[str, Tensor]:
        x = self.bottom(dense)
        embedded = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        t = torch.stack([x, *embedded], 1)
        products = torch.bmm(t, t.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([x, products], 1)).squeeze(-1)
        return {"loss": F.binary_cross_entropy_with_logits(logits, clicked)}


@entry("DiT", "user", IMAGES)
def _dit(size: str, rows: int) -> Built:
    sizes = (64, 4, 3, 8) if size == SMALL else (1152, 16, 28, 32)
    x, target = noise(2, rows, 4, sizes[3], sizes[3])
    return Built(model=DiT(*sizes), batch={"x": x, "t": ids(rows, 1, 1000)[:, 0], "noise": target})


@entry("LoRA", "user")
def _lora(size: str, rows: int) -> Built:
    vocab, length = (VOCAB, 16) if size == SMALL else (50304, 1024)
    model = NanoGPT(vocab, *((64, 4, 4) if size == SMALL else (1600, 25, 48)), length)
    model.requires_grad_(False)
    for block in model.blocks:
        block.c_attn = LoRA(block.c_attn, 4 if size == SMALL else 16)
    tokens = ids(rows, length, vocab)
    return Built(model=model, batch={"idx": tokens, "targets": tokens.clone()})


@entry("VQ-VAE", "user", IMAGES)
def _vqvae(size: str, rows: int) -> Built:
    width, codes, side = (16, 32, 16) if size == SMALL else (256, 1024, 128)
    return Built(model=VQVAE(width, codes), batch={"image": pixels(rows, side)})


@entry("GAN", "user", IMAGES)
def _gan(size: str, rows: int) -> Built:
    latent, width = (16, 32) if size == SMALL else (128, 4096)
    return Built(model=Adversary(latent, width), batch={"z": noise(rows, latent)})


@entry("GNN", "user", IMAGES)
def _gnn(size: str, rows: int) -> Built:
    count, features = (8, 16) if size == SMALL else (128, 64)
    model = GraphNet(features, *((32, 3, 4) if size == SMALL else (512, 8, 10)))
    edges = (noise(rows, count, count) > 0).float()
    batch = noise(rows, count, features), edges, ids(rows, 1, 4)[:, 0]
    return Built(model=model, batch=batch, loss_fn=F.cross_entropy)


@entry("DLRM", "user", IMAGES)
def _dlrm(size: str, rows: int) -> Built:
    dense, tables, entries, width = (8, 4, 32, 16) if size == SMALL else (13, 26, 100000, 128)
    clicked = (noise(rows) > 0).float()
    return Built(
        model=DLRM(dense, tables, entries, width),
        batch={"dense": noise(rows, dense), "categories": ids(rows, tables, entries),
               "clicked": clicked},
    )  # fmt: skip
