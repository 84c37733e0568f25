"""Values outside of modules that the user's functions name: globals, closures, attributes of
classes and of objects there, arguments of partials, the clock.

A trace has the values that they had when it was made. They are looked for in the functions' code,
not watched as they are read: all that a forward, and what it calls of the user's, could read.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import _lru_cache_wrapper, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.rules import LEAVES, leaf_of
from meshwright.planner.tracing.user_module.attributes import CONTAINERS, DEPTH, generator_state
from meshwright.planner.tracing.user_module.leaf import declared
from meshwright.planner.tracing.user_module.similar_layers import PLAIN

# packages whose functions are not looked into
LIBRARIES = sys.stdlib_module_names | {
    "meshwright",
    "numpy",
    "torch",
    "torchvision",
    "transformers",
}
OUTSIDE = "outside of the model"  # in place of a path in a graph's reads
# by module, the names that tell what no plan can follow
PASSING = {
    "time": ("the clock", {"time", "time_ns", "perf_counter", "monotonic", "process_time"}),
    "datetime": ("the clock", {"now", "today", "utcnow"}),
    "os": ("environment variables", {"environ", "getenv"}),
}

Find = Callable[[], Any]


class Missing:
    """Stands for a value that is not there."""


class Outside:
    """Values that the functions of a model and a loss name, by what to call them: `finds` reads
    one as it is now, with the names of attributes that its readers read of anything. `notes` tell
    what can't be compared; `modules` are those with weights, which are not compared, each with such
    names. Leaves run as they are: those of a `graph` are not looked into."""

    def __init__(self, model: nn.Module, loss_fn: Any, graph: Graph | None = None) -> None:
        self.finds: dict[str, tuple[Find, frozenset[str]]] = {}
        self.notes: list[str] = []
        self.modules: list[tuple[nn.Module, frozenset[str]]] = []
        self._seen: set[int] = set()
        self._pending: list[tuple[Any, type | None]] = []
        leaves = _leaf_modules(graph) if graph else ()
        for root in (model, loss_fn):
            modules = [*root.named_modules()] if isinstance(root, nn.Module) else []
            for path, module in modules:
                if root is model and f"{path}.".startswith(leaves):
                    continue
                self._look_into(vars(module).get("forward", type(module).forward), type(module))
                for kind in ("_forward_pre_hooks", "_forward_hooks"):
                    for hook in vars(module)[kind].values():
                        self._look_into(hook, None)
            if root is not None and not modules:
                self._call("loss_fn", root)
        while self._pending:
            self._function(*self._pending.pop())

    def values(self) -> dict[str, Any]:
        """All of them as they are now, in a form that compares."""
        return {name: _described(find(), names, 0) for name, (find, names) in self.finds.items()}

    def changed(self, before: Mapping[str, Any], *, tensors: bool = True) -> set[str]:
        """The names of values that are others than `before`; a dict may have more keys (it is a
        cache then), and a tensor be another one unless `tensors` count."""
        now = self.values()
        both = before.keys() & now.keys()
        return {name for name in both if not _alike(before[name], now[name], tensors)}

    def _call(self, path: str, value: Any, owner: type | None = None) -> None:
        """Look into what a call of a value runs."""
        if isinstance(value, partial):
            self.finds[f"arguments of {path}"] = lambda: (value.args, value.keywords), frozenset()
            self._call(path, value.func, owner)
        elif isinstance(value, FunctionType):
            self._look_into(value, owner)
        elif isinstance(value, MethodType):
            self._look_into(value, type(value.__self__))
            self._value(f"the object of {path}", lambda: value.__self__, _of_class(value.__self__))
        else:
            self._look_into(vars(type(value)).get("__call__"), type(value))

    def _look_into(self, function: Any, owner: type | None) -> None:
        """Take up a function, a method of `owner` perhaps, unless it is a library's."""
        function = _behind(getattr(function, "__func__", function))
        if isinstance(function, property):
            function = function.fget
        is_users = isinstance(function, FunctionType) and _is_users(function.__module__)
        if is_users and not declared(function) and id(function) not in self._seen:
            self._seen.add(id(function))
            self._pending.append((function, owner))

    def _function(self, function: FunctionType, owner: type | None) -> None:
        names = frozenset(_names(function.__code__))
        where = f"{function.__module__}."
        for name in names & function.__globals__.keys():
            self._value(
                f"{where}{name}", partial(function.__globals__.get, name, Missing), names, owner
            )
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if name != "__class__":
                path = self._new(f"{name} in {function.__qualname__}")
                self._value(path, partial(_content, cell), names, owner)
        path = self._new(f"defaults and attributes of {function.__qualname__}")
        self.finds[path] = partial(_held_by, function), names
        for cls in owner.__mro__ if owner else ():
            if _is_users(cls.__module__):
                self._value(f"{cls.__module__}.{cls.__qualname__}", partial(_itself, cls), names)
                for name in names & vars(cls).keys():
                    self._look_into(vars(cls)[name], owner)

    def _new(self, path: str) -> str:
        """A path that no other function of the same name has."""
        while path in self.finds:
            path += "'"
        return path

    def _value(
        self, path: str, find: Find, names: frozenset[str], owner: type | None = None
    ) -> None:
        """Take up a value that a function names."""
        found = find()
        value = _behind(found)
        top = value if isinstance(value, ModuleType) else sys.modules.get(_module_of(value) or "")
        kind, telling = PASSING.get(getattr(top, "__name__", ""), ("", set[str]()))
        if kind and (names & telling if isinstance(value, ModuleType | type) else True):
            self.notes.append(f"the forward reads {kind} ({path}): a plan has what it was then")
        if isinstance(value, (FunctionType, MethodType, partial)):
            self._call(path, value, owner)
            self.finds.setdefault(path, (find, frozenset()))  # another may take its place
            return
        call = vars(type(value)).get("__call__")
        if isinstance(call, FunctionType) and not isinstance(value, (type, nn.Module)):
            self._look_into(call, type(value))
            names |= _of_class(value)
        if _has_weights(value):
            self.modules.append((value, names))
            return
        parts = () if _is_librarys(value) else held(value)
        self.modules += [(x, names) for n, x in parts if n in names and _has_weights(x)]
        if _holds(value, names) or value is not found:
            self.finds[path] = find, self.finds.get(path, (find, frozenset()))[1] | names


