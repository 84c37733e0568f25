"""What a forward keeps in caches of functions: after the trace the model still runs by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.planner.tracing.trace import trace

calls: list[int] = []


def causal(length: int) -> torch.Tensor:
    calls.append(length)
    return torch.ones(length, length).tril()


def parts(length: int) -> tuple[int, dict[str, torch.Tensor]]:
    return length, {"mask": causal(length)}


class Masked(nn.Module):
    def __init__(self, mask: Callable[[int], Any]) -> None:
        super().__init__()
        self.mask, self.lin = mask, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.mask(x.shape[1])
        mask = found if isinstance(found, torch.Tensor) else found[1]["mask"]
        return {"loss": (mask @ self.lin(x)).square().mean()}


@functools.cache
def known(length: int) -> torch.Tensor:
    return causal(length)


class Masks:
    """Caches of a class, and of an instance."""

    def __init__(self) -> None:
        self.own = {"causal": functools.lru_cache(2)(causal)}

    @staticmethod
    @functools.cache
    def of_class(length: int) -> torch.Tensor:
        return causal(length)

    def of_instance(self, length: int) -> torch.Tensor:
        return self.own["causal"](length)


def closed_over() -> Callable[[int], torch.Tensor]:
    cached = functools.cache(causal)
    return lambda length: cached(length)


MASKS = {
    "cache": functools.cache(causal),
    "four": functools.lru_cache(4)(causal),
    "parts": functools.cache(parts),
    "a module's": lambda length: known(length),
    "a class's": lambda length: Masks.of_class(length),
    "an instance's": Masks().of_instance,
    "closed over": closed_over(),
}


@pytest.mark.parametrize("name", MASKS)
def test_caches_hold_nothing_of_the_trace(name: str) -> None:
    model = Masked(MASKS[name])
    batch = {"x": torch.randn(2, 4, 8)}
    first = trace(model, batch)
    assert float(model(**batch)["loss"].detach()) > 0  # as plain PyTorch
    assert [op.target for op in trace(model, batch).ops][-1] == first.ops[-1].target


def test_other_caches_stay() -> None:
    model = Masked(functools.lru_cache(None)(causal))
    batch = {"x": torch.randn(2, 4, 8)}
    model(**batch)
    count = len(calls)
    trace(model, batch)
    model(**batch)
    assert len(calls) == count
