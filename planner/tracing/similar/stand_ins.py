"""Stand-ins for similar layers, while the model around them is exported.

The user's own forward runs; only inside of the spared members of a group (`similar_layers.py`)
nothing is traced. A call of a member that is traced is put between the marks

    enter(inputs, member)  ...  leave(outputs, member)

and one of a spared member becomes, for every tensor it makes,

    repeated(inputs, member, position, size, stride, dtype)

`CopiedCalls` then puts the operators of the group's second member in its place. That is right
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
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from meshwright.costmodel.graph import Op, Ref, map_refs
from meshwright.costmodel.memo import Memo
from meshwright.planner.tracing.user_module import (
    PLAIN,
    STATE,
    Place,
    SimilarLayers,
    held_state,
    snapshot,
)
from meshwright.planner.tracing.values import TensorLike, TracedState

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


# --- copied calls ---------------------------------------------------------------------------------

# Copies of a traced layer's operators, for the similar layers that were not traced.
#
# In the exported program, marks enclose the calls of the first, the second and the last layer of a
# group (`stand_ins.py`), and `repeated` nodes stand for those between. Between two marks the
# converter makes operators as ever; at a `repeated` node those of the second layer are appended
# again, with
#
#     an input            -> the same input of this call
#     an own parameter    -> the parameter of that name in this layer, buffers alike
#     a result            -> a new value
#     a constant          -> the same where the first and second layer share it, else a new one
#     anything else       -> itself
#
# At the end the three traced calls must prove to be one program under that renaming, and nothing
# may have passed a call's border other than inputs and outputs: no write, no alias, no value read
# from outside. Otherwise `Irregular` is raised.


MARKS = (ENTER, LEAVE, REPEATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedCall:
    """A traced call of a member: operators `start` to `stop` (exclusive) of the graph, its input
    values, its outputs (none until its `leave` mark), and the `outer` slots from before it."""

    member: str
    start: int
    inputs: tuple[str, ...]
    outer: frozenset[str]
    stop: int = 0
    outputs: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _CanonicalCall:
    """A call in names that do not depend on the layer: a line for each operator, the layer's
    tensors (value -> path below it), and the values from outside in order of use."""

    lines: list[str] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)


class CopiedCalls:
    """The calls of similar layers in a graph that is being built, and their copies."""

    def __init__(
        self, state: TracedState, model: nn.Module, groups: Sequence[SimilarLayers]
    ) -> None:
        self.state, self.builder, self.slots = state, state.builder, state.slots
        self.model = model
        self.groups = {name: group for group in groups for name in group.members}
        self.calls: dict[str, _TracedCall] = {}
        self.open: _TracedCall | None = None
        self.copies: dict[str, list[str]] = {}  # spared member -> the slots it makes
        self.programs = Memo[str, _CanonicalCall]()
        self.copied_results: set[str] = set()

    def mark(
        self, target: Any, operands: Sequence[Any], member: str, position: int = 0
    ) -> str | None:
        """Handle a mark on slots; for a `repeated` one, the slot of the result that it stands for.
        Raises `Irregular` for calls that are not closed."""
        if not all(isinstance(x, str) for x in operands):
            raise Irregular(f"{member} meets a value that is no tensor of the graph")
        if target is REPEATED:
            if member not in self.copies:
                self.copies[member] = self._copy(member, self._read(operands))
                self.copied_results.update(self.copies[member])
            return self.copies[member][position]
        if target is ENTER:
            if self.open is not None:
                raise Irregular(f"{member} is called inside of {self.open.member}")
            inputs, start = self._read(operands), len(self.builder.ops)
            outer = frozenset(self.slots.held)
            self.open = _TracedCall(member=member, inputs=inputs, start=start, outer=outer)
        else:
            call, self.open = self.open, None
            if call is None or call.member != member:
                raise Irregular(f"the call of {member} does not end where it began")
            if any(self.slots.root(slot) in call.outer for slot in operands):
                raise Irregular(f"{member} gives a view of its input")
            outputs, stop = self._read(operands), len(self.builder.ops)
            self.calls[member] = replace(call, outputs=outputs, stop=stop)
        return None

    def _read(self, slots: Sequence[str]) -> tuple[str, ...]:
        before = len(self.builder.ops)
        values = tuple(map(self.slots.read, slots))
        if len(self.builder.ops) != before:
            raise Irregular("a layer is given a view of memory that was written to")
        return values

    def check_write(self, slot: str) -> None:
        """Raise `Irregular` where a write passes the border of a call."""
        root = self.slots.root(slot)
        if root in self.copied_results or (self.open is not None and root in self.open.outer):
            raise Irregular("a write passes the border of a layer")

    def _copy(self, member: str, inputs: Sequence[str]) -> list[str]:
        """Append the operators of a spared member; the slots of its results."""
        group = self.groups[member]
        first, second, _ = group.traced
        if first not in self.calls or second not in self.calls or self.open is not None:
            raise Irregular(f"{member} is called before {second} ends")
        call, program = self.calls[second], self._program(second)
        values = self.builder.values
        if any(values[a] != values[b] for a, b in zip(call.inputs, inputs, strict=True)):
            raise Irregular(f"{member} takes other tensors than {second}")
        suffix = f"_copy{group.members.index(member)}"
        names: dict[str, str] = {}
        constants = self.state.constants
        for a, b in zip(self._program(first).outside, program.outside, strict=False):
            if a != b and b in constants:  # the first and second layer do not share it
                names[b] = self.state.constant(b + suffix, constants[b], values[b])
        names |= dict(zip(call.inputs, inputs, strict=True))
        for value, path in program.parameters.items():
            slot = self.state.parameter(f"{member}.{path}", values[value])
            (names[value],) = self._read([slot])
        for value, path in program.buffers.items():
            slot = self.state.buffer(f"{member}.{path}", value + suffix, values[value])
            (names[value],) = self._read([slot])
        for op in self._ops(second):
            module = _moved(op.module, second, member)
            self.builder.repeat(op, names, op.name + suffix, module)
        return [self.slots.new(names[output]) for output in call.outputs]

    def _program(self, member: str) -> _CanonicalCall:
        return self.programs.of(member, lambda: self._canonical(member, self.calls[member]))

    def _canonical(self, member: str, call: _TracedCall) -> _CanonicalCall:
        program, values = _CanonicalCall(), self.builder.values
        tokens: dict[str, str] = {}
        for k, value in enumerate(call.inputs):
            tokens.setdefault(value, f"input {k}")
        parameters: dict[str, str] = {}
        module = self.model.get_submodule(member)
        for path, _ in module.named_parameters(remove_duplicate=False):
            slot = self.state.known_parameter(f"{member}.{path}")
            if slot is not None:
                parameters.setdefault(self.slots.held[slot], path)

        def token(value: str) -> str:
            if value not in tokens:
                fqn = self.state.buffers.get(value, "")
                if value in parameters:
                    program.parameters[value] = parameters[value]
                    tokens[value] = f"parameter {parameters[value]}"
                elif fqn.startswith(f"{member}."):
                    program.buffers[value] = fqn.removeprefix(f"{member}.")
                    tokens[value] = f"buffer {program.buffers[value]}"
                else:
                    tokens[value] = f"outside {len(program.outside)}"
                    program.outside.append(value)
            return tokens[value]

        for k, op in enumerate(self._ops(member)):
            args = map_refs((op.args, op.kwargs), lambda value: Ref(token(value)))
            sizes = [(values[r].shape, values[r].dtype) for r in op.results]
            several, module_path = op.results != (op.name,), _moved(op.module, member, "")
            program.lines.append(repr((op.target, args, sizes, several, module_path, op.source)))
            tokens |= {result: f"result {k} {j}" for j, result in enumerate(op.results)}
        program.lines.append(str([token(value) for value in call.outputs]))
        return program

    def check(self) -> None:
        """Raise `Irregular` unless the traced layers of each group are one program, closed but for
        inputs and outputs."""
        if self.open is not None:
            raise Irregular(f"the call of {self.open.member} does not end")
        apart: list[str] = []
        for group in dict.fromkeys(self.groups.values()):
            if not all(name in self.calls for name in group.traced):
                raise Irregular(f"{group.members[0]} and its like are not all traced")
            first, second, last = (self._program(name) for name in group.traced)
            if first.lines != second.lines == last.lines:  # it takes what no other layer makes
                apart.append(group.traced[0])
                continue
            if self._shared(first, second) != self._shared(second, last):
                raise Irregular(f"{group.traced[0]} and its like share not the same tensors")
            flows = [
                [self.builder.values[r].requires_grad for op in self._ops(name) for r in op.results]
                for name in group.traced[1:]
            ]
            if flows[0] != flows[1]:
                raise Irregular(f"gradients flow otherwise through {group.traced[2]}")
        if apart:
            raise Irregular(f"{apart[0]} computes otherwise than its like", apart)
        self._check_closed()

    def _ops(self, member: str) -> Sequence[Op]:
        call = self.calls[member]
        return self.builder.ops[call.start : call.stop]

    def _shared(self, a: _CanonicalCall, b: _CanonicalCall) -> list[bool]:
        """For each value from outside, whether two calls read the same one. Raises `Irregular`
        where they are not one program up to equal constants."""
        if a.lines != b.lines or len(a.outside) != len(b.outside):
            raise Irregular("two layers that are built alike compute differently")
        constants = self.state.constants
        for x, y in zip(a.outside, b.outside, strict=True):
            known = x in constants and y in constants
            if x != y and not (known and _equal(constants[x], constants[y])):
                raise Irregular(f"two layers that are built alike read {x} and {y}")
        return [x == y for x, y in zip(a.outside, b.outside, strict=True)]

    def _check_closed(self) -> None:
        inside: dict[str, str] = {}
        at: dict[int, str] = {}
        for member, call in self.calls.items():
            at |= dict.fromkeys(range(call.start, call.stop), member)
            results = {r for op in self._ops(member) for r in op.results}
            inside |= dict.fromkeys(results.difference(call.outputs), member)
        for k, op in enumerate(self.builder.ops):
            member_at = at.get(k)
            if any(inside.get(name, member_at) != member_at for name in op.operands):
                raise Irregular(f"{op.key} reads what a layer keeps to itself")


def _moved(module: str, old: str, new: str) -> str:
    inside = module == old or module.startswith(f"{old}.")
    return new + module.removeprefix(old) if inside else module


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
