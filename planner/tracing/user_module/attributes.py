"""Attributes of modules that a forward reads and writes.

A trace has the values that attributes had when it was made, so a later change of those read is
refused. Attributes are keyed by (path of the holder, name); holders are modules and the plain
objects that they hold (configs).
"""

from __future__ import annotations

import enum
import operator
import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from meshwright.planner.tracing.user_module.similar_layers import PLAIN
from meshwright.planner.tracing.user_module.sources import UNKNOWN, calling_place

Key = tuple[str, str]  # (path of a module or object, attribute)

OWN = frozenset({*vars(nn.Module()), *dir(nn.Module)}) - {"training"}  # of every module
# change memory alone: recompute is the planner's own choice, and a trace keeps no cache
MEMORY_ONLY = frozenset({"gradient_checkpointing", "use_cache"})
NO_OBJECTS = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType, enum.Enum)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
DEPTH = 3  # of objects in objects


def holders_of(root: Any, path: str) -> dict[str, Any]:
    """The modules of a model, and the plain objects in their attributes, by path."""
    if not isinstance(root, nn.Module):
        return dict(_objects(root, path, set(), DEPTH))
    holders: dict[str, Any] = {}
    seen: set[int] = set()
    for name, module in root.named_modules(prefix=path):
        holders[name] = module
        for attribute, value in list(vars(module).items()):
            if attribute not in OWN:
                holders |= dict(_objects(value, f"{name}.{attribute}", seen, DEPTH))
    return holders


