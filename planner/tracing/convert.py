"""ExportedProgram -> Graph: plain operators on named values.

Placeholders become inputs, parameters (tied ones once), buffers and constants. Writes into memory
become values (`functional.py`). Regions are opened in place: under `no_grad` nothing asks for a
gradient, under `autocast` the casts that torch makes silently become operators. What the loss does
not need is dropped, and what follows from raw inputs alone (masks, positions) is set apart as
derived.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from meshwright.costmodel.graph import Graph, Ref, TensorMeta, map_refs, short_name, verify_graph
from meshwright.costmodel.rules.leaf import Leaf
from meshwright.costmodel.rules.traits import traits_of_target
from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.leaves.record import OPERATORS
from meshwright.planner.tracing.similar.copied_calls import MARKS, CopiedCalls
from meshwright.planner.tracing.user_module.similar_layers import Alike
from meshwright.planner.tracing.values.functional import (
    RESHAPES,
    Builder,
    Place,
    Slots,
    evaluate,
    functional_call,
    partition,
)
from meshwright.planner.tracing.values.fx_nodes import (
    Unknown,
    check_dense,
    is_dynamic,
    meta_of,
    module_of,
    plain,
    results_of,
    schema_of,
    shapes_of,
    share_memory,
    source_of,
    where,
)
from meshwright.planner.tracing.values.operator_names import plain_name
from meshwright.planner.tracing.values.traced_state import TracedState

IGNORED_KWARGS = ("pin_memory", "layout")
CASTS = ("to", "_to_copy", "type_as")
# may change nothing at one row alone: a class token's expand, the transpose of one row of one
ARRANGES = RESHAPES | {
    "expand", "expand_as", "broadcast_to", "transpose", "permute", "movedim", "swapaxes", "t",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """A graph being converted: what its nodes stand for (slots, lists of slots, plain values),
    whether gradients are recorded, and whether autocast is on."""

    names: dict[str, Any] = field(default_factory=dict)
    grad: bool = True
    autocast: bool = False

    def value(self, item: Any) -> Any:
        return self.names[item.name] if isinstance(item, fx.Node) else item


def convert(
    program: torch.export.ExportedProgram,
    *,
    module: nn.Module,
    model: nn.Module,
    loss_fn: Any,
    inputs: Sequence[tuple[str, bool]],
    rows: int,
    notes: tuple[str, ...],
    groups: Sequence[Alike] = (),
    leaves: Sequence[Leaf] = (),
) -> Graph:
    """The Graph of an exported loss.

    `module` is what was exported: the model under the name `model`, the loss under `loss_fn`;
    `model` and `loss_fn` are the user's own. `inputs` are (path, is batched) of the tensor
    arguments. `groups` are the layers of which only some were traced (`stand_ins.py`), `leaves`
    what the calls of leaves refer to (`leaves.py`).
    """
    converter = _Converter(program, module, model, loss_fn, inputs, groups, leaves)
    graph = converter.graph(rows, notes)
    verify_graph(graph)
    return graph


class _Converter:
    def __init__(
        self,
        program: torch.export.ExportedProgram,
        module: nn.Module,
        model: nn.Module,
        loss_fn: Any,
        inputs: Sequence[tuple[str, bool]],
        groups: Sequence[Alike],
        leaves: Sequence[Leaf],
    ) -> None:
        self.program, self.module, self.loss_fn = program, module, loss_fn
        self.leaves = leaves
        self.builder = Builder()
        self.slots = Slots(builder=self.builder)
        self.state = TracedState(model, self.builder, self.slots)
        self.copies = CopiedCalls(self.builder, self.slots, self.state, model, groups)
        self.inputs: dict[str, str] = {}
        self.batched: set[str] = set()
        self.user = iter(inputs)

    def graph(self, rows: int, notes: tuple[str, ...]) -> Graph:
        scope = _Scope()
        self._placeholders(scope)
        loss = self._loss(self._run(self.program.graph_module, scope), scope)
        self.copies.check()
        state = self.state
        updates = {b: self.slots.read(b) for b in state.buffers if self.slots.read(b) != b}
        for value, fqn in state.parameters.items():
            if self.slots.read(value) != value:
                raise TraceError(
                    f"the forward changes parameter {fqn} in place; make it a buffer, or change "
                    "it between steps"
                )
        values = self.builder.values
        raw = {*self.inputs, *state.buffers, *state.constants}
        derived, ops = partition(self.builder.ops, {loss, *updates.values()}, raw)
        if not values[loss].requires_grad:
            raise TraceError(
                "the loss depends on no trainable parameter: all are frozen, or the loss is "
                "computed under torch.no_grad or from detached tensors"
            )
        used = {n for op in (*derived, *ops) for n in (*op.operands, *op.results)}
        used |= {loss, *self.inputs, *updates}
        return Graph(
            values=_only(values, used),
            ops=tuple(ops),
            derived=tuple(derived),
            inputs=self.inputs,
            batched=frozenset(self.batched),
            parameters=_only(state.ordered(state.parameters), used),
            buffers=_only(state.ordered(state.buffers), used),
            constants=_only(state.constants, used),
            loss=loss,
            batch_size=rows,
            updates=updates,
            aliases={k: v for k, v in state.aliases.items() if k != v},
            notes=notes,
        )

    def _loss(self, outputs: Any, scope: _Scope) -> str:
        """The loss among the graph's outputs; the others replace buffers."""
        loss = None
        for spec, output in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            if spec.kind.name == "USER_OUTPUT":
                loss = output
            elif spec.kind.name == "BUFFER_MUTATION":
                fqn = str(spec.target).removeprefix("model.")
                buffer = next(b for b, name in self.state.buffers.items() if name == fqn)
                self.slots.write(buffer, self.slots.read(output), Place())
        if isinstance(loss, Unknown):
            raise loss.error()
        assert isinstance(loss, str), "the wrapper returns one tensor"
        value = self.slots.read(loss)
        if self.builder.values[
            value
        ].shape:  # one element in some shape: as torch's backward takes it
            value = self.builder.add("aten.reshape.default", (Ref(value), []), {}, Place())[0]
        return value

    # --- placeholders ---

    def _placeholders(self, scope: _Scope) -> None:
        signature = self.program.graph_signature
        constants = signature.inputs_to_lifted_tensor_constants
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            name = node.name
            if name in signature.inputs_to_parameters:
                scope.names[name] = self._parameter(signature.inputs_to_parameters[name])
            elif name in signature.inputs_to_buffers:
                scope.names[name] = self._buffer(signature.inputs_to_buffers[name], node)
            elif name in constants:
                tensor = self.program.constants[constants[name]]
                scope.names[name] = self.state.constant(name, tensor, meta_of(node.meta["val"]))
            else:
                path, batched = next(self.user)
                value = self.builder.define(name, meta_of(node.meta["val"]))
                self.inputs[value] = path
                if batched:
                    self.batched.add(value)
                scope.names[name] = self.slots.new(value)

    def _parameter(self, path: str) -> str:
        p = self.module.get_parameter(path)
        meta = TensorMeta(shape=tuple(p.shape), dtype=p.dtype, requires_grad=p.requires_grad)
        return self.state.parameter(path.removeprefix("model."), meta)

    def _buffer(self, path: str, node: fx.Node) -> str:
        meta = meta_of(node.meta["val"])
        if path.startswith("loss_fn."):  # the model's state does not have it
            tensor = self.loss_fn.get_buffer(path.removeprefix("loss_fn."))
            return self.state.constant(node.name, tensor.detach().to(meta.dtype), meta)
        return self.state.buffer(path.removeprefix("model."), node.name, meta)

    # --- nodes ---

    def _run(self, module: fx.GraphModule, scope: _Scope) -> Any:
        """Convert one graph whose placeholders `scope` binds; what it returns."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                found: Any = module
                for part in str(node.target).split("."):
                    found = getattr(found, part)
                if isinstance(found, torch.Tensor):
                    found = self.state.constant(node.name, found, meta_of(found))
                scope.names[node.name] = found
            elif node.op == "output":
                return fx.map_arg(node.args[0], scope.value)
            elif node.op == "call_function":
                scope.names[node.name] = self._call(node, scope)
        raise AssertionError("a graph without output")

    def _call(self, node: fx.Node, scope: _Scope) -> Any:
        target = node.target
        if target in MARKS:
            tensors, member, *rest = tuple[Any, ...](node.args)
            slots = [scope.value(n) for n in tensors]
            return self.copies.mark(target, slots, member, *rest[:1])
        operands = [scope.value(n) for n in node.all_input_nodes]
        unknown = next((u for u in operands if isinstance(u, Unknown)), None)
        if unknown is not None:
            return unknown
        if target is operator.getitem:
            return scope.value(node.args[0])[node.args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, scope)
        if target in OPERATORS:
            return self._leaf(node, scope)
        results = results_of(node)
        if not isinstance(target, torch._ops.OpOverload) or is_dynamic(results):
            return Unknown(where(node), str(target), module_of(node), dynamic=is_dynamic(results))
        written = self._written(node)
        if written is not None and str(target) != "aten.detach_.default":
            return self._write(node, scope, written)
        if not any(isinstance(r, torch.Tensor) for r in results):
            return None  # an assertion
        check_dense(node)
        if self._is_same(node, scope):
            return scope.value(node.args[0])
        if (
            str(target) == "aten.lift_fresh_copy.default"
        ):  # a copy: writes do not reach the constant
            return self.slots.new(self.slots.read(scope.value(node.args[0])))
        if str(target) == "aten.broadcast_tensors.default":
            shape = tuple(results[0].shape)
            if shapes_of([n.meta["val"] for n in node.all_input_nodes]) == {shape}:
                return fx.map_arg(node.args[0], scope.value)
            return [self._expanded(n, shape, node, scope) for n in node.args[0]]
        return self._emit(node, scope, results)

    def _expanded(
        self, source: fx.Node, shape: tuple[int, ...], node: fx.Node, scope: _Scope
    ) -> str:
        """A slot for a value broadcast to a shape."""
        place = Place(module=module_of(node), source=source_of(node))
        given = (Ref(self.slots.read(scope.value(source))), list(shape))
        made = self.builder.add("aten.expand.default", given, {}, place, grad=scope.grad)
        return self.slots.new(made[0])

    def _is_same(self, node: fx.Node, scope: _Scope) -> bool:
        """Whether a call returns its first operand's memory unchanged at any batch size (`to` its
        own dtype, dropout in eval mode): a model has the same operators at all of them."""
        source = node.args[0] if node.args else None
        val = node.meta["val"]
        if not isinstance(source, fx.Node) or not isinstance(val, torch.Tensor):
            return False
        slot, before = scope.value(source), source.meta.get("val")
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
        alike = (before.shape, before.dtype) == (val.shape, val.dtype)
        strides = before.stride() == val.stride()
        return alike and strides and share_memory(before, val)

    def _inline(self, node: fx.Node, scope: _Scope) -> Any:
        """A region's body in place: `wrap_with_set_grad_enabled`, `wrap_with_autocast`."""
        name = str(node.target)
        if "set_grad_enabled" in name:
            enabled, body, args = node.args[0], node.args[1], node.args[2:]
            inner = _Scope(grad=bool(enabled), autocast=scope.autocast)
        elif "autocast" in name:
            device, enabled, body, args = node.args[0], node.args[2], node.args[4], node.args[5:]
            if enabled and device != "cpu":
                raise TraceError(
                    f"an autocast region for {device!r} at {where(node)}: its casts can't be "
                    "recorded; drop it and choose precision='bf16', or use torch.autocast('cpu')"
                )
            inner = _Scope(grad=scope.grad, autocast=bool(enabled))
        else:
            raise TraceError(
                f"higher-order operator {name} at {where(node)} is not supported; write the "
                "region with plain tensor operations"
            )
        module = scope.value(body)
        holders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for holder, arg in zip(holders, args, strict=True):
            inner.names[holder.name] = scope.value(arg)
        return self._run(module, inner)

    def _operands(self, node: fx.Node, scope: _Scope) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def ref(item: fx.Node) -> Any:
            found = scope.value(item)
            if isinstance(found, str):
                return Ref(self.slots.read(found))
            return [Ref(self.slots.read(x)) for x in found]

        kwargs = {k: v for k, v in node.kwargs.items() if k not in IGNORED_KWARGS}
        return plain(fx.map_arg(node.args, ref)), plain(fx.map_arg(kwargs, ref))

    def _emit(self, node: fx.Node, scope: _Scope, results: Sequence[Any]) -> Any:
        place = Place(module=module_of(node), source=source_of(node))
        args, kwargs = self._operands(node, scope)
        target = plain_name(str(node.target))
        metas = [meta_of(t) for t in results]
        if scope.autocast:
            args, kwargs = self._autocast(target, args, kwargs, metas[0].dtype, place)
        if short_name(target) in CASTS:  # the device in their arguments is the tracer's
            target, args, kwargs = "aten.to.dtype", (args[0], metas[0].dtype), {}
        several = isinstance(node.meta["val"], (tuple, list))
        made = self.builder.add(
            target,
            args,
            kwargs,
            place,
            name=node.name,
            metas=metas,
            several=several,
            grad=scope.grad,
        )
        bases = [self._base(node, scope, t) for t in results]
        slots = [self.slots.new(v, base) for v, base in zip(made, bases, strict=True)]
        return slots if several else slots[0]

    def _leaf(self, node: fx.Node, scope: _Scope) -> list[str]:
        """A leaf's call: what it runs stands in the place of its number."""
        operands, leaf = node.args[0], self.leaves[node.args[1]]  # type: ignore[index]
        held = [Ref(self.slots.read(x)) for x in fx.map_arg(operands, scope.value)]
        place = Place(module=module_of(node), source=source_of(node))
        made = self.builder.add(
            str(node.target),
            (leaf, held),
            {},
            place,
            name=node.name,
            metas=[meta_of(t) for t in results_of(node)],
            several=True,
            grad=scope.grad,
        )
        for value, flows in zip_longest(made, leaf.gradients, fillvalue=False):
            meta = self.builder.values[value]
            self.builder.values[value] = replace(meta, requires_grad=meta.requires_grad and flows)
        return [self.slots.new(value) for value in made]

    def _write(self, node: fx.Node, scope: _Scope, written: fx.Node) -> str:
        """An in-place call: its slot holds a new value from here on."""
        place = Place(module=module_of(node), source=source_of(node))
        slot: str = scope.value(written)
        held = self.slots.read(slot)
        if not scope.grad and self.builder.values[held].requires_grad:
            self._refuse_hidden_write(slot, str(node.target), place)
        args, kwargs = self._operands(node, scope)
        value = functional_call(
            self.builder, str(node.target), args, kwargs, place, name=node.name, grad=scope.grad
        )
        self.copies.check_write(slot)
        self.slots.write(slot, value, place)
        return slot

    def _refuse_hidden_write(self, slot: str, target: str, place: Place) -> None:
        if self.slots.root(slot) not in self.state.parameters:  # those have an error of their own
            raise TraceError(
                f"at {place} {target} under no_grad changes a tensor that carries a gradient, "
                "which would pass as if nothing had; write x = x + (f(x) - x).detach() for that"
            )

    def _written(self, node: fx.Node) -> fx.Node | None:
        """The argument an in-place operator writes to."""
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

    def _base(self, node: fx.Node, scope: _Scope, result: torch.Tensor) -> str | None:
        """The slot that a result is a view of."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        slot, before = scope.value(source), source.meta.get("val")
        if not isinstance(slot, str) or not isinstance(before, torch.Tensor):
            return None
        return slot if share_memory(before, result) else None

    def _autocast(
        self, target: str, args: Any, kwargs: Any, dtype: torch.dtype, place: Place
    ) -> tuple[Any, Any]:
        """Operands cast as autocast did: to the recorded dtype, where the call alone would give
        another."""
        try:
            if evaluate(self.builder.values, target, args, kwargs)[0].dtype == dtype:
                return args, kwargs
        except RuntimeError:
            pass  # operands of several dtypes, which only a cast brings together

        def cast(name: str) -> Ref:
            floating = self.builder.values[name].dtype.is_floating_point
            return Ref(self.builder.cast(name, dtype, place) if floating else name)

        return map_refs((args, kwargs), cast)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a tensor without gaps, dims in order."""
    return torch.empty(tuple(shape), device="meta").stride()


def _only(names: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name in used}
