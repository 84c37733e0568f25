"""Small models with parts that no tracer follows: loops, branches, routing, kernels, autograd
Functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright import leaf

VOCAB, WIDTH, LENGTH = 32, 16, 6
INNER = 2 * WIDTH


@leaf(rule="b _ d, d, d _ -> b _ d")
class Scan(nn.Module):
    """A recurrence over the sequence; results in a dict, with a None and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(INNER) * 0.1)
        self.mix = nn.Parameter(torch.randn(INNER, 3) * 0.3)

    def forward(self, x: Tensor, *, gate: Tensor | None = None) -> dict[str, Any]:
        state = x.new_zeros(x.shape[0], x.shape[2], self.mix.shape[1])
        made = []
        for t in range(x.shape[1]):
            state = torch.sigmoid(self.decay).unsqueeze(-1) * state
            state = state + x[:, t].unsqueeze(-1) * self.mix
            made.append(torch.tanh(state).sum(-1))
        return {"y": torch.stack(made, 1), "gate": gate, "steps": x.shape[1]}


class Rounded(torch.autograd.Function):
    """Straight through; nothing is declared about it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: float) -> Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@leaf(rule="*d -> *d")
class Swish(torch.autograd.Function):
    """A custom activation with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grads[0] * (s + x * s * (1 - s))


class Branch(nn.Module):
    """Asks for a value, and counts its calls."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(INNER, INNER)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        self.seen += 1
        if y.sum() > 0:  # the condition that messages name
            y = 2 * y
        return y


class Routed(nn.Module):
    """Rows go to one of two experts, however many there are of each."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(INNER, 2)
        self.experts = nn.ModuleList(nn.Linear(INNER, INNER) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero(as_tuple=True)
            made = made.index_put(rows, expert(x[rows]) * weight[rows].unsqueeze(-1))
        return made


@leaf(rule="b s i, o i -> b s o", result=lambda x, w: x.new_empty(*x.shape[:2], len(w)))
def kernel(x: Tensor, w: Tensor) -> Tensor:
    """Reads addresses, as kernels do, so that fake tensors are of no use to it."""
    assert x.is_contiguous() and w.is_contiguous()
    assert x.data_ptr() and w.data_ptr()
    return torch.einsum("bsi,oi->bso", x, w)


@leaf
class Noisy(nn.Module):
    """Draws random numbers in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training) + 0.1 * torch.randn_like(x)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        makers = {"scan": Scan, "branch": Branch, "routed": Routed, "noisy": Noisy}
        self.part = makers[kind]() if kind in makers else nn.Identity()
        if kind == "kernel":
            self.weight = nn.Parameter(torch.randn(INNER, INNER) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(self.up(self.norm(x)))
        if self.kind == "scan":
            y = y["y"] * (y["steps"] / LENGTH)
        elif self.kind == "kernel":
            y = kernel(y, self.weight)
        elif self.kind == "rounded":
            y = Rounded.apply(y, 8.0)
        elif self.kind == "swish":
            y = Swish.apply(y)
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of(kinds: Sequence[str]) -> Model:
    torch.manual_seed(3)
    return Model(kinds)


def batch(rows: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (2, rows, LENGTH), generator=generator)
    return ids[0], ids[1]
