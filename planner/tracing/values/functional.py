"""Functionalization: every result is a value of its own name, and no operator changes memory.

A tensor that the traced program writes into (`relu_`, `x[:, 0] = 0`, `running.mul_(0.9)`) is a
*slot* whose value is replaced; a write into a view also replaces that of the slot below,

    slot(view) := new,    slot(base) := scatter(slot(base), new)

while its other aliases, views of the same memory, are taken from their base again when they are
next read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Op, Ref, TensorMeta, map_refs, refs, short_name
from meshwright.costmodel.rules import overload, tagged, traits_of
from meshwright.planner.errors import TraceError

# results that carry no gradient, whatever the operands do
CONSTANT_LIKE = frozenset({
    "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_full", "new_empty", "bernoulli",
})  # fmt: skip
RESHAPES = frozenset({
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel",
    "view_as", "reshape_as",
})  # fmt: skip
# views that, where the shape stays, see every element in its place
ALIGNED = RESHAPES | {"slice", "contiguous", "to", "alias", "expand", "expand_as"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The module FQN that an operator comes from, and file:line of the user's source."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return self.source or "an unknown place"


@dataclass(slots=True, kw_only=True)
class GraphBuilder:
    """The operators of a graph in topological order, and the shapes of their values."""

    values: dict[str, TensorMeta] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _keys: Counter[str] = field(default_factory=Counter)

    def unique(self, base: str) -> str:
        """`base`, or `base` with a number where it is taken."""
        name, k = base, 0
        while name in self._names:
            k += 1
            name = f"{base}_{k}"
        self._names.add(name)
        return name

    def define(self, base: str, meta: TensorMeta) -> str:
        """A value that no operator makes (input, parameter, buffer, constant)."""
        name = self.unique(base)
        self.values[name] = meta
        return name

    def add(
        self,
        target: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        origin: Origin,
        *,
        name: str = "",
        metas: Sequence[TensorMeta] = (),
        several: bool = False,
        grad: bool = True,
    ) -> tuple[str, ...]:
        """Append one call; the names of its results, `several` if it returns a list or tuple.
        Without `metas` their shapes are inferred. `grad`: gradients are recorded."""
        metas = metas or infer_metas(self.values, target, args, kwargs)
        flows = grad and short_name(target) not in CONSTANT_LIKE
        needs = flows and any(self.values[n].requires_grad for n in refs((args, kwargs)))
        name, results = self._named(name or target.split(".")[1], len(metas), several)
        for result, meta in zip(results, metas, strict=True):
            differentiable = meta.dtype.is_floating_point or meta.dtype.is_complex
            self.values[result] = replace(meta, requires_grad=needs and differentiable)
        self.ops.append(
            Op(
                name=name,
                target=target,
                args=tuple(args),
                kwargs=dict(kwargs),
                results=results,
                key=self._key(origin.module, target),
                module=origin.module,
                source=origin.source,
            )
        )
        return results

    def _named(self, base: str, count: int, several: bool) -> tuple[str, tuple[str, ...]]:
        """Names of a call and of its results."""
        name = self.unique(base)
        return name, tuple(self.unique(f"{name}_{i}") for i in range(count)) if several else (name,)

    def _key(self, module: str, target: str) -> str:
        base = f"{module}:{target.split('.')[1]}"
        count = self._keys[base]
        self._keys[base] += 1
        return f"{base}#{count}" if count else base

    def repeat(self, op: Op, names: dict[str, str], name: str, module: str) -> None:
        """Append `op` again in another module. `names` maps operands to the values there, and is
        extended by the results."""
        name, results = self._named(name, len(op.results), op.results != (op.name,))
        names |= dict(zip(op.results, results, strict=True))
        self.values |= {names[result]: self.values[result] for result in op.results}

        def renamed(value: str) -> Ref:
            return Ref(names.get(value, value))

        args, kwargs = map_refs((op.args, op.kwargs), renamed)
        key = self._key(module, op.target)
        self.ops.append(
            replace(
                op, name=name, args=args, kwargs=kwargs, results=results, key=key, module=module
            )
        )

    def cast(self, value: str, dtype: torch.dtype, origin: Origin, *, grad: bool = True) -> str:
        """The value in `dtype`: itself, or the result of an `aten.to`."""
        if self.values[value].dtype == dtype:
            return value
        return self.add("aten.to.dtype", (Ref(value), dtype), {}, origin, grad=grad)[0]


def infer_metas(
    values: Mapping[str, TensorMeta], target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[TensorMeta]:
    """Shapes and dtypes of a call's results, inferred by running it on meta tensors."""

    def blank(name: str) -> torch.Tensor:
        return torch.empty(values[name].shape, dtype=values[name].dtype, device="meta")

    local_args, local_kwargs = map_refs((tuple(args), dict(kwargs)), blank)
    if "device" in local_kwargs:
        local_kwargs["device"] = torch.device("meta")
    with torch.no_grad():
        output = overload(target)(*local_args, **local_kwargs)
    results = list(output) if isinstance(output, (tuple, list)) else [output]
    return [TensorMeta(shape=tuple(t.shape), dtype=t.dtype) for t in results]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A slot as a view of another: result `index` of `op`, whose first operand is slot `base`."""

    base: str
    op: Op
    index: int


@dataclass(slots=True, kw_only=True)
class Slots:
    """The current value of every slot. A slot is named after the first value that it held."""

    builder: GraphBuilder
    held: dict[str, str] = field(default_factory=dict)
    _views: dict[str, _View] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)  # writes that a slot's value includes
    _writes: Counter[str] = field(default_factory=Counter)  # by root slot

    def new(self, value: str, base: str | None = None) -> str:
        """A slot holding `value`; with `base`, a view of that slot by the last operator added."""
        slot = value
        while slot in self.held:
            slot += "'"
        self.held[slot] = value
        if base is not None:
            op = self.builder.ops[-1]
            self._views[slot] = _View(base=base, op=op, index=op.results.index(value))
        self._seen[slot] = self._writes[self.root(slot)]
        return slot

    def root(self, slot: str) -> str:
        """The slot that owns the memory which `slot` is, or views."""
        while slot in self._views:
            slot = self._views[slot].base
        return slot

    def as_whole(self, slot: str) -> bool:
        """Whether a slot is all the memory of its root, element by element."""
        while view := self._views.get(slot):
            if not traits_of(view.op).stride_bound:  # detach, alias
                return False
            slot = view.base
        return True

    def whole_views(self, root: str) -> set[str]:
        """The values of views that are all of a root's memory."""
        views = (slot for slot in self._views if self.root(slot) == root and self.as_whole(slot))
        return {self.held[slot] for slot in views}

    def read(self, slot: str) -> str:
        """The current value of a slot; a view is taken again if its memory was written to since."""
        writes = self._writes[self.root(slot)]
        if self._seen[slot] < writes:
            view = self._views[slot]
            op = view.op
            results = self.builder.add(
                op.target,
                (Ref(self.read(view.base)), *op.args[1:]),
                op.kwargs,
                Origin(module=op.module, source=op.source),
                name=op.name,
                metas=[self.builder.values[r] for r in op.results],
                several=op.results != (op.name,),
            )
            self.held[slot] = results[view.index]
            self._seen[slot] = writes
        return self.held[slot]

    def write(self, slot: str, value: str, origin: Origin) -> None:
        """Replace a slot's value and, where it is a view, that part of the slots below it. Raises
        `TraceError` for a view without an inverse."""
        updates = {slot: value}
        root = slot
        while view := self._views.get(root):
            updates[view.base] = self._scatter(view, self.read(view.base), updates[root], origin)
            root = view.base
        self._writes[root] += 1
        self.held |= updates
        self._seen |= dict.fromkeys(updates, self._writes[root])

    def _scatter(self, view: _View, base: str, value: str, origin: Origin) -> str:
        """A new value of the base, with the view's part replaced by `value`."""
        short, args = view.op.short, view.op.args[1:]
        shape = self.builder.values[base].shape
        if short in ALIGNED and self.builder.values[value].shape == shape:
            return value
        if short in ("select", "slice"):
            target = f"aten.{short}_scatter.default"
            inputs = (Ref(base), Ref(value), *args)
            return self.builder.add(target, inputs, view.op.kwargs, origin)[0]
        if short in RESHAPES:
            target, args = "aten.reshape.default", (list(shape),)
        elif short == "permute":
            order = [int(d) % len(shape) for d in args[0]]
            target, args = "aten.permute.default", ([order.index(d) for d in range(len(shape))],)
        elif short in _INVERSES:
            target = _INVERSES[short]
        elif short == "detach":
            raise TraceError(
                f"at {origin} a tensor with a gradient is changed in place through .data or "
                "detach(), which the forward may do to a parameter alone, element by element, by "
                "plain numbers and before it reads it; change parameters between steps, and "
                "write other tensors out of place"
            )
        else:
            raise TraceError(
                f"at {origin} a view made by {view.op.target} is "
                "written to in place; write it out of place (torch.where, torch.cat, x = x + y)"
            )
        return self.builder.add(target, (Ref(value), *args), {}, origin)[0]


