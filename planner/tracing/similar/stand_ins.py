"""Stand-ins for similar layers, while the model around them is exported.

The user's own forward runs; only inside of the spared members of a group (`similar_layers.py`)
nothing is traced. A call of a member that is traced is put between the marks

    enter(inputs, member)  ...  leave(outputs, member)

and one of a spared member becomes, for every tensor it makes,

    repeated(inputs, member, position, size, stride, dtype)

`copied_calls.py` then puts the operators of the group's second member in its place. That is right
only if the spared member would have done the same. So `Irregular` is raised, and the model traced
in full, unless every call has the arguments of the second member's (equal structure, tensors of
equal shape, stride, dtype and `requires_grad`, the very same tensor where the second and the last
member share one, equal other arguments, equal autograd and autocast state), every member is called
at most once, the traced ones give results of the same kind and change no attribute, nobody looks
into a spared member, and no operation uses a member's own position or name. No comparison sees a
layer that asks something outside of the model and of its arguments (a module-level counter, a
clock) and that by this differs in the middle of a stack only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from meshwright.planner.tracing.user_module import (
    PLAIN,
    STATE,
    Place,
    SimilarLayers,
    held_state,
    snapshot,
)
from meshwright.planner.tracing.values import TensorLike

torch.library.define("meshwright::enter", "(Tensor[] inputs, str member) -> ()")
torch.library.define("meshwright::leave", "(Tensor[] outputs, str member) -> ()")
torch.library.define(
    "meshwright::repeated",
    "(Tensor[] inputs, str member, int position, int[] size, int[] stride, ScalarType dtype) "
    "-> Tensor",
)
ENTER = torch.ops.meshwright.enter.default
LEAVE = torch.ops.meshwright.leave.default
REPEATED = torch.ops.meshwright.repeated.default
for _mark in (ENTER, LEAVE):
    fx.has_side_effect(_mark)
    torch.library.register_fake(_mark, lambda tensors, member: None)
torch.library.register_fake(
    REPEATED,
    lambda inputs, member, position, size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=inputs[0].device
    ),
)


class Irregular(Exception):
    """A short trace can't be shown to equal the full one; it may, where the layers `apart` are
    traced apart from those that are built like them."""

    def __init__(self, why: str, apart: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.apart = apart


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemberCall:
    """One call of a member: `arguments` compares equal for equal calls. `results` are its output's
    leaves: `TensorLike` for a new tensor, ("input", number) or ("value", plain value); `spec` its
    pytree."""

    arguments: Any
    inputs: tuple[torch.Tensor, ...]
    results: tuple[Any, ...] = ()
    spec: Any = None


class StandIns:
    """The stand-ins of one model's groups while it is copied and exported once."""

    def __init__(self, model: nn.Module, groups: Sequence[SimilarLayers]) -> None:
        self.groups = groups
        self.watching = False
        self.reason = ""
        self.calls: dict[str, _MemberCall] = {}
        self.modules: dict[str, list[nn.Module]] = {}  # of a member: their state must not change
        self.before: dict[str, Any] = {}
        spared = [name for group in groups for name in group.spared]
        self.originals = {name: model.get_submodule(name) for name in spared}
        self.blank = {name: nn.Module.__new__(nn.Module) for name in spared}

    def refuse(self, why: str) -> NoReturn:
        """Raise `Irregular`, and note it, should the model's code catch that."""
        self.reason = self.reason or why
        raise Irregular(why)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of one forward of the model, in which a look into a spared member raises."""
        self.calls.clear()
        self.before = {name: snapshot(modules) for name, modules in self.modules.items()}
        self.watching = True
        try:
            yield
        finally:
            self.watching = False

    # --- the copy ---

    def memo(self) -> dict[int, Any]:
        """The memo for `copy.deepcopy` by which spared members become blank, without a tensor."""
        memo: dict[int, Any] = {}
        for name, original in self.originals.items():
            for tensor in (*original.parameters(), *original.buffers()):
                memo[id(tensor)] = object()  # for something else that holds it
            memo[id(original)] = self.blank[name]
        return memo

    def instrument(self, model: nn.Module) -> None:
        """Replace the forwards of a copy's members: they record calls, or stand in if spared."""
        for group in self.groups:
            for name in group.traced:
                self._instrument_traced(model.get_submodule(name), name, group)
            source = model.get_submodule(group.traced[1])
            for name in group.spared:
                self._instrument_spared(self.blank[name], source, name, group)

    def _instrument_traced(self, module: nn.Module, name: str, group: SimilarLayers) -> None:
        for path, *keys, last in group.identifiers:
            holder = reduce(operator.getitem, keys, vars(module.get_submodule(path)))
            holder[last] = _Identifier(holder[last], self)
        modules = self.modules[name] = list(module.modules())
        forward = type(module).forward

        def traced(proxy: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = self._called(name, args, kwargs)
            state = held_state(modules)
            ENTER(list(call.inputs), name)
            output = forward(proxy, *args, **kwargs)
            if snapshot(modules) != self.before[name] or held_state(modules) != state:
                self.refuse(f"{name} keeps state")
            if _flat(args, kwargs)[2] != call.arguments:
                self.refuse(f"{name} changes its arguments")
            new_tensors, results, spec = self._results(name, output, call.inputs)
            LEAVE(new_tensors, name)
            self.calls[name] = replace(call, results=results, spec=spec)
            return output

        module.__class__ = overridden(type(module), traced)

    def _instrument_spared(
        self, blank: nn.Module, source: nn.Module, name: str, group: SimilarLayers
    ) -> None:
        vars(blank).update(vars(source), **{table: _Closed(self, name) for table in STATE})
        self.modules[name] = [blank]
        copied = group.traced[1]

        def stand_in(proxy: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = self._called(name, args, kwargs)
            pattern = self.calls.get(copied)
            if pattern is None or call.arguments != pattern.arguments:
                self.refuse(f"{name} is not called as {copied}")
            self.calls[name] = call
            return self._stand_in(name, call, pattern)

        # the class of the copied member before it was overridden
        blank.__class__ = overridden(type(source).__mro__[1], stand_in)

    def _stand_in(self, name: str, call: _MemberCall, pattern: _MemberCall) -> Any:
        leaves: list[Any] = []
        count = 0
        inputs = list(call.inputs)
        for result in pattern.results:
            if isinstance(result, TensorLike):
                leaf = REPEATED(inputs, name, count, result.shape, result.stride, result.dtype)
                if leaf.requires_grad != result.requires_grad:
                    self.refuse(f"{name} would give another requires_grad")
                count += 1
            else:
                kind, argument = result
                leaf = inputs[argument] if kind == "input" else argument
            leaves.append(leaf)
        if not count or not inputs:
            self.refuse(f"{name} takes or makes no tensor")
        return pytree.tree_unflatten(leaves, pattern.spec)

    # --- calls ---

    def _called(self, name: str, args: Any, kwargs: Any) -> _MemberCall:
        if name in self.calls:
            self.refuse(f"{name} is called twice")
        if snapshot(self.modules[name]) != self.before[name]:
            self.refuse(f"{name} was changed")
        leaves, inputs, arguments = _flat(args, kwargs)
        odd = [x for x in leaves if not isinstance(x, (torch.Tensor, *PLAIN))]
        if odd:
            self.refuse(f"{name} is given a {type(odd[0]).__name__}")
        return _MemberCall(arguments=arguments, inputs=inputs)

    def _results(
        self, name: str, output: Any, inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], Any]:
        leaves, spec = pytree.tree_flatten(output)
        places = {id(t): k for k, t in enumerate(inputs)}
        new_tensors: list[torch.Tensor] = []
        results: list[Any] = []
        for leaf in leaves:
            if id(leaf) in places:
                results.append(("input", places[id(leaf)]))
            elif isinstance(leaf, torch.Tensor):
                if any(leaf is other for other in new_tensors):
                    self.refuse(f"{name} gives a tensor twice")
                new_tensors.append(leaf)
                results.append(TensorLike.of(leaf))
            elif isinstance(leaf, PLAIN):
                results.append(("value", leaf))
            else:
                self.refuse(f"{name} gives a {type(leaf).__name__}")
        return new_tensors, tuple(results), spec

    def check(self) -> None:
        """After the export: raise `Irregular` unless calls of each group's members are equal."""
        if self.reason:
            raise Irregular(self.reason)
        for group in self.groups:
            first, second, last = (self.calls.get(name) for name in group.traced)
            if first is None or second is None or last is None:
                raise Irregular(f"{group.members[0]} and its like are not all called")
            if replace(second, inputs=()) != replace(last, inputs=()):
                raise Irregular(f"{group.members[-1]} is not called as {group.members[1]}")
            pairs = zip(second.inputs, last.inputs, strict=True)
            shared = [k for k, (a, b) in enumerate(pairs) if a is b]
            for name in group.spared:
                call = self.calls.get(name)
                if call and any(call.inputs[k] is not second.inputs[k] for k in shared):
                    raise Irregular(f"{name} has a tensor of its own where others share one")


def _flat(args: Any, kwargs: Any) -> tuple[list[Any], tuple[torch.Tensor, ...], Any]:
    """(leaves, tensors, a key that is equal for calls that can't be told apart)."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    inputs = tuple(x for x in leaves if isinstance(x, torch.Tensor))
    first: dict[int, int] = {}
    described = [
        (type(x), TensorLike.of(x), x.device, first.setdefault(id(x), k))
        if isinstance(x, torch.Tensor)
        else comparable(x)
        for k, x in enumerate(leaves)
    ]
    cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return leaves, inputs, (spec, described, torch.is_grad_enabled(), cast)


def comparable(leaf: Any) -> Any:
    """A plain argument with its type, such that nan equals nan, and 1 neither True nor 1.0."""
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf


def overridden(base: type, forward: Callable[..., Any]) -> type:
    """A class with another forward that looks like `base`: one module's, where an attribute would
    bypass the proxies through which export follows module paths."""
    body = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), body)


class _Closed(dict[str, Any]):
    """The empty state of a spared member; raises where the model's code reads it."""

    def __init__(self, stand_ins: StandIns, member: str) -> None:
        super().__init__()
        self.stand_ins, self.member = stand_ins, member


def _looked(name: str) -> Callable[..., Any]:
    """The method of `dict`, refused while the model's forward runs."""
    plain = getattr(dict, name)

    def look(self: _Closed, *args: Any) -> Any:
        if self.stand_ins.watching:
            self.stand_ins.refuse(f"the model looks into {self.member}")
        return plain(self, *args)

    return look


_DICT_METHODS = (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__",
    "__reversed__", "get", "keys", "values", "items", "pop", "setdefault", "update", "copy",
)  # fmt: skip
for _name in _DICT_METHODS:
    setattr(_Closed, _name, _looked(_name))


class _Identifier:
    """A member's position or name; raises where something depends on it."""

    def __init__(self, value: int | str, stand_ins: StandIns) -> None:
        self.value, self.stand_ins = value, stand_ins

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def used(self) -> int | str:
        """The value, refused while the model's forward runs."""
        if self.stand_ins.watching:
            self.stand_ins.refuse("a layer depends on its own position or name")
        return self.value

    def __bool__(self) -> bool:
        return bool(self.used())

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":  # what copies ask for
            raise AttributeError(name)
        return getattr(self.used(), name)


def identifiers_of(module: nn.Module) -> set[Place]:
    """The places in a traced member, and in modules below, that hold an `_Identifier`."""
    return {
        place
        for path, below in module.named_modules()
        for place in _identifiers_in(vars(below), (path,))
    }


def _identifiers_in(table: dict[Any, Any], place: Place) -> Iterator[Place]:
    for key, value in table.items():
        if type(value) is _Identifier:
            yield (*place, key)
        elif isinstance(value, dict):
            yield from _identifiers_in(value, (*place, key))


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.used(), name)(*args)


_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor",
    "lshift", "rshift",
)  # fmt: skip
_UNARY = (
    "index", "int", "float", "hash", "repr", "str", "format", "eq", "ne", "lt", "le", "gt", "ge",
    "neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "len", "iter", "contains",
    "getitem",
)  # fmt: skip
for _name in (*_UNARY, *_BINARY, *(f"r{operation}" for operation in _BINARY)):
    setattr(_Identifier, f"__{_name}__", _method(f"__{_name}__"))
