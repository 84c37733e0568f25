"""Attributes of the user's model that the traced forward read: a plan has their values, so that a
step with others is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.executor.errors import StateError

_CONTAINERS = (list, tuple, dict, set, frozenset)
_MISSING = object()


class Attributes:
    """The values that the attributes which a graph has read have now.

    Modules are not kept alive: of those that were freed nothing is compared. Of objects the
    identity is, and of tensors the version too.
    """

    def __init__(self, model: nn.Module, loss_fn: Any, graph: Graph) -> None:
        self._roots = {"model": model, "loss_fn": loss_fn}
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
        """Raise ValueError for an attribute with another value; modes matter to `training` only."""
        for path, find, known in self._known:
            holder = find()
            if holder is None:
                continue
            for name, before in known:
                now = getattr(holder, name, _MISSING)
                if now is before or _told(now) == before:
                    continue
                if name != "training" or training:
                    raise StateError(_message(path, name, before, now))


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
