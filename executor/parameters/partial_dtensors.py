"""All-reduce of partial DTensors inside optimizers that take norms, sums or means of shards.

DTensor leaves a norm, sum or mean over a sharded dim partial: every rank holds its own part until
an operator asks for the whole. In torch 2.13 two don't ask: `.item()` gives the rank's own part,
and arithmetic in place raises. An optimizer with a norm in it may then fail, or, worse, go on with
another norm on every rank; `torch.optim.Adafactor` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


class Reduced(TorchFunctionMode):
    """Redistributes every partial DTensor result to replicated: `with Reduced(): optimizer.step()`.

    Collective where results are partial: every rank of the parameters' mesh steps inside.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return tree_map_only(DTensor, _all_reduced, func(*args, **(kwargs or {})))


def _all_reduced(x: torch.Tensor) -> torch.Tensor:
    """A partial DTensor, replicated on its partial axes."""
    assert isinstance(x, DTensor)
    if not any(p.is_partial() for p in x.placements):
        return x
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)