# views that are their own inverse, called with the same arguments
_INVERSES: Mapping[str, str] = {
    "transpose": "aten.transpose.int", "swapaxes": "aten.transpose.int", "t": "aten.t.default"
}  # fmt: skip


# in-place operators whose functional form is not the name without its last character
_NAMED_OTHERWISE: Mapping[str, str] = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
    **{
        f"aten.__i{python}__.{which}": f"aten.bitwise_{name}.{which}"
        for python, name in (("or", "or"), ("and", "and"), ("xor", "xor"))
        for which in ("Tensor", "Scalar")
    },
    **{
        f"aten.__i{side[0]}shift__.{which}": f"aten.bitwise_{side}_shift.{functional}"
        for side in ("left", "right")
        for which, functional in (("Tensor", "Tensor"), ("Scalar", "Tensor_Scalar"))
    },
}


def functional_call(
    builder: GraphBuilder,
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    origin: Origin,
    *,
    name: str,
    grad: bool,
) -> str:
    """Append the functional form of an in-place call; the value that it leaves in its first
    operand, or in `out`. Raises `TraceError` where there is none."""
    namespace, base, which = target.split(".")
    written: Ref = kwargs.get("out", args[0])
    meta = builder.values[written.name]

    def call(target: str, args: Sequence[Any], kwargs: Mapping[str, Any], name: str = name) -> str:
        return builder.add(target, args, kwargs, origin, name=name, grad=grad)[0]

    if base == "copy_" or (base == "fill_" and isinstance(args[1], Ref)):
        source = args[1].name
        if not grad and builder.values[source].requires_grad:
            source = call("aten.detach.default", (args[1],), {}, "")
        value = builder.cast(source, meta.dtype, origin, grad=grad)
        if builder.values[value].shape == meta.shape:
            return value
        return call("aten.expand.default", (Ref(value), list(meta.shape)), {}, "")
    if base in ("fill_", "zero_"):
        return call("aten.full_like.default", (written, args[1] if base == "fill_" else 0), {})
    if target in _NAMED_OTHERWISE:  # defaults, which export leaves out, are those of `target`
        omitted = overload(target)._schema.arguments[len(args) :]
        defaults = {a.name: a.default_value for a in omitted if a.default_value is not None}
        return call(_NAMED_OTHERWISE[target], args, {**defaults, **kwargs})
    packet = getattr(getattr(torch.ops, namespace), base[:-1], None)
    if "out" in kwargs:
        functional = _returning(target, origin)
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    elif base.endswith("_") and packet is not None and which in packet.overloads():
        functional = f"{namespace}.{base[:-1]}.{which}"
    else:
        raise TraceError(
            f"in-place operator {target} at {origin} has no functional form; write it out of place"
        )
    return builder.cast(call(functional, args, kwargs), meta.dtype, origin, grad=grad)


