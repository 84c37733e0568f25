"""A dataset of token rows, and plans of a small model that is trained on it."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from meshwright import Overrides, ParallelModel
from tests.helpers import tiny
from tests.helpers.tiny import VOCAB, loss, net
from tests.user_code.user_runs import free_links

RANKS, ROWS, SAMPLES, LENGTH = 4, 8, 21, 6  # 2 whole batches and one of 5 rows
SHARDINGS = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
PLANS: Mapping[str, Overrides] = {
    "dp4": Overrides(dp=4, tp=1, pp=1, zero=3),
    "dp2×tp2": Overrides(dp=2, tp=2, pp=1, zero=1, shardings=SHARDINGS, num_microbatches=2),
    "pp2×dp2": Overrides(dp=2, tp=1, pp=2, num_microbatches=2),
    "pp4": Overrides(dp=1, tp=1, pp=4, num_microbatches=4),
}


class Tokens:
    """Rows of tokens by number; every label of some rows is ignored."""

    def __init__(self, size: int = SAMPLES, length: int = LENGTH) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCAB, (self.length,), generator=draw)
        labels = ids.roll(-1)
        labels[: number % self.length] = -100
        return ids, labels


def planned(plan: str | None = None, ranks: int = RANKS) -> ParallelModel:
    """Of all ranks, by one of `PLANS`; else of one."""
    overrides = PLANS[plan] if plan else None
    given = {"example_inputs": batch_of(range(ROWS)), "overrides": overrides}
    return tiny.planned(net(), cluster=free_links(ranks), **given)


@cache
def planned_alone() -> ParallelModel:
    """Of one rank, for what trains nothing."""
    return planned(ranks=1)


def begun_anew() -> ParallelModel:
    """Of one rank, with its first weights, for what counts no steps."""
    result = planned_alone()
    result.load_state_dict(net().state_dict())
    return result


def batch_of(numbers: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = zip(*(Tokens()[int(n)] for n in numbers), strict=True)
    return torch.stack(ids), torch.stack(labels)


def plain_losses(batches: Any) -> list[float]:
    """Losses of plain SGD on one device, batch after batch of sample numbers."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for numbers in batches:
        ids, labels = batch_of(numbers)
        optimizer.zero_grad()
        value = loss(model(ids), labels)
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found
