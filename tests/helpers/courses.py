"""Forwards that ask for values of their batch: sizes of parts, flags of padding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import nn

SIZES = torch.tensor([3, 1, 4])  # of the parts of eight tokens
FLAGS = torch.tensor([True, True, False, True])


def split(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """Attention-like: each part of the tokens by itself."""
    parts = torch.split(x, sizes.tolist(), dim=1)
    return torch.cat([part - part.mean(1, keepdim=True) for part in parts], 1)


def branches(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x * 2 if flags.all() else x * (sizes.max().item() + 1)


def selects(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x[flags]


def selects_all(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    some = sizes > 0
    some |= sizes == 0
    return x[:, some.repeat(3)[:8]]


def selects_and_more(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x[flags, sizes[1]]


def selects_by_one_flag(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x[flags[0]][:, :, sizes[0]]


def selects_a_slice(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(x)
    mask[:, : sizes[0]] = 1
    return (x * mask)[:, : sizes[2] // 2]


def views(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), sizes[2], sizes[2] // 2, 6).cumsum(2)


def counts(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x.sum(1)[flags.nonzero()[:, 0]] * torch.unique(sizes).numel()


def repeats(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x[:, :3], sizes, dim=1) * x


def joins(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([sizes[:k].sum() for k in range(4)])
    return torch.cat([x[:, a:b].cumsum(1) for a, b in pairwise(ends)], 1)


def writes(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros(8, dtype=torch.bool)
    kept[: int(sizes[2])] = True
    return x[:, kept]


def asks_twice(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.long)
    for size in sizes:
        total += size
        x = x * total.item()
    return x


def masks(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(x, flags[:, None, None]).view(-1, 6)


def by_numpy(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros(8, dtype=torch.bool)
    kept[np.array([0, 2])] = True
    (places,) = np.nonzero(flags.numpy())
    return x[places][:, kept] * sizes.numpy()[0]


def splits_by_list(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.cumsum(1) for part in torch.split(x, list(sizes), 1)], 1)


def catches(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    try:
        factor = int(sizes[0])
    except Exception:  # noqa: BLE001 - as users do
        factor = 1
    return x * factor


def asserts(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    torch._assert(flags.any(), "some flag")
    return x[:, :2] / sizes.float().log().tolist()[1] if sizes.min() > 1 else x


KINDS = [
    split, branches, selects, selects_all, selects_and_more, selects_by_one_flag, selects_a_slice,
    views, counts, repeats, joins, writes, asks_twice, masks, by_numpy, splits_by_list, catches,
    asserts,
]  # fmt: skip


class Model(nn.Module):
    def __init__(self, way: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.way = way

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        return self.last(self.way(self.first(x).tanh(), sizes, flags)).square().mean()


def batch_of(sizes: torch.Tensor = SIZES, flags: torch.Tensor = FLAGS) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 8, 6), "sizes": sizes, "flags": flags}
