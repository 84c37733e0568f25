"""One call of an exported program -> operators of the graph.

A call that returns its operand unchanged is dropped; an in-place one gives its slot a new value;
under autocast the operands are cast first; any other is one operator with the shapes that the
export recorded in the node's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshwright.costmodel.graph import Ref, map_refs, refs, short_name
from meshwright.costmodel.rules import Leaf, tagged, traits_of_target
from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.leaves import LEAF_OPERATORS
from meshwright.planner.tracing.similar import CopiedCalls
from meshwright.planner.tracing.values import (
    RESHAPES,
    GraphBuilder,
    Origin,
    Slots,
    TracedState,
    Unknown,
    canonical_target,
    check_dense,
    functional_call,
    infer_metas,
    is_dynamic,
    meta_of,
    module_of,
    results_of,
    schema_of,
    shapes_of,
    share_memory,
    source_of,
    thawed,
    where,
)

IGNORED_KWARGS = ("pin_memory", "layout")
CASTS = ("to", "_to_copy", "type_as")
PROMOTE = frozenset({"cat", "stack", "where"})  # beside pointwise operators
# may change nothing at one row alone: a class token's expand, the transpose of one row of one
ARRANGES = RESHAPES | {
    "expand", "expand_as", "broadcast_to", "transpose", "permute", "movedim", "swapaxes", "t",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An fx graph while it is converted: what its nodes stand for (slots, lists of slots, plain
    values), whether gradients are recorded, and whether autocast is on."""

    names: dict[str, Any] = field(default_factory=dict)
    grad: bool = True
    autocast: bool = False

    def value(self, item: Any) -> Any:
        return self.names[item.name] if isinstance(item, fx.Node) else item


