"""Checks that a model is as it was planned: attributes that its forward read, modules, hooks."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.executor.errors import StateError
from meshwright.executor.stages import REFUSES_CALLS
from meshwright.planner.tracing import CALL_HOOKS, TENSOR_HOOKS

_CONTAINERS = (list, tuple, dict, set, frozenset)
_MISSING = object()


class Attributes:
    """Values of the attributes that a graph has read. Modules are not kept alive: of those that
    were freed nothing is compared. Of objects the identity is, and of tensors the version too."""

    def __init__(self, model: nn.Module, loss_fn: Any, graph: Graph) -> None:
        self._roots = {"model": model, "loss_fn": loss_fn}
        self._seen: set[tuple[str, str]] = set()
        self._known: list[tuple[str, Callable[[], Any], list[tuple[str, Any]]]] = []
        self.add(graph)

    def add(self, graph: Graph) -> None:
        """Compare the attributes that another graph of the model has read, too."""
        names = defaultdict[str, list[str]](list)
        for path, name in graph.reads:
            if (path, name) not in self._seen:
                names[path].append(name)
        self._seen.update(graph.reads)
        for path, of_holder in names.items():
            find = _finder(self._roots, path)
            holder = find()
            keys = [(name, _compared(getattr(holder, name, _MISSING))) for name in of_holder]
            self._known.append((path, find, keys))

    def check(self, *, training: bool) -> None:
        """Raise ValueError for an attribute with another value; modes matter to `training` only."""
        for path, find, known in self._known:
            holder = find()
            if holder is None:
                continue
            for name, before in known:
                now = getattr(holder, name, _MISSING)
                same = now is before or _compared(now) == before
                if not same and (name != "training" or training):
                    raise StateError(_message(path, name, before, now))


def _finder(roots: Mapping[str, Any], path: str) -> Callable[[], Any]:
    """The function that finds the holder at a path: a module, or an object below it; None where it
    was freed."""
    root, *names = path.split(".")
    holder = roots[root]
    while names and isinstance(holder, nn.Module) and names[0] in holder._modules:
        holder = holder._modules[names.pop(0)]
    root_of = weakref.ref(holder) if isinstance(holder, nn.Module) else lambda: holder
    return lambda: reduce(lambda holder, name: getattr(holder, name, None), names, root_of())


def _compared(value: Any) -> Any:
    """The key by which a value is compared: plain ones by themselves, nan as nan."""
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), 0 if value.is_inference() else value._version
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return type(value), [_compared(x) for x in items]
    if isinstance(value, float) and value != value:
        return "nan"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    return type(value), id(value)


def _message(path: str, name: str, before: Any, now: Any) -> str:
    attribute = f"{path}.{name}"
    if name == "training":
        mode = "training" if before else "evaluation"
        return (
            f"{attribute} is {now}, but the model was planned in {mode} mode: call "
            f"{path}.train({before}) before train_step, or plan again"
        )
    if isinstance(now, (torch.Tensor, *_CONTAINERS)) or isinstance(before, tuple):
        changed = "was changed since the model was planned"
    else:
        shown = "deleted" if now is _MISSING else repr(now)
        changed = f"was {before!r} when the model was planned, and is {shown} now"
    return (
        f"{attribute} {changed}: the plan has what its forward read then. Ways out: set it back; "
        "plan again; to change it between steps, make it an entry of the batch (a number in "
        "example_inputs is an input), or a buffer (register_buffer)"
    )


# --- modules, forwards, hooks ---------------------------------------------------------------------

_PLANNED = "train_step and eval_step run what was traced"
_WAY_OUT = "remove it for them, or call auto_parallelize again"


class Calls:
    """Modules of a planned model, which are not kept alive, their forwards and hooks: a step runs
    what was traced, so others that came since are refused."""

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
