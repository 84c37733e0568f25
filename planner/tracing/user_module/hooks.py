"""Hooks of modules and tensors while a model is traced.

Hooks on a module's forward are traced with it. Those that autograd would call would be lost: they
are refused. A leaf is called with all hooks on its modules, which the trace around it does not run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.user_module.leaf import TRACE, declared
from meshwright.planner.tracing.user_module.sources import user_frame

MODULE_HOOKS = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
TENSOR_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
CALL_HOOKS = (*MODULE_HOOKS, "_forward_hooks", "_forward_pre_hooks")  # run by a module's call
CALLS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


def check_hooks(model: nn.Module) -> None:
    """Raise TraceError for hooks that a trace would lose."""
    leaves = [name for name, module in model.named_modules() if declared(module)]
    for path, module in model.named_modules():
        if any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves):
            continue
        for attribute, method in MODULE_HOOKS.items():
            if vars(module)[attribute]:
                raise _refusal(f"module {path or type(module).__name__!r} has a {method}")
    for name, p in model.named_parameters():
        for attribute, method in TENSOR_HOOKS.items():
            if getattr(p, attribute, None):
                raise _refusal(f"parameter {name!r} has a {method}")


def hooks_in(module: nn.Module) -> tuple[Any, ...]:
    """The hooks that a module's call runs, its own and those of the modules in it."""
    tables = (vars(below)[name] for below in module.modules() for name in CALL_HOOKS)
    return tuple(tuple(table.values()) for table in tables)


def taken_hooks(module: nn.Module) -> dict[str, Any]:
    """The hooks that a module's own call runs, removed; `vars(module).update` restores them."""
    hooks = {name: vars(module)[name] for name in CALL_HOOKS}
    vars(module).update({name: type(table)() for name, table in hooks.items()})
    return hooks


@contextmanager
def hooked(module: nn.Module, hooks: Mapping[str, Any]) -> Iterator[None]:
    """Context in which a module has its hooks again."""
    bare = {name: vars(module)[name] for name in hooks}
    vars(module).update(hooks)
    try:
        yield
    finally:
        vars(module).update(bare)


@contextmanager
def refused(
    calls: Iterable[tuple[Any, str]], refusal: Callable[..., TraceError | None]
) -> Iterator[None]:
    """Context in which traced code that calls one of these, (module or class, name), raises
    `refusal(place, name, *arguments)`: None for a call that may be. Leaves may call them all."""

    def refusing(place: Any, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if TRACE.get() and (error := refusal(place, name, *args, *kwargs.values())):
                raise error
            return plain(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for place, name in calls:
            call = refusing(place, name, getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, call))
        yield


def refused_hooks() -> AbstractContextManager[None]:
    """Context in which code that is traced can't put hooks on tensors: they raise `TraceError`."""

    def refusal(place: Any, name: str, *_: Any) -> TraceError:
        return _refusal(f"at {user_frame(traceback.extract_stack())} a tensor gets a {name}")

    return refused([(torch.Tensor, name) for name in CALLS], refusal)


def _refusal(what: str) -> TraceError:
    return TraceError(
        f"the model can't be traced: {what}, which autograd would call and a planned model would "
        "not. Ways out: remove it while planning; change values in the forward instead (hooks on a "
        "module's forward are followed); scale gradients by a torch.autograd.Function, which is "
        "kept as a leaf; clip them between backward and step"
    )