class CallConverter:
    """Appends the calls of a program to the graph that is being built."""

    def __init__(
        self,
        builder: GraphBuilder,
        slots: Slots,
        state: TracedState,
        copies: CopiedCalls,
        leaves: Sequence[Leaf],
    ) -> None:
        self.builder = builder
        self.slots = slots
        self.state = state
        self.copies = copies
        self.leaves = leaves

    def convert(self, node: fx.Node, environment: Environment) -> Any:
        """What the node stands for: a slot, a list of slots, `Unknown`, or None for an assertion.

        Raises `TraceError` for a write, or a gradient, that the graph can't express.
        """
        if node.target in LEAF_OPERATORS:
            return self._leaf(node, environment)
        target = str(node.target)
        results = results_of(node)
        if not isinstance(node.target, torch._ops.OpOverload) or is_dynamic(results):
            return Unknown(where(node), target, module_of(node), dynamic=is_dynamic(results))
        written = _written_argument(node)
        if written is not None and target != "aten.detach_.default":
            return self._write(node, environment, written)
        if not any(isinstance(r, torch.Tensor) for r in results):
            return None
        check_dense(node)
        if self._is_identity(node, environment):
            return environment.value(node.args[0])
        if target == "aten.lift_fresh_copy.default":  # writes to it do not reach the constant
            return self.slots.new(self.slots.read(environment.value(node.args[0])))
        if target == "aten.broadcast_tensors.default":
            shape = tuple(results[0].shape)
            sources: Any = node.args[0]
            if shapes_of([n.meta["val"] for n in node.all_input_nodes]) == {shape}:
                return fx.map_arg(sources, environment.value)
            return [self._expanded(n, shape, node, environment) for n in sources]
        return self._operator(node, environment, results)

    def _expanded(
        self, source: fx.Node, shape: tuple[int, ...], node: fx.Node, environment: Environment
    ) -> str:
        """The slot of a value broadcast to a shape."""
        args = (Ref(self.slots.read(environment.value(source))), list(shape))
        (value,) = self.builder.add(
            "aten.expand.default", args, {}, _origin(node), grad=environment.grad
        )
        return self.slots.new(value)

    def _is_identity(self, node: fx.Node, environment: Environment) -> bool:
        """Whether a call returns its first operand's memory unchanged at any batch size (`to` its
        own dtype, dropout in eval mode): a model has the same operators at all of them."""
        source = node.args[0] if node.args else None
        val = node.meta["val"]
        if not isinstance(source, fx.Node) or not isinstance(val, torch.Tensor):
            return False
        slot, before = environment.value(source), source.meta.get("val")
        if not isinstance(slot, str) or not isinstance(before, torch.Tensor):
            return False
        short = short_name(str(node.target))
        if short.rstrip("_") == "detach":
            return not self.builder.values[self.slots.read(slot)].requires_grad
        draw = traits_of_target(str(node.target)).draw
        if draw and draw.kind == "dropout" and (not node.args[2] or node.args[1] == 0.0):
            return True
        if short in ARRANGES:
            return False
        if short == "contiguous" and before.stride() != _dense_strides(before.shape):
            return False  # a dim of one row has any stride
        same_type = (before.shape, before.dtype) == (val.shape, val.dtype)
        same_strides = before.stride() == val.stride()
        return same_type and same_strides and share_memory(before, val)

    def _operands(
        self, node: fx.Node, environment: Environment
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with a `Ref` to the current value in the place of each node."""

        def ref(item: fx.Node) -> Any:
            slots = environment.value(item)
            if isinstance(slots, str):
                return Ref(self.slots.read(slots))
            return [Ref(self.slots.read(slot)) for slot in slots]

        kwargs = {k: v for k, v in node.kwargs.items() if k not in IGNORED_KWARGS}
        return thawed(fx.map_arg(node.args, ref)), thawed(fx.map_arg(kwargs, ref))

    def _operator(self, node: fx.Node, environment: Environment, results: Sequence[Any]) -> Any:
        """One operator as it is; results that view an operand share its slot's memory."""
        origin = _origin(node)
        args, kwargs = self._operands(node, environment)
        target = canonical_target(str(node.target))
        metas = [meta_of(t) for t in results]
        if environment.autocast and short_name(target) not in CASTS:
            args, kwargs = self._autocast(target, args, kwargs, metas[0].dtype, origin)
        if short_name(target) in CASTS:  # the device in their arguments is the tracer's
            target, args, kwargs = "aten.to.dtype", (args[0], metas[0].dtype), {}
        several = isinstance(node.meta["val"], (tuple, list))
        values = self.builder.add(
            target,
            args,
            kwargs,
            origin,
            name=node.name,
            metas=metas,
            several=several,
            grad=environment.grad,
        )
        bases = [self._base(node, environment, t) for t in results]
        slots = [self.slots.new(v, base) for v, base in zip(values, bases, strict=True)]
        return slots if several else slots[0]

    def _leaf(self, node: fx.Node, environment: Environment) -> list[str]:
        """A leaf's call, with the `Leaf` itself as the argument in the place of its number."""
        args: Any = node.args
        leaf = self.leaves[args[1]]
        operands = [Ref(self.slots.read(x)) for x in fx.map_arg(args[0], environment.value)]
        values = self.builder.add(
            str(node.target),
            (leaf, operands),
            {},
            _origin(node),
            name=node.name,
            metas=[meta_of(t) for t in results_of(node)],
            several=True,
            grad=environment.grad,
        )
        for k, value in enumerate(values):  # results beyond `gradients` are buffers' new values
            flows = k < len(leaf.gradients) and leaf.gradients[k]
            meta = self.builder.values[value]
            self.builder.values[value] = replace(meta, requires_grad=meta.requires_grad and flows)
        return [self.slots.new(value) for value in values]

    def _write(self, node: fx.Node, environment: Environment, written: fx.Node) -> str:
        """An in-place call in functional form; its slot holds the new value from here on."""
        origin = _origin(node)
        slot: str = environment.value(written)
        before = self.slots.read(slot)
        if not environment.grad and self.builder.values[before].requires_grad:
            self._refuse_hidden_write(slot, str(node.target), origin)
        args, kwargs = self._operands(node, environment)
        value = functional_call(
            self.builder,
            str(node.target),
            args,
            kwargs,
            origin,
            name=node.name,
            grad=environment.grad,
        )
        self.copies.check_write(slot)
        self.slots.write(slot, value, origin)
        return slot

    def _refuse_hidden_write(self, slot: str, target: str, origin: Origin) -> None:
        if self.slots.root(slot) not in self.state.parameters:  # those have an error of their own
            raise TraceError(
                f"at {origin} {target} under no_grad changes a tensor that carries a gradient, "
                "which would pass as if nothing had; write x = x + (f(x) - x).detach() for that"
            )

    def _base(self, node: fx.Node, environment: Environment, result: torch.Tensor) -> str | None:
        """The slot that a result is a view of."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        slot, before = environment.value(source), source.meta.get("val")
        if not isinstance(slot, str) or not isinstance(before, torch.Tensor):
            return None
        return slot if share_memory(before, result) else None

    def _autocast(
        self, target: str, args: Any, kwargs: Any, dtype: torch.dtype, origin: Origin
    ) -> tuple[Any, Any]:
        """Operands cast as autocast did: to the recorded dtype, where the call alone would give
        another, or takes no operands of two."""
        values = self.builder.values
        floating = {
            values[n].dtype for n in refs((args, kwargs)) if values[n].dtype.is_floating_point
        }
        wanted = dtype.to_real() if dtype.is_complex else dtype
        if not wanted.is_floating_point or floating <= {wanted}:
            return args, kwargs
        if len(floating) == 1 or _promotes(target):
            try:
                if infer_metas(values, target, args, kwargs)[0].dtype == dtype:
                    return args, kwargs
            except RuntimeError:
                pass  # the operator has no kernel for these dtypes

        def cast(name: str) -> Ref:
            cast = values[name].dtype.is_floating_point
            return Ref(self.builder.cast(name, wanted, origin) if cast else name)

        args, kwargs = map_refs((args, kwargs), cast)
        return args, kwargs


def _promotes(target: str) -> bool:
    """Whether an operator takes floating operands of several dtypes: it promotes them, or is a norm
    whose statistics may be wider."""
    if short_name(target) in PROMOTE or traits_of_target(target).statistics is not None:
        return True
    return tagged(target, torch.Tag.pointwise)


def _origin(node: fx.Node) -> Origin:
    return Origin(module=module_of(node), source=source_of(node))


def _written_argument(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator writes to: its first, or `out`."""
    for position, argument in enumerate(schema_of(node).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        first = node.kwargs.get("out", node.args[0] if node.args else None)
        if (position and argument.name != "out") or not isinstance(first, fx.Node):
            raise TraceError(
                f"{node.target} at {where(node)} writes to its argument {argument.name!r}; "
                "write it out of place"
            )
        return first
    return None


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()
