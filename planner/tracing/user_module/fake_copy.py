"""Copies of modules in fake tensors, which share no tensor with the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwright.planner.errors import TraceError

Like = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def fake_copy(
    model: nn.Module,
    dtype: torch.dtype,
    like: Like,
    *,
    replaced: Mapping[int, Any] = MappingProxyType({}),
) -> Any:
    """A deep copy whose parameters and buffers are made by `like`.

    Floating parameters are made in `dtype`, but for those of modules with running statistics;
    buffers keep theirs. `replaced` maps ids of modules and tensors to what takes their place.
    Raises `TraceError` for a module that can't be copied.
    """
    memo: dict[int, Any] = dict(replaced)
    modules = list(_modules(model, replaced))
    keep_dtype = {
        id(p)
        for module in modules
        if getattr(module, "running_mean", None) is not None
        for p in module.parameters(recurse=False)
    }
    for module in modules:  # tensors that are no state: constants, which a trace may write to
        plain = [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        memo |= {id(t): t.detach().clone() for t in plain}
    for p in (p for module in modules for p in module.parameters(recurse=False)):
        cast = p.is_floating_point() and id(p) not in keep_dtype
        new = like(p, dtype if cast else p.dtype)
        memo[id(p)] = nn.Parameter(new, requires_grad=p.requires_grad)
    for b in (b for module in modules for b in module.buffers(recurse=False)):
        memo[id(b)] = like(b, b.dtype)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TraceError(
            f"{type(model).__name__} can't be copied ({error}); keep locks, files, process groups "
            "and tensors with a history out of the model's attributes"
        ) from error


def _modules(model: nn.Module, replaced: Mapping[int, Any]) -> Iterator[nn.Module]:
    """The modules of `model`, without those replaced and the ones below them."""
    seen = set(replaced)
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack += reversed([m for m in module._modules.values() if m is not None])