def attributes_read(model: nn.Module, loss_fn: Any) -> frozenset[str]:
    """Names of attributes that a loss may read of a model, or of a module in it, that it names."""
    modules = {*map(id, model.modules())}
    beside = Outside(nn.Module(), loss_fn).modules if loss_fn is not None else []
    return frozenset().union(*(names for module, names in beside if id(module) in modules))


def _has_weights(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(True for _ in value.parameters())


def _leaf_modules(graph: Graph) -> tuple[str, ...]:
    """Paths of the modules that a graph keeps as leaves, each with a dot behind."""
    leaves = [op for op in graph.ops if op.short in LEAVES]
    programs: list[tuple[str, Any]] = [(op.module, leaf_of(op).program) for op in leaves]
    return tuple(f"{path}." for path, program in programs if program.module is not None)


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function's code, inner functions' included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _held_by(function: FunctionType) -> Any:
    return function.__defaults__, function.__kwdefaults__, vars(function)


def _itself(value: Any) -> Any:
    return value


def _of_class(value: Any) -> frozenset[str]:
    """Names in the code of an object's methods."""
    methods = [x for cls in type(value).__mro__ for x in vars(cls).values()]
    codes = [x.__code__ for x in methods if isinstance(x, FunctionType)]
    return frozenset(name for code in codes for name in _names(code))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return Missing


def _module_of(value: Any) -> str | None:
    """The module that a value names as its own; None of a plain value."""
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)


def _is_users(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] not in LIBRARIES


