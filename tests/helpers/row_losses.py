"""Losses of y[b, s, w], a mask [b, s] and classes [b, s], by what they make of the rows b."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

ROWS, LENGTH, WIDTH = 4, 6, 8  # of a sample batch

Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def tokens(y: Tensor) -> Tensor:
    return y.square().sum(-1)


def infonce(y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    z = y.mean(1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


def two_views(y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    both = torch.cat([y, 3 * y.detach()]).flatten(1)
    first, second = both.chunk(2)
    rows = len(y)
    return (first * second).mean() + both[rows:].mean() + (both[:rows] - second).square().mean()


def balanced(y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    choices = F.one_hot(y.argmax(-1), WIDTH).float().mean((0, 1))
    return y.mean() + (choices * y.softmax(-1).mean((0, 1))).sum()


def last_token(y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    at = mask.long().sum(1) - 1
    return F.cross_entropy(y[torch.arange(y.shape[0]), at], labels[:, 0])


def thresholded(y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    found = torch.where(y.amax(-1) > 0.5, y.argmax(-1), -100)
    return F.cross_entropy(y.flatten(0, 1), found.flatten())


def clamped(y: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """T5's clamp, and one that some rows need: they overflow where their first class is odd."""
    scores = y @ y.transpose(1, 2)
    scores = torch.where(scores < scores.mean(-1, keepdim=True), -torch.inf, scores)
    y = y + scores.softmax(-1) @ y
    bound = torch.where(torch.isinf(y).any(), 0.1, torch.finfo(y.dtype).max)
    y = torch.clamp(y, min=-bound, max=bound)
    high = y + 2 * (torch.finfo(y.dtype).max * (labels[:, :1, None] % 2))
    bad = torch.isfinite(high).all().logical_not() | (high != high).any()
    return y.mean() + torch.where(bad, high.clamp(-9, 9), high).mean()


def scaled(y: Tensor, bit: Tensor) -> Tensor:
    return torch.where(bit, y, 2 * y).mean()


