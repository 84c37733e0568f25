"""What a traced forward took from the user's model beside its tensors: attributes, modules, what
their calls run. A plan has them as they were, so that a step with others is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.executor.stages import REFUSES_CALLS
from meshwright.planner.tracing import CALL_HOOKS, TENSOR_HOOKS

_CONTAINERS = (list, tuple, dict, set, frozenset)
_MISSING = object()
CALLS_PLANNED = (
    "train_step and eval_step run what was traced: remove it for them, or call auto_parallelize "
    "again"
)


class Attributes:
    """The values that the attributes which a graph has read have now, and the model's modules.

    Modules are not kept alive: of those that were freed no attribute is compared. Of objects the
    identity is, and of tensors the version too.
    """

    def __init__(self, model: nn.Module, loss_fn: Any, graph: Graph) -> None:
        self._roots = {"model": model, "loss_fn": loss_fn}
        self._model = model
        self._calls = {
            path: (weakref.ref(module), _called(module)) for path, module in model.named_modules()
        }
        self._seen: set[tuple[str, str]] = set()
        self._known: list[tuple[str, Callable[[], Any], list[tuple[str, Any]]]] = []
        self.add(graph)

    def add(self, graph: Graph) -> None:
        """Compare what another graph of the model has read, too."""
        names: dict[str, list[str]] = {}
        for path, name in graph.reads:
            if (path, name) not in self._seen:
                names.setdefault(path, []).append(name)
        self._seen.update(graph.reads)
        for path, own in names.items():
            find = _finder(self._roots, path)
            holder = find()
            told = [(name, _told(getattr(holder, name, _MISSING))) for name in own]
            self._known.append((path, find, told))

    def check(self, *, training: bool) -> None:
        """Raise ValueError for an attribute with another value, and for modules and hooks that no
        step calls; modes matter to `training` only."""
        self._check_calls()
        for path, find, known in self._known:
            holder = find()
            if holder is None:
                continue
            for name, before in known:
                now = getattr(holder, name, _MISSING)
                if now is before or _told(now) == before:
                    continue
                if name != "training" or training:
                    raise ValueError(_message(path, name, before, now))

    def _check_calls(self) -> None:
        for path, module in self._model.named_modules():
            known, called = self._calls.get(path), _called(module)
            what = f"module {path!r}" if path else "the model"
            if known is None or known[0]() is not module:
                raise ValueError(
                    f"{what} was replaced after planning, which train_step can't see: call "
                    f"auto_parallelize again"
                )
            if called != known[1]:
                raise ValueError(
                    f"{what} has other hooks, or another forward, than when it was planned, and "
                    f"{CALLS_PLANNED}"
                )
        for name, p in self._model.named_parameters():
            if any(getattr(p, hooks, None) for hooks in TENSOR_HOOKS):
                raise ValueError(
                    f"parameter {name!r} has a hook, and {CALLS_PLANNED}; gradients can be changed "
                    f"between train_step and the optimizer's step"
                )


def _called(module: nn.Module) -> tuple[object, ...]:
    """What a call of a module runs: a forward of its own, and hooks by their unique numbers."""
    tables = (vars(module)[name] for name in CALL_HOOKS)
    hooks = ((n for n, hook in t.items() if not hasattr(hook, REFUSES_CALLS)) for t in tables)
    return vars(module).get("forward"), *map(tuple, hooks)


def _finder(roots: Mapping[str, Any], path: str) -> Callable[[], Any]:
    """Finds the holder at a path: a module, or an object below it; None where it was freed."""
    root, *names = path.split(".")
    holder = roots[root]
    while names and isinstance(holder, nn.Module) and names[0] in holder._modules:
        holder = holder._modules[names.pop(0)]
    if isinstance(holder, nn.Module):
        known = weakref.ref(holder)
        return lambda: _below(known(), names)
    return lambda: _below(holder, names)


def _below(holder: Any, names: list[str]) -> Any:
    for name in names:
        holder = getattr(holder, name, None)
    return holder


def _told(value: Any) -> Any:
    """What a value is compared by: plain ones by themselves, nan as nan."""
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), 0 if value.is_inference() else value._version
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return type(value), [_told(x) for x in items]
    if isinstance(value, float) and value != value:
        return "nan"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    return type(value), id(value)


def _message(path: str, name: str, before: Any, now: Any) -> str:
    what = f"{path}.{name}"
    if name == "training":
        mode = "training" if before else "evaluation"
        return (
            f"{what} is {now}, but the model was planned in {mode} mode: call "
            f"{path}.train({before}) before train_step, or plan again"
        )
    if isinstance(now, (torch.Tensor, *_CONTAINERS)) or isinstance(before, tuple):
        changed = "was changed since the model was planned"
    else:
        shown = "deleted" if now is _MISSING else repr(now)
        changed = f"was {before!r} when the model was planned, and is {shown} now"
    return (
        f"{what} {changed}: the plan has what its forward read then. Ways out: set it back; plan "
        "again; to change it between steps, make it an entry of the batch (a number in "
        "example_inputs is an input), or a buffer (register_buffer)"
    )