def _behind(value: Any) -> Any:
    """The value behind a weak reference or a context variable, the function behind a cache."""
    if isinstance(value, ReferenceType):
        return value()
    if isinstance(value, ContextVar):
        with suppress(LookupError):  # neither set nor with a default
            return value.get()
        return Missing
    return value.__wrapped__ if isinstance(value, _lru_cache_wrapper) else value


def _is_librarys(value: Any) -> bool:
    """Whether a value is a library's module, class or function, or an object that holds nothing."""
    if isinstance(value, (*PLAIN, *CONTAINERS, torch.Tensor, enum.Enum)):
        return False
    named = isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType))
    users = _is_users(_module_of(value if named else type(value)))
    bare = not getattr(value, "__dict__", None) and generator_state(value) is None
    return not users and (named or bare)


def _holds(value: Any, names: frozenset[str]) -> bool:
    """Whether a value, or one of its attributes that are named, may change."""
    if isinstance(value, nn.Module):
        return True
    if _is_librarys(value) or isinstance(value, BuiltinFunctionType):
        return False
    named = isinstance(value, (type, ModuleType)) or not _is_users(_module_of(type(value)))
    plain = isinstance(value, (*PLAIN, *CONTAINERS, torch.Tensor, enum.Enum))
    if plain or not named or generator_state(value) is not None:
        return True
    return any(n in names for n, _ in held(value))


def _described(value: Any, names: frozenset[str], depth: int) -> Any:
    """A description equal for values that a forward can't tell apart by `names` of attributes."""
    value = _behind(value)
    if isinstance(value, torch.Tensor):
        return "tensor", id(value)  # what is written to it is followed
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (*PLAIN, enum.Enum)):
        return value
    if (state := generator_state(value)) is not None:
        return "drawn", state
    if isinstance(value, nn.Module):
        return type(value), {name: id(x) for name, x in value._buffers.items()}
    if isinstance(value, dict) and depth <= DEPTH:
        return {repr(k): _described(x, names, depth + 1) for k, x in value.items()}
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    if isinstance(value, CONTAINERS) and depth <= DEPTH:
        return type(value), [_described(x, names, depth + 1) for x in value]
    if isinstance(value, partial):
        return id(value.func), _described((value.args, value.keywords), names, depth)
    if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType)):
        return "function", id(getattr(value, "__func__", value))
    if depth > DEPTH or _is_librarys(value):
        return type(value)
    named = {n: x for n, x in held(value) if n in names and n[:2] != "__"}
    return type(value), {n: _described(x, names, depth + 1) for n, x in named.items()}


def held(value: Any) -> Iterable[tuple[str, Any]]:
    """Attributes of a class or an object, of its class and of its slots, but no methods."""
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    for cls in reversed(classes):
        if _is_users(cls.__module__) and not isinstance(value, ModuleType):
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not isinstance(value, type) and hasattr(value, name):
                    yield name, getattr(value, name)
            for name, x in vars(cls).items():
                if isinstance(x, (*PLAIN, *CONTAINERS)) and name[:2] != "__":
                    yield name, x
    if not isinstance(value, type):
        for name, x in getattr(value, "__dict__", {}).items():
            if not isinstance(x, (type, FunctionType, BuiltinFunctionType, ModuleType)):
                yield name, x


def _alike(before: Any, now: Any, tensors: bool) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and _alike(x, now[key], tensors) for key, x in before.items())
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        if before[:1] == now[:1] == ("tensor",) and not tensors:
            return True
        parts = zip(before, now, strict=False)
        return len(before) == len(now) and all(_alike(a, b, tensors) for a, b in parts)
    return bool(before == now)


def is_counter(before: Any, now: Any) -> bool:
    """Whether a number, or one in an object, was changed, or a generator of numbers drew one: not
    what lies in lists and dicts, which a forward fills before it reads them."""
    if isinstance(before, tuple) and before[:1] == ("drawn",):
        return bool(before != now)
    if isinstance(before, tuple) and isinstance(now, tuple) and isinstance(before[1], dict):
        return any(is_counter(x, now[1].get(name)) for name, x in before[1].items())
    return isinstance(before, PLAIN) and before != now
