"""ExportedProgram -> Graph: plain operators on named values.

Placeholders become inputs, parameters (tied ones once), buffers and constants. In-place writes
become values (functionalization: `values/functional.py`). Regions are inlined: under `no_grad`
nothing asks for a gradient, under `autocast` the casts that torch makes silently become operators.
Operators that the loss does not need are dropped, and those that follow from raw inputs alone
(masks, positions) are set apart as derived. Single calls are converted in `calls.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from meshwright.costmodel.graph import Graph, Outputs, Ref, TensorMeta, verify_graph
from meshwright.planner.errors import KeptTensors, TraceError
from meshwright.planner.tracing.calls import CallConverter, Environment
from meshwright.planner.tracing.loss import LossModule
from meshwright.planner.tracing.similar import MARKS, CopiedCalls
from meshwright.planner.tracing.user_module import MEMORY_ONLY, Key
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
    autocast: bool,
    notes: tuple[str, ...],
) -> Graph:
    """The Graph of an exported loss: `program` is the export of `module`, `loss_fn` the user's own.

    `autocast` says whether it was exported under it. Raises `TraceError` with the user's source
    line for what no operator stands for, and `Irregular` where similar layers prove to differ.
    """
    graph = _Converter(program, module, loss_fn, autocast).graph(notes)
    verify_graph(graph)
    return graph


class _Converter:
    """The conversion of one program, node by node in topological order."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        module: LossModule,
        loss_fn: Any,
        autocast: bool,
    ) -> None:
        self.program = program
        self.module = module
        self.loss_fn = loss_fn
        self.autocast = autocast
        model = module.leaf_recorder.model  # the user's own
        self.builder = GraphBuilder()
        self.slots = Slots(builder=self.builder)
        # spared layers have theirs in the user's model, tensors carried like buffers in the copy
        buffers = (n for m in (model, module.model) for n, _ in m.named_buffers("", True, False))
        self.state = TracedState(model, list(dict.fromkeys(buffers)), self.builder, self.slots)
        self.copies = CopiedCalls(
            self.builder, self.slots, self.state, model, module.stand_ins.groups
        )
        leaves = module.leaf_recorder.leaves
        self.calls = CallConverter(self.builder, self.slots, self.state, self.copies, leaves)
        self.inputs: dict[str, str] = {}
        self.batched: set[str] = set()

    def graph(self, notes: tuple[str, ...]) -> Graph:
        environment = Environment(autocast=self.autocast)
        self._placeholders(environment)
        loss, returned = self._results(self._run(self.program.graph_module, environment))
        self.copies.check()
        state = self.state
        updates = {b: self.slots.read(b) for b in state.buffers if self.slots.read(b) != b}
        for value, fqn in state.parameters.items():
            if self.slots.read(value) != value:
                raise TraceError(
                    f"the forward changes parameter {fqn} in place; make it a buffer, or change "
                    "it between steps"
                )
        self._check_constants()
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
        made = {r for op in ops for r in op.results} - set(updates.values())
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
            fixed=self.module.batch.fixed,
            reads=self._reads(),
            outputs=self._outputs(loss, returned, made),
        )

    def _check_constants(self) -> None:
        """Raise `KeptTensors` for a tensor attribute that the forward writes in place, and
        `TraceError` for any other tensor from outside of it."""
        for value, tensor in self.state.constants.items():
            if self.slots.read(value) == value:
                continue
            key = self.module.attribute_of(tensor)
            if key is None:
                raise TraceError(
                    f"the forward writes to the tensor {value} in place, which is neither made in "
                    "it nor a buffer: a plan would start every step from its first value; make it "
                    "a buffer (register_buffer)"
                )
            raise KeptTensors(frozenset({key}))

    def _reads(self) -> tuple[Key, ...]:
        """The attributes whose values are part of the graph. What a layer read, those traced by it
        read too."""
        watch = self.module.watch
        found = [k for k in watch.reads if k not in watch.left and k[1] not in MEMORY_ONLY]
        for group in self.module.stand_ins.groups:
            inside = f"model.{group.traced[1]}"
            own = [k for k in found if f"{k[0]}.".startswith(f"{inside}.")]
            for member in group.spared:
                found += [(k[0].replace(inside, f"model.{member}", 1), k[1]) for k in own]
        model = self.module.leaf_recorder.model
        own_buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for fqn in self.state.buffers.values():
            if fqn not in own_buffers:  # a tensor that is carried like one
                path, _, name = f"model.{fqn}".rpartition(".")
                found.append((path, name))
        return tuple(found)

    def _outputs(self, loss: str, returned: Sequence[Any], made: Collection[str]) -> Outputs:
        """What the model returns, of the values `made` in the graph."""
        told = self.module.returned
        slots = iter(returned)
        values: list[str | None] = []
        for kind in told.kinds:
            slot = next(slots) if kind == "tensor" else None
            value = self.slots.read(slot) if isinstance(slot, str) else None
            values.append(loss if kind == "loss" else value if value in made else None)
        return Outputs(paths=told.paths, values=tuple(values), spec=told.spec)

    def _results(self, outputs: Any) -> tuple[str, list[Any]]:
        """The loss among the program's outputs, and what the model returns besides; the others are
        new values of buffers."""
        found: list[Any] = []
        for spec, output in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            if spec.kind.name == "USER_OUTPUT":
                found.append(output)
            elif spec.kind.name == "BUFFER_MUTATION":
                fqn = str(spec.target).removeprefix("model.")
                buffer = next(b for b, name in self.state.buffers.items() if name == fqn)
                self.slots.write(buffer, self.slots.read(output), Origin())
        loss, *returned = found
        if isinstance(loss, Unknown):
            raise loss.error()
        assert isinstance(loss, str), "the wrapper returns the loss first"
        value = self.slots.read(loss)
        if self.builder.values[value].shape:  # one element, as torch's backward takes it
            value = self.builder.add("aten.reshape.default", (Ref(value), []), {}, Origin())[0]
        return value, returned

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
                    "its casts can't be recorded",
                    place=f"an autocast region for {device!r} at {where(node)}",
                    way_out="drop it and choose precision='bf16', or use torch.autocast('cpu')",
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
