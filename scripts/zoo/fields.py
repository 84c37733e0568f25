"""Networks of fields as their authors write them: an equation's residual, and images from text by
double-stream blocks; and a published model under adapters."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright
from scripts.zoo.from_transformers import built, decoder
from scripts.zoo.more_written import LoRA, noise
from scripts.zoo.registry import IMAGES, SMALL, VOCAB, Built, causal_batch, entry, ids


class Residual(nn.Module):
    """Of u_t + u u_x = 0.01 u_xx, by derivatives of the field u(x, t) (physics-informed:
    arXiv:1711.10561)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [2, *[width] * layers]
        pairs = itertools.pairwise(widths)
        self.field = nn.Sequential(
            *(part for a, b in pairs for part in (nn.Linear(a, b), nn.Tanh())), nn.Linear(width, 1)
        )

    def forward(self, at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        u = self.field(at)[:, 0]
        (slope,) = torch.autograd.grad(u.sum(), at, create_graph=True)
        (curve,) = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)
        return slope[:, 1] + u * slope[:, 0] - 0.01 * curve[:, 0]


@partial(meshwright.leaf, rule="b _ -> b", result=lambda at: at[:, 0])
class ResidualLeaf(Residual):
    """The same, run as it is written on a rank's rows."""


class PINN(nn.Module):
    def __init__(self, residual: nn.Module) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, at: Tensor) -> dict[str, Tensor]:
        return {"loss": self.residual(at).square().mean()}


class Stream(nn.Module):
    """One stream of a double block: its own norms, products and modulation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.of_q, self.of_k = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def start(self, x: Tensor, c: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Queries, keys and values (b, h, s, d); shifts, scales and gates (b, 1, w)."""
        changes = list(self.modulation(F.silu(c))[:, None].chunk(6, -1))
        h = self.norm(x) * (1 + changes[1]) + changes[0]
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return [self.of_q(q), self.of_k(k), v], changes

    def end(self, x: Tensor, seen: Tensor, changes: list[Tensor]) -> Tensor:
        x = x + changes[2] * self.out(seen)
        h = self.norm(x) * (1 + changes[4]) + changes[3]
        return x + changes[5] * self.down(F.gelu(self.up(h), approximate="tanh"))


class DoubleBlock(nn.Module):
    """Attention over words and patches together, all else apart (MM-DiT: arXiv:2403.03206)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.patches = Stream(width, heads), Stream(width, heads)

    def forward(self, words: Tensor, patches: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        of_words, word_changes = self.words.start(words, c)
        of_patches, patch_changes = self.patches.start(patches, c)
        q, k, v = (torch.cat(pair, 2) for pair in zip(of_words, of_patches, strict=True))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        count = words.shape[1]
        words = self.words.end(words, seen[:, :count], word_changes)
        return words, self.patches.end(patches, seen[:, count:], patch_changes)


class Flow(nn.Module):
    """Velocities of patches from noise to an image, given words and the time (rectified flow)."""

    def __init__(self, width: int, heads: int, layers: int, channels: int, text: int) -> None:
        super().__init__()
        self.of_words, self.of_patches = nn.Linear(text, width), nn.Linear(channels, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DoubleBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, channels)

    def forward(self, image: Tensor, noise: Tensor, words: Tensor, t: Tensor) -> dict[str, Tensor]:
        way = t[:, None, None]
        patches = self.of_patches((1 - way) * image + way * noise)
        words, c = self.of_words(words), self.time(t[:, None])
        for block in self.blocks:
            words, patches = block(words, patches, c)
        return {"loss": F.mse_loss(self.head(self.norm(patches)), noise - image)}


def equation(rows: int, size: str, kind: type[Residual]) -> Built:
    width, layers = (32, 3) if size == SMALL else (512, 8)
    return Built(model=PINN(kind(width, layers)), batch={"at": noise(rows, 2)})


@entry("PINN", "user", IMAGES, refused="calls autograd")
def _pinn(size: str, rows: int) -> Built:
    return equation(rows, size, Residual)


@entry("PINN, a leaf", "user", IMAGES)
def _pinn_leaf(size: str, rows: int) -> Built:
    return equation(rows, size, ResidualLeaf)


@entry("Flux", "user", IMAGES)
def _flux(size: str, rows: int) -> Built:
    small = size == SMALL
    sizes = (64, 4, 4, 16, 24) if small else (3072, 24, 19, 64, 4096)
    length, count = (6, 16) if small else (512, 4096)
    image, far = noise(2, rows, count, sizes[3])
    words, t = noise(rows, length, sizes[4]), ids(rows, 1, 1000)[:, 0] / 1000
    batch = {"image": image, "noise": far, "words": words, "t": t}
    return Built(model=Flow(*sizes), batch=batch)


@entry("Llama, LoRA", "user")
def _llama_lora(size: str, rows: int) -> Built:
    """Every product of attention adapted, as peft does."""
    small = size == SMALL
    options = {"vocab_size": VOCAB, **decoder(kv_heads=2)} if small else {}
    model = built("LlamaConfig", "LlamaForCausalLM", options)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if name.endswith("self_attn"):
                setattr(module, part, LoRA(getattr(module, part), 4 if small else 16))
    return Built(model=model, batch=causal_batch(rows, 16 if small else 2048, VOCAB))