EXACT: dict[str, Loss] = {
    "mean": lambda y, m, t: y.square().mean(),
    "cross-entropy": lambda y, m, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "class weights": lambda y, m, t: F.cross_entropy(
        y.flatten(0, 1), t.flatten(), torch.arange(1, WIDTH + 1) / WIDTH
    ),
    "sum": lambda y, m, t: y.square().sum(),
    "mean of row sums": lambda y, m, t: tokens(y).sum(1).mean(),
    "by the batch's rows": lambda y, m, t: y.square().sum() / y.shape[0],
    "cross-entropy by rows": lambda y, m, t: (
        F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / y.shape[0]
    ),
    "cross-entropy by a tensor of rows": lambda y, m, t: (
        F.cross_entropy(y.flatten(0, 1), t.flatten()) * torch.tensor(float(len(y))).sqrt()
    ),
    "cross-entropy by a root of rows": lambda y, m, t: (
        F.cross_entropy(y.flatten(0, 1), t.flatten()) * len(y) ** 0.5
    ),
    "masked mean": lambda y, m, t: (tokens(y) * m).sum() / m.sum(),
    "masked mean, at least 1": lambda y, m, t: (tokens(y) * m).sum() / m.float().sum().clamp(min=1),
    "masked by row": lambda y, m, t: ((tokens(y) * m).sum(1) / m.sum(1)).mean(),
    "by weights of the batch": lambda y, m, t: (tokens(y) * (m / m.sum())).sum(),
    "per position": lambda y, m, t: ((tokens(y) * m).sum(0) / m.sum(0)).mean(),
    "several": lambda y, m, t: y.mean() + 0.1 * y.abs().sum() - torch.stack([y.sum(), y.mean()])[0],
    "rows by how many they are": lambda y, m, t: (3 * y / len(y) ** 0.5).tanh().square().mean(),
    "cross-entropy of rows by how many they are": lambda y, m, t: F.cross_entropy(
        (3 * y / len(y)).flatten(0, 1), t.flatten()
    ),
    "row by row": lambda y, m, t: torch.stack([x.softmax(-1).mean() for x in y]).mean(),
    "row by number": lambda y, m, t: torch.stack([y[i].exp().mean() for i in range(len(y))]).mean(),
    "two views": two_views,
    "last token": last_token,
    "scaled by the longest": lambda y, m, t: y.mean() / m.sum(1).max(),
    "argmax as the target": lambda y, m, t: F.cross_entropy(
        y.flatten(0, 1), y.argmax(-1).flatten()
    ),
    "clamped where some overflows": clamped,
    "attention": lambda y, m, t: F.scaled_dot_product_attention(y, y, y).mean(),
    # of operators without a rule, which are tried on numbers
    "quantile of each token": lambda y, m, t: y.quantile(0.3, dim=-1).mean(),
    "renormed rows": lambda y, m, t: (y * y.renorm(2, 0, 0.1)).mean(),
    "turned rows": lambda y, m, t: (y * y.rot90(2, (1, 2))).mean(),
    "its own elements": lambda y, m, t: y.masked_scatter((m | True)[..., None], 2 * y).mean(),
}  # fmt: skip
MEET: dict[str, tuple[Loss, str]] = {
    "infonce": (infonce, "matmul"),
    "dice": (lambda y, m, t: 1 - 2 * (y * y.detach()).sum() / y.abs().sum(), "div"),
    "ratio of the model's": (lambda y, m, t: (y * (y > 0)).sum() / (y > 0).sum(), "div"),
    "load balancing": (balanced, "mul"),
    "statistics by hand": (lambda y, m, t: (y - y.mean(0)).square().mean(), "sub"),
    "a bit": (lambda y, m, t: scaled(y, (y > 0.5).any()), "any"),
    "a bit of masked scores": (
        lambda y, m, t: scaled(y, y.masked_fill(~m[..., None], -torch.inf).isinf().all()), "all"
    ),
    "a bit of poles": (lambda y, m, t: scaled(y, y.detach().relu().log().isinf().any()), "any"),
    "variance": (lambda y, m, t: y.var(), "var"),
    "pairs": (lambda y, m, t: (y[:, None] - y[None]).square().mean(), "sub"),
    "mixed up": (lambda y, m, t: (y * y.flip(0)).mean(), "flip"),
    "halves": (lambda y, m, t: (y.chunk(2)[0] * y.chunk(2)[1]).mean(), "chunk"),
    "scan over rows": (lambda y, m, t: y.cumsum(0).mean(), "cumsum"),
    "exponential": (lambda y, m, t: y.mean().exp(), "exp"),
    "labels by threshold": (thresholded, "cross_entropy_loss"),
    "the first row": (lambda y, m, t: (y * y[0]).mean(), "select"),
    "quantile": (lambda y, m, t: (y - y.quantile(0.3, dim=0)).square().mean(), "quantile"),
    "median": (lambda y, m, t: (y - y.nanmedian()).square().mean(), "nanmedian"),
    "taken by number": (lambda y, m, t: (y[..., 0] * y.take(t)).mean(), "take"),
    "written by number": (lambda y, m, t: y.put(t, 2 * y[..., 0]).square().mean(), "put"),
    "turned": (lambda y, m, t: (y * y.rot90(2, (0, 1))).mean(), "rot90"),
    "renormed columns": (lambda y, m, t: (y * y.renorm(2, 2, 0.1)).mean(), "renorm"),
    "diagonal": (lambda y, m, t: y.mean() * y[:, :4, 0].trace(), "trace"),
    "product of rows": (lambda y, m, t: torch.kron(y[:, 0], y[:, 1]).square().mean(), "kron"),
    "elements in turn": (
        lambda y, m, t: y.masked_scatter(m[..., None], torch.arange(999.0)).mean(),
        "masked_scatter",
    ),
    "shuffled": (lambda y, m, t: (y * y[torch.arange(len(y)).flip(0)]).mean(), "index"),
}  # fmt: skip