def _objects(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if depth and _is_object(value) and id(value) not in seen:
        seen.add(id(value))
        yield path, value
        for name, inner in list(vars(value).items()):
            yield from _objects(inner, f"{path}.{name}", seen, depth - 1)


def _is_object(value: Any) -> bool:
    if isinstance(value, (*NO_OBJECTS, *CONTAINERS, *PLAIN)) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith("torch")


class Watch:
    """The `reads` and `writes` of attributes of `holders` while it records, each with its place in
    the user's source; a value written first is no read. `changed` by a whole forward are those of
    another value after it."""

    def __init__(self, holders: Mapping[str, Any]) -> None:
        self.holders = holders
        self.paths = {id(vars(holder)): path for path, holder in holders.items()}
        self.reads: dict[Key, str] = {}
        self.writes: dict[Key, str] = {}
        self.written_first: set[Key] = set()
        self.changed: set[Key] = set()  # here, for export gives modules their attributes back

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which reads and writes are recorded."""
        objects = {type(x) for x in self.holders.values() if not isinstance(x, nn.Module)}
        with ExitStack() as stack:
            for cls in (nn.Module, *objects):
                for name, make in (("__getattribute__", self._get), ("__setattr__", self._set)):
                    patch = mock.patch.object(cls, name, make(getattr(cls, name)))
                    try:
                        stack.enter_context(patch)
                    except TypeError:  # a class written in C: all of its objects count as read
                        of_class = [(p, x) for p, x in self.holders.items() if type(x) is cls]
                        self.reads |= {(p, name): UNKNOWN for p, x in of_class for name in vars(x)}
                        break
            yield

    def _get(self, plain: Any) -> Any:
        def get(holder: Any, name: str) -> Any:
            value = plain(holder, name)
            if name not in OWN and name[:2] != "__":
                held = object.__getattribute__(holder, "__dict__")
                path = self.paths.get(id(held))
                if path is not None and (name in held or _in_class(holder, name, value)):
                    known = (path, name) in self.reads or (path, name) in self.written_first
                    replaceable = isinstance(value, FunctionType) and name in held
                    called = isinstance(value, NO_OBJECTS[2:-1]) and not replaceable
                    if not known and not called and name != "forward":
                        self.reads[path, name] = calling_place()
            return value

        return get

    def _set(self, plain: Any) -> Any:
        def write(holder: Any, name: str, value: Any) -> None:
            path = self.paths.get(id(object.__getattribute__(holder, "__dict__")))
            if path is not None and name not in OWN:
                key = path, name
                if key not in self.reads:
                    self.written_first.add(key)
                self.writes[key] = calling_place()
            plain(holder, name, value)

        return write

    def place(self, key: Key) -> str:
        """file:line of the last write of an attribute, else of its first read, else of its
        holder's."""
        parent, _, name = key[0].rpartition(".")
        known = self.writes.get(key), self.reads.get(key), self.reads.get((parent, name))
        return next((p for p in known if p and p != UNKNOWN), UNKNOWN)


class Held:
    """The attributes of all holders at one moment."""

    def __init__(self, holders: Mapping[str, Any]) -> None:
        self.tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.contents: list[tuple[Any, Any]] = []
        self.values: dict[Key, Any] = {}  # described without identities
        self.tensors: dict[Key, list[torch.Tensor]] = {}
        self.structure: dict[Key, int] = {}  # parameters and modules: identities
        self.of_classes: list[tuple[type, str, Any]] = []
        for cls in {cls for x in holders.values() for cls in type(x).__mro__ if _is_users(cls)}:
            for name, value in vars(cls).items():
                if isinstance(value, (*PLAIN, *CONTAINERS)) and name[:2] != "__":
                    self.of_classes.append((cls, name, value))
                    self.values[cls.__name__, name] = self._described(value, [], 0)
        for path, holder in holders.items():
            tables, attributes = [vars(holder)], [*vars(holder).items()]
            if isinstance(holder, nn.Module):
                tables += [holder._parameters, holder._modules, holder._buffers]
                attributes += holder._buffers.items()
                for name, value in (*holder._parameters.items(), *holder._modules.items()):
                    self.structure[path, name] = id(value)
            self.tables += [(table, dict(table)) for table in tables]
            for name, value in attributes:
                if name not in OWN:
                    tensors = self.tensors[path, name] = []
                    self.values[path, name] = self._described(value, tensors, 0)

    def _described(self, value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
        """A description equal for values that a forward can't tell apart; `tensors` gets those in
        it, in order."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return "tensor", tuple(value.shape), value.dtype
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, (*PLAIN, enum.Enum)):
            return value
        if isinstance(value, CONTAINERS) and depth < 2 * DEPTH:
            if isinstance(value, (list, dict, set, deque)):
                self.contents.append((value, value.copy()))
            if isinstance(value, (set, frozenset)):
                return kind, sorted(repr(x) for x in value)
            items = value.items() if isinstance(value, dict) else value
            return kind, [self._described(x, tensors, depth + 1) for x in items]
        return kind, generator_state(value)

    def restore(self) -> None:
        """Give all holders, their classes, lists, dicts and sets what they held."""
        for cls, name, value in self.of_classes:
            if vars(cls).get(name) is not value:
                setattr(cls, name, value)
        for table, before in self.tables:
            table.clear()
            table.update(before)
        for container, before in self.contents:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)

    def changed(self, after: Held) -> set[Key]:
        """The attributes that hold something else, or other tensors, in `after`."""

        def differ(key: Key) -> bool:
            tensors, others = self.tensors.get(key, []), after.tensors.get(key, [])
            same = len(tensors) == len(others) and all(map(operator.is_, tensors, others))
            return not same or self.values.get(key, key) != after.values.get(key, key)

        return {key for key in self.values.keys() | after.values.keys() if differ(key)}

    def rebuilt(self, after: Held) -> set[Key]:
        """The parameters and submodules that are other objects in `after`."""
        return {key for key, _ in self.structure.items() ^ after.structure.items()}


def _is_users(cls: type) -> bool:
    """Whether a class may have attributes that a forward of it changes."""
    return cls.__module__.partition(".")[0] not in ("torch", "builtins", "meshwright")


def _in_class(holder: Any, name: str, value: Any) -> bool:
    """Whether an attribute's value lies in the class: it was not computed by a property."""
    return any(vars(cls).get(name) is value for cls in type(holder).__mro__)


def generator_state(value: Any) -> Any:
    """The state of a generator of random numbers or an iterator; None of any other object."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return repr(value) if type(value).__module__ == "itertools" else None
