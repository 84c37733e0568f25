"""Results that the user's functions keep (`functools.lru_cache`): those of a trace are of no use to
a later call."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor

CACHE = functools._lru_cache_wrapper
# packages whose functions keep no fake tensor
THEIRS = {"torch", "meshwright", *sys.stdlib_module_names}
_installed: WeakKeyDictionary[ModuleType, list[Any]] = WeakKeyDictionary()


@contextmanager
def emptied_caches(*roots: object) -> Iterator[None]:
    """Context after which no cache holds fake tensors: those that do are emptied, of the functions
    and classes of all modules, and of what can be reached from `roots`. Nothing is looked for among
    all objects, which are millions in a process that has done more than this."""
    try:
        yield
    finally:
        for found in (*_in_modules(), *_reached(roots)):
            if _holds_fake(gc.get_referents(found)):
                found.cache_clear()


def _in_modules() -> Iterator[Any]:
    """The caches among the functions of modules and their classes."""
    for name, module in _modules():
        if name.partition(".")[0] in THEIRS:
            continue
        if "site-packages" not in (getattr(module, "__file__", None) or ""):
            yield from _of_module(name, module)
            continue
        if module not in _installed:  # whose functions stay
            _installed[module] = [*_of_module(name, module)]
        yield from _installed[module]


def _modules() -> list[tuple[str, ModuleType]]:
    return [(name, m) for name, m in [*sys.modules.items()] if isinstance(m, ModuleType)]


def _of_module(name: str, module: ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == name:
            for attribute in list(vars(value).values()):
                yield from _of_function(attribute)
        else:
            yield from _of_function(value)


def _of_function(value: object) -> Iterator[Any]:
    """The cache that a value is, or that a function keeps in its closure."""
    if type(value) is CACHE:
        yield value
    elif isinstance(value, staticmethod | classmethod):
        yield from _of_function(value.__func__)
    elif isinstance(value, FunctionType) and value.__closure__:
        yield from (x for x in gc.get_referents(*value.__closure__) if type(x) is CACHE)


def _reached(roots: tuple[object, ...]) -> Iterator[Any]:
    """The caches that objects hold, by whatever way that doesn't lead through a class or module."""
    seen: dict[int, object] = {id(vars(module)): module for _, module in _modules()}
    reached: list[object] = [roots]
    while reached:
        new = {
            id(x): x
            for x in gc.get_referents(*reached)
            if gc.is_tracked(x)
            and id(x) not in seen
            and not isinstance(x, type | ModuleType | torch.Tensor)
        }
        seen |= new
        reached = list(new.values())
        yield from (x for x in reached if type(x) is CACHE)


def _holds_fake(value: Any) -> bool:
    if isinstance(value, tuple | list | dict):
        return any(map(_holds_fake, value.values() if isinstance(value, dict) else value))
    return isinstance(value, FakeTensor)
