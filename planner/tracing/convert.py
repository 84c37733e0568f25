"""ExportedProgram -> Graph: plain operators on named values.

Placeholders become inputs, parameters (tied ones once), buffers and constants. In-place writes
become values (functionalization: `values/functional.py`). Regions are inlined: under `no_grad`
nothing asks for a gradient, under `autocast` the casts that torch makes silently become operators.
Operators that the loss does not need are dropped, and those that follow from raw inputs alone
(masks, positions) are set apart as derived. Single calls are converted in `calls.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from meshwright.costmodel.graph import Graph, Ref, TensorMeta, verify_graph
from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.calls import CallConverter, Environment
from meshwright.planner.tracing.loss import LossModule
from meshwright.planner.tracing.similar import MARKS, CopiedCalls
from meshwright.planner.tracing.values import (
    GraphBuilder,
    Origin,
    Slots,
    TracedState,
    Unknown,
    meta_of,
    split_derived,
    where,
)


def convert(
    program: torch.export.ExportedProgram,
    module: LossModule,
    *,
    loss_fn: Any,
    notes: tuple[str, ...],
) -> Graph:
    """The Graph of an exported loss: `program` is the export of `module`, `loss_fn` the user's own.

    Raises `TraceError` with the user's source line for what no operator stands for, and `Irregular`
    where similar layers prove to differ.
    """
    graph = _Converter(program, module, loss_fn).graph(notes)
    verify_graph(graph)
    return graph


class _Converter:
    """The conversion of one program, node by node in topological order."""

    def __init__(
        self, program: torch.export.ExportedProgram, module: LossModule, loss_fn: Any
    ) -> None:
        self.program = program
        self.module = module
        self.loss_fn = loss_fn
        model = module.leaf_recorder.model  # the user's own
        self.builder = GraphBuilder()
        self.slots = Slots(builder=self.builder)
        self.state = TracedState(model, self.builder, self.slots)
        self.copies = CopiedCalls(
            self.builder, self.slots, self.state, model, module.stand_ins.groups
        )
        leaves = module.leaf_recorder.leaves
        self.calls = CallConverter(self.builder, self.slots, self.state, self.copies, leaves)
        self.inputs: dict[str, str] = {}
        self.batched: set[str] = set()

    def graph(self, notes: tuple[str, ...]) -> Graph:
        environment = Environment()
        self._placeholders(environment)
        loss = self._loss(self._run(self.program.graph_module, environment))
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
        derived, ops = split_derived(self.builder.ops, {loss, *updates.values()}, raw)
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
            batch_size=self.module.batch.rows,
            updates=updates,
            aliases={k: v for k, v in state.aliases.items() if k != v},
            notes=notes,
        )

    def _loss(self, outputs: Any) -> str:
        """The loss among the program's outputs; the others are new values of buffers."""
        loss = None
        for spec, output in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            if spec.kind.name == "USER_OUTPUT":
                loss = output
            elif spec.kind.name == "BUFFER_MUTATION":
                fqn = str(spec.target).removeprefix("model.")
                buffer = next(b for b, name in self.state.buffers.items() if name == fqn)
                self.slots.write(buffer, self.slots.read(output), Origin())
        if isinstance(loss, Unknown):
            raise loss.error()
        assert isinstance(loss, str), "the wrapper returns one tensor"
        value = self.slots.read(loss)
        if self.builder.values[value].shape:  # one element, as torch's backward takes it
            value = self.builder.add("aten.reshape.default", (Ref(value), []), {}, Origin())[0]
        return value

    # --- placeholders ---

    def _placeholders(self, environment: Environment) -> None:
        signature = self.program.graph_signature
        constants = signature.inputs_to_lifted_tensor_constants
        user_inputs = iter(self.module.batch.inputs)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            name = node.name
            if name in signature.inputs_to_parameters:
                slot = self._parameter(signature.inputs_to_parameters[name])
            elif name in signature.inputs_to_buffers:
                slot = self._buffer(signature.inputs_to_buffers[name], node)
            elif name in constants:
                tensor = self.program.constants[constants[name]]
                slot = self.state.constant(name, tensor, meta_of(node.meta["val"]))
            else:
                path, batched = next(user_inputs)
                value = self.builder.define(name, meta_of(node.meta["val"]))
                self.inputs[value] = path
                if batched:
                    self.batched.add(value)
                slot = self.slots.new(value)
            environment.names[name] = slot

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

    def _run(self, module: fx.GraphModule, environment: Environment) -> Any:
        """Convert one fx graph whose placeholders `environment` binds; its output."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                attribute: Any = module
                for part in str(node.target).split("."):
                    attribute = getattr(attribute, part)
                if isinstance(attribute, torch.Tensor):
                    attribute = self.state.constant(node.name, attribute, meta_of(attribute))
                environment.names[node.name] = attribute
            elif node.op == "output":
                return fx.map_arg(node.args[0], environment.value)
            elif node.op == "call_function":
                environment.names[node.name] = self._call(node, environment)
        raise AssertionError("a graph without output")

    def _call(self, node: fx.Node, environment: Environment) -> Any:
        """What a call's node stands for: a slot, slots, or a plain value."""
        target = node.target
        if target in MARKS:
            tensors, member, *rest = tuple[Any, ...](node.args)
            slots = [environment.value(n) for n in tensors]
            return self.copies.mark(target, slots, member, *rest[:1])
        operands = [environment.value(n) for n in node.all_input_nodes]
        unknown = next((u for u in operands if isinstance(u, Unknown)), None)
        if unknown is not None:
            return unknown
        if target is operator.getitem:
            return environment.value(node.args[0])[node.args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, environment)
        return self.calls.convert(node, environment)

    def _inline(self, node: fx.Node, environment: Environment) -> Any:
        """A region's body in place: `wrap_with_set_grad_enabled`, `wrap_with_autocast`."""
        name = str(node.target)
        if "set_grad_enabled" in name:
            enabled, body, args = node.args[0], node.args[1], node.args[2:]
            inner = Environment(grad=bool(enabled), autocast=environment.autocast)
        elif "autocast" in name:
            device, enabled, body, args = node.args[0], node.args[2], node.args[4], node.args[5:]
            if enabled and device != "cpu":
                raise TraceError(
                    f"an autocast region for {device!r} at {where(node)}: its casts can't be "
                    "recorded; drop it and choose precision='bf16', or use torch.autocast('cpu')"
                )
            inner = Environment(grad=environment.grad, autocast=bool(enabled))
        else:
            raise TraceError(
                f"higher-order operator {name} at {where(node)} is not supported; write the "
                "region with plain tensor operations"
            )
        module = environment.value(body)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(placeholders, args, strict=True):
            inner.names[placeholder.name] = environment.value(arg)
        return self._run(module, inner)


def _only(names: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name in used}