def _returning(target: str, origin: Origin) -> str:
    """The target of the overload that returns the result of `target` instead of writing `out`."""
    namespace, name, _ = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    inputs = [(a.name, str(a.type)) for a in overload(target)._schema.arguments if not a.is_out]
    for which in packet.overloads():
        schema = getattr(packet, which)._schema
        if [(a.name, str(a.type)) for a in schema.arguments] == inputs:
            return f"{namespace}.{name}.{which}"
    raise TraceError(f"{target} at {origin} has no form that returns its result; drop out=")


def split_derived(
    calls: Sequence[Op], wanted: set[str], raw: set[str]
) -> tuple[list[Op], list[Op]]:
    """The operators that `wanted` values need, in order: (the derived ones, which follow from `raw`
    values alone, the others)."""
    live, needed = set(wanted), []
    for op in reversed(calls):
        if live & set(op.results):
            live |= set(op.operands)
            needed.append(op)
    known = set(raw)
    derived: list[Op] = []
    ops: list[Op] = []
    for op in reversed(needed):
        if (
            known.issuperset(op.operands)
            # each stage can run a copy of one that writes no statistics and draws nothing
            and traits_of(op).statistics is None
            and not tagged(op.target, torch.Tag.nondeterministic_seeded)
        ):
            known |= set(op.results)
            derived.append(op)
        else:
            ops.append(op)
    return derived, ops


# --- state, which no operator makes ---------------------------------------------------------------


class TracedState:
    """Parameters and buffers met so far, value -> FQN, and constants, value -> tensor. `aliases`
    maps every parameter FQN of the model to the first of those tied to it; `buffers` are the FQNs
    of its buffers, in order."""

    def __init__(self, model: nn.Module, buffers: Sequence[str]) -> None:
        self.builder = GraphBuilder()
        self.slots = Slots(builder=self.builder)
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._slots: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self.aliases[name] = first.setdefault(id(p), name)
        self._order = {name: k for k, name in enumerate((*self.aliases, *buffers))}

    def parameter(self, fqn: str, meta: TensorMeta) -> str:
        """The slot of a parameter, by any of its FQNs; defined when it is first met."""
        fqn = self.aliases.get(fqn, fqn)
        if fqn not in self._slots:
            value = self.builder.define("p_" + fqn.replace(".", "_"), meta)
            self.parameters[value] = fqn
            self._slots[fqn] = self.slots.new(value)
        return self._slots[fqn]

    def known_parameter(self, fqn: str) -> str | None:
        """The slot of a parameter; None if it was not met."""
        return self._slots.get(self.aliases.get(fqn, fqn))

    def buffer(self, fqn: str, name: str, meta: TensorMeta) -> str:
        value = self.builder.define(name, meta)
        self.buffers[value] = fqn
        return self.slots.new(value)

    def constant(self, name: str, tensor: torch.Tensor, meta: TensorMeta) -> str:
        value = self.builder.define(name, meta)
        self.constants[value] = tensor
        return self.slots.new(value)

    def ordered(self, names: Mapping[str, str]) -> dict[str, str]:
        """Values and their FQNs in the order of the model."""
        return dict(sorted(names.items(), key=lambda item: self._order[item[1]]))
