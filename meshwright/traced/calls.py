"""Modules, replaced forwards and hooks of the planned model: a step runs what was traced, so others
that came since are refused."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from meshwright.executor.errors import StateError
from meshwright.executor.stages import REFUSES_CALLS
from meshwright.planner.tracing import CALL_HOOKS, TENSOR_HOOKS

_PLANNED = "train_step and eval_step run what was traced"
_WAY_OUT = "remove it for them, or call auto_parallelize again"


class Calls:
    """The modules of a model, which are not kept alive, as they were planned."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.named_modules()]
        # (FQN, the table that it is in, its name there, what was there)
        self._children = [
            (f"{path}.{name}".lstrip("."), module._modules, name, weakref.ref(child))
            for path, module in modules
            for name, child in module._modules.items()
            if child is not None
        ]
        self._parameters = [
            (f"{path}.{name}".lstrip("."), module._parameters, name)
            for path, module in modules
            for name in module._parameters
        ]
        self._forwards = [(path, vars(m), vars(m).get("forward")) for path, m in modules]
        self._hooks = [
            (path, vars(module)[kind], _numbers(vars(module)[kind]))
            for path, module in modules
            for kind in CALL_HOOKS
        ]

    def check(self) -> None:
        """Raise ValueError for a module that was replaced, and for hooks and forwards that no step
        calls."""
        for what, table, name, child in self._children:
            if table.get(name) is not child():
                raise StateError(
                    " was replaced after planning, which train_step can't see",
                    place=f"module {what!r}",
                    way_out="call auto_parallelize again",
                )
        for path, attributes, forward in self._forwards:
            if attributes.get("forward") is not forward:
                raise _other(path, "another forward")
        for path, hooks, known in self._hooks:
            if (hooks or known) and _numbers(hooks) != known:
                raise _other(path, "other hooks")
        for what, table, name in self._parameters:
            p = table.get(name)
            if p is not None and any(getattr(p, hooks, None) for hooks in TENSOR_HOOKS):
                raise StateError(
                    f" has a hook, and {_PLANNED}",
                    place=f"parameter {what!r}",
                    way_out=f"{_WAY_OUT}; gradients can be changed between train_step and the "
                    "optimizer's step",
                )


def _numbers(hooks: dict[int, Any]) -> tuple[int, ...]:
    """The numbers of a table's hooks, which are unique, but for ours."""
    return tuple(n for n, hook in hooks.items() if not hasattr(hook, REFUSES_CALLS))


def _other(path: str, what: str) -> StateError:
    return StateError(
        f" has {what} than planned, and {_PLANNED}",
        place=f"module {path!r}" if path else "the model",
        way_out=_WAY_OUT,
    )
