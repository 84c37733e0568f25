"""Modules that can't be traced: where a failure lies, and the leaves to try next.

The innermost module around the failing line becomes a leaf, with all that are built like it, and
the trace starts again; where a leaf won't do, the module around it is the next to try. The model
itself is none: nothing would be left to plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType

from torch import nn

from meshwright.planner.errors import Untraceable
from meshwright.planner.tracing.user_module.similar_layers import describe


def running_module(error: BaseException, model: nn.Module) -> str:
    """FQN in `model` of the innermost module whose method was running when `error` was raised."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    fqn = ""
    for frame in _frames(error.__traceback__):
        for name in ("self", "proxy"):
            holder = frame.get(name)
            if isinstance(holder, nn.Module):  # or a proxy of it, with the same attributes
                fqn = names.get(id(vars(holder)), fqn)
    return fqn


def _frames(trace: TracebackType | None) -> Iterator[Mapping[str, object]]:
    while trace is not None:
        yield trace.tb_frame.f_locals
        trace = trace.tb_next


def more_leaves(model: nn.Module, leaves: Mapping[str, str], error: Untraceable) -> dict[str, str]:
    """FQN -> reason of the modules to keep as leaves next; none where nothing is left to try."""
    modules = dict(model.named_modules())
    for fqn in error.modules:
        if fqn in leaves or fqn not in modules or not _has_forward(modules[fqn]):
            continue
        parts = describe(modules[fqn])[0]
        like = [name for name, m in modules.items() if name and _is_like(m, modules[fqn], parts)]
        inside = tuple(f"{name}." for name in like)
        outer = {name: why for name, why in leaves.items() if not name.startswith(inside)}
        return outer | dict.fromkeys(like, error.reason)
    return {}


def _is_like(module: nn.Module, other: nn.Module, parts: list[object]) -> bool:
    return module is other or (type(module) is type(other) and describe(module)[0] == parts)


def _has_forward(module: nn.Module) -> bool:
    """Whether a call runs the forward of its class, and there is one."""
    return type(module).forward is not _ABSTRACT and "forward" not in vars(module)


_ABSTRACT = nn.Module.forward  # what containers have: they are never called
