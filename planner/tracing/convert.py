"""ExportedProgram -> Graph: plain operators on named values.

Placeholders become inputs, parameters (tied ones once), buffers and constants. In-place writes
become values (`values/functional.py`). Regions are inlined: under `no_grad` nothing asks for a
gradient, under `autocast` the casts that torch makes silently become operators. A call that returns
its operand unchanged is dropped, as is what the loss does not need; what follows from raw inputs
alone (masks, positions) is set apart as derived.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from meshwright.costmodel.graph import (
    Graph,
    Op,
    Outputs,
    Ref,
    TensorMeta,
    map_refs,
    refs,
    short_name,
    verify_graph,
)
from meshwright.costmodel.rules import tagged, traits_of_target
from meshwright.costmodel.user_rules import make_known
from meshwright.planner.errors import KeptTensors, TraceError
from meshwright.planner.tracing.leaves import LEAF_OPERATORS
from meshwright.planner.tracing.loss import LossModule
from meshwright.planner.tracing.similar import MARKS, CopiedCalls, Irregular
from meshwright.planner.tracing.transformers import model_name
from meshwright.planner.tracing.user_module import MEMORY_ONLY, Key
from meshwright.planner.tracing.values import (
    RESHAPES,
    Origin,
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
    share_memory,
    source_of,
    split_derived,
    thawed,
    where,
)


def convert(
    program: ExportedProgram,
    module: LossModule,
    *,
    loss_fn: Any,
    autocast: bool,
    notes: tuple[str, ...],
) -> Graph:
    """The Graph of `program`, the export of `module`, under `autocast` or not; `loss_fn` is the
    user's. Raises `TraceError` with the user's source line for what no operator stands for, and
    `Irregular` where similar layers prove to differ."""
    graph = _Converter(program, module, loss_fn).graph(_Environment(autocast=autocast), notes)
    verify_graph(graph)
    return graph


IGNORED_KWARGS = ("pin_memory", "layout")
CASTS = ("to", "_to_copy", "type_as")
BITS = ("aten.any.default", "aten.all.default")
PROMOTE = frozenset({"cat", "stack", "where"})  # beside pointwise operators
# may change nothing at one row alone: a class token's expand, the transpose of one row of one
ARRANGES = RESHAPES | {
    "expand", "expand_as", "broadcast_to", "transpose", "permute", "movedim", "swapaxes", "t",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Environment:
    """An fx graph while it is converted: its nodes' slots, lists of slots or plain values, whether
    gradients are recorded, and whether autocast is on."""

    names: dict[str, Any] = field(default_factory=dict)
    grad: bool = True
    autocast: bool = False

    def value(self, item: Any) -> Any:
        return self.names[item.name] if isinstance(item, fx.Node) else item


class _Converter:
    """The conversion of one program, node by node in topological order."""

    def __init__(self, program: ExportedProgram, module: LossModule, loss_fn: Any) -> None:
        self.program, self.module, self.loss_fn = program, module, loss_fn
        model = module.leaf_recorder.model  # the user's own
        # spared layers have theirs in the user's model, tensors carried like buffers in the copy
        buffers = (n for m in (model, module.model) for n, _ in m.named_buffers("", True, False))
        self.state = TracedState(model, list(dict.fromkeys(buffers)))
        self.builder, self.slots = self.state.builder, self.state.slots
        self.copies = CopiedCalls(self.state, model, module.stand_ins.groups)
        self.leaves = module.leaf_recorder.leaves
        self.inputs: dict[str, str] = {}
        self.batched: set[str] = set()
        self.weight_writes: list[Op] = []

    def graph(self, environment: _Environment, notes: tuple[str, ...]) -> Graph:
        self._placeholders(environment)
        loss, returned = self._results(self._run(self.program.graph_module, environment))
        known = self._known(returned)
        self.copies.check()
        state = self.state
        updates = {b: self.slots.read(b) for b in state.buffers if self.slots.read(b) != b}
        for value, fqn in state.parameters.items():
            if self.slots.read(value) != value:
                raise TraceError(
                    f"the forward changes parameter {fqn} in place, otherwise than element by "
                    "element, by plain numbers and before it reads it; make it a buffer, or "
                    "change it between steps"
                )
        self._check_constants()
        values = self.builder.values
        raw = {*self.inputs, *state.buffers, *state.constants}
        derived, ops = split_derived(self.builder.ops, {loss, *updates.values(), *known}, raw)
        if not values[loss].requires_grad:
            raise TraceError(
                "the loss depends on no trainable parameter: all are frozen, or the loss is "
                "computed under torch.no_grad or from detached tensors"
            )
        used = {n for op in (*derived, *ops) for n in (*op.operands, *op.results)}
        used |= {loss, *self.inputs, *updates}
        results = {r for op in ops for r in op.results} - set(updates.values())
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
            known=known,
            reads=self._reads(),
            outputs=self._outputs(loss, returned, results),
            weight_writes=tuple(w for w in self.weight_writes if w.operands[0] in used),
            name=model_name(self.module.leaf_recorder.model),
        )

    def _known(self, returned: list[Any]) -> dict[str, torch.Tensor]:
        """The values that were asked for, taken off what the program returns."""
        values = self.module.known
        first = len(returned) - len(values)
        slots = returned[first:]
        del returned[first:]
        known = {self.slots.read(slot): x for slot, x in zip(slots, values, strict=True)}
        if not known:
            return {}
        behind, of_inputs = set(known), set(self.inputs)
        for op in reversed(self.builder.ops):
            if not behind.isdisjoint(op.results):
                behind.update(op.operands)
        ops = [op for op in self.builder.ops if not behind.isdisjoint(op.results)]
        for op in ops:
            if not of_inputs.isdisjoint(op.operands):
                of_inputs.update(op.results)
        assert self.module.batch.known is not None, "nobody else is asked"
        sample = zip(self.inputs, self.module.batch.known.sample, strict=True)
        given = {value: x for value, x in sample if value in behind and x is not None}
        given |= {value: x for value, x in self.state.constants.items() if value in behind}
        drawn = [op for op in ops if tagged(op.target, torch.Tag.nondeterministic_seeded)]
        made = {*given, *(r for op in ops for r in op.results)}
        if drawn or not behind <= made or not make_known(ops, given, known):
            at = (drawn or ops)[-1].source if ops else ""
            raise TraceError(
                "the forward asks for a value that random numbers, weights or buffers decide, or "
                f"that is changed where a trace can't see it: made at {at or 'an unknown place'}"
            )
        return {value: x for value, x in known.items() if value in of_inputs}

    def _check_constants(self) -> None:
        """Raise `KeptTensors` for a tensor attribute that the forward writes in place, and
        `TraceError` for any other tensor from outside of it."""
        named = self.module.leaf_recorder.model.named_parameters()
        trained = {name: p for name, p in named if p.requires_grad and not p.is_meta}
        for value, tensor in self.state.constants.items():
            name = next((n for n, p in trained.items() if share_memory(p, tensor)), None)
            if name is not None:
                raise TraceError(
                    f"the loss reads the parameter {name!r} of the model otherwise than by its "
                    "forward (in a closure?): its gradient would be lost. Ways out: compute a "
                    "penalty on weights in the model's forward, or take the optimizer's "
                    "weight_decay; detach().clone() what is a constant"
                )
            if tensor.grad_fn is not None:
                raise TraceError(
                    f"the forward or the loss reads the tensor {value}, which an earlier forward "
                    "made, with its gradient: it would stay as it is in every step. Return it "
                    "from the forward, too, or detach().clone() what is a constant"
                )
            if self.slots.read(value) == value:
                continue
            if isinstance(self.loss_fn, nn.Module) and any(
                share_memory(tensor, buffer) for buffer in self.loss_fn.buffers()
            ):
                raise TraceError(
                    " writes to a buffer of its own, and a plan keeps no state of a loss",
                    place="loss_fn",
                    legal="a loss that is a function of outputs and labels",
                    way_out="make it a part of the model, which then returns the loss",
                )
            key = self.module.attribute_of(tensor)
            if key is not None:
                raise KeptTensors(frozenset({key}))
            raise TraceError(
                f"the forward writes to the tensor {value} in place, which is neither made in it "
                "nor a buffer: a plan would start every step from its first value; make it a "
                "buffer (register_buffer)"
            )

    def _reads(self) -> tuple[Key, ...]:
        """The attributes whose values are part of the graph; of spared layers those that the traced
        one read."""
        watch = self.module.watch
        reads = [k for k in watch.reads if k not in watch.changed and k[1] not in MEMORY_ONLY]
        for group in self.module.stand_ins.groups:
            layer = f"model.{group.traced[1]}"
            of_layer = [k for k in reads if f"{k[0]}.".startswith(f"{layer}.")]
            for member in group.spared:
                reads += [(k[0].replace(layer, f"model.{member}", 1), k[1]) for k in of_layer]
        model = self.module.leaf_recorder.model
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for value, fqn in self.state.buffers.items():
            if fqn not in buffers:  # a tensor that is carried like one
                path, _, name = f"model.{fqn}".rpartition(".")
                reads = [key for key in reads if key != (path, name)]
                if self.slots.read(value) == value:  # which no step writes
                    reads.append((path, name))
        return tuple(reads)

    def _outputs(self, loss: str, returned: Sequence[Any], results: Collection[str]) -> Outputs:
        """The model's output, of the graph's `results`."""
        output, slots = self.module.returned, iter(returned)
        values: list[str | None] = []
        for kind in output.kinds:
            slot = next(slots) if kind == "tensor" else None
            value = self.slots.read(slot) if isinstance(slot, str) else None
            values.append(loss if kind == "loss" else value if value in results else None)
        return Outputs(paths=output.paths, values=tuple(values), spec=output.spec)

    def _results(self, outputs: Any) -> tuple[str, list[Any]]:
        """The loss among the program's outputs, and what the model returns besides; the others are
        new values of buffers."""
        returned: list[Any] = []
        for spec, output in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            if spec.kind.name == "USER_OUTPUT":
                returned.append(output)
            elif spec.kind.name == "BUFFER_MUTATION":
                fqn = str(spec.target).removeprefix("model.")
                buffer = next(b for b, name in self.state.buffers.items() if name == fqn)
                self.slots.write(buffer, self.slots.read(output), Origin())
        loss = returned.pop(0)
        if isinstance(loss, Unknown):
            raise loss.error()
        assert isinstance(loss, str), "the wrapper returns the loss first"
        value = self.slots.read(loss)
        if self.builder.values[value].shape:  # one element, as torch's backward takes it
            value = self.builder.add("aten.reshape.default", (Ref(value), []), {}, Origin())[0]
        return value, returned

    def _placeholders(self, environment: _Environment) -> None:
        signature = self.program.graph_signature  # which looks through all of it at each question
        parameters, buffers = signature.inputs_to_parameters, signature.inputs_to_buffers
        constants = signature.inputs_to_lifted_tensor_constants
        user_inputs = iter(self.module.batch.inputs)
        for node in self.program.graph.find_nodes(op="placeholder"):
            name = node.name
            if not isinstance(node.meta["val"], torch.Tensor):
                raise TraceError(
                    f"the forward or the loss draws from a generator of its own at "
                    f"{source_of(next(iter(node.users), node)) or 'an unknown place'}: a plan "
                    "draws by counter, from its own seed, the same on any number of ranks. Leave "
                    "generator= out, or draw before the step and give it with the batch"
                )
            if name in parameters:
                slot = self._parameter(parameters[name])
            elif name in buffers:
                slot = self._buffer(buffers[name], node)
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

    def _run(self, module: fx.GraphModule, environment: _Environment) -> Any:
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

    def _call(self, node: fx.Node, environment: _Environment) -> Any:
        """The slot, slots or plain value of a call."""
        target = node.target
        if target in MARKS:
            tensors, *rest = tuple[Any, ...](node.args)
            return self.copies.mark(target, [environment.value(n) for n in tensors], *rest[:2])
        operands = [environment.value(n) for n in node.all_input_nodes]
        unknown = next((u for u in operands if isinstance(u, Unknown)), None)
        if unknown is not None:
            return unknown
        if target is operator.getitem:
            return environment.value(node.args[0])[node.args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, environment)
        return self._convert(node, environment)

    def _inline(self, node: fx.Node, environment: _Environment) -> Any:
        """A region's body in place: `wrap_with_set_grad_enabled`, `wrap_with_autocast`."""
        name = str(node.target)
        if "set_grad_enabled" in name:
            enabled, body, args = node.args[0], node.args[1], node.args[2:]
            inner = _Environment(grad=bool(enabled), autocast=environment.autocast)
        elif "autocast" in name:
            device, enabled, body, args = node.args[0], node.args[2], node.args[4], node.args[5:]
            if enabled and device != "cpu":
                raise TraceError(
                    "its casts can't be recorded",
                    place=f"an autocast region for {device!r} at {where(node)}",
                    way_out="drop it and choose precision='bf16', or use torch.autocast('cpu')",
                )
            inner = _Environment(grad=environment.grad, autocast=bool(enabled))
        else:
            raise TraceError(
                f"higher-order operator {name} at {where(node)} is not supported; write the "
                "region with plain tensor operations"
            )
        module = environment.value(body)
        placeholders = module.graph.find_nodes(op="placeholder")
        for placeholder, arg in zip(placeholders, args, strict=True):
            inner.names[placeholder.name] = environment.value(arg)
        return self._run(module, inner)

    # --- calls ---

    def _convert(self, node: fx.Node, environment: _Environment) -> Any:
        """The slot or list of slots of a node, `Unknown`, or None for an assertion. Raises
        `TraceError` for a write, or a gradient, that the graph can't express."""
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
            if all(n.meta["val"].shape == shape for n in node.all_input_nodes):
                return fx.map_arg(sources, environment.value)
            slots = []
            for source in sources:
                args = (Ref(self.slots.read(environment.value(source))), list(shape))
                (value,) = self.builder.add(
                    "aten.expand.default", args, {}, _origin(node), grad=environment.grad
                )
                slots.append(self.slots.new(value))
            return slots
        return self._operator(node, environment, results)

    def _is_identity(self, node: fx.Node, environment: _Environment) -> bool:
        """Whether a call returns its first operand's memory unchanged at any batch size (`to` its
        own dtype, dropout in eval mode): a model has the same operators at all of them."""
        val, (slot, before) = node.meta["val"], self._first(node, environment)
        if before is None or not isinstance(val, torch.Tensor):
            return False
        short = short_name(str(node.target))
        if short.rstrip("_") == "detach":
            return not self.builder.values[self.slots.read(slot)].requires_grad
        draw = traits_of_target(str(node.target)).draw
        if draw and draw.kind == "dropout" and (not node.args[2] or node.args[1] == 0.0):
            return True
        if short in ARRANGES:
            return False
        strides = before.stride()
        if short == "contiguous" and strides != torch.empty(before.shape, device="meta").stride():
            return False  # a dim of one row has any stride
        same = (before.shape, before.dtype, strides) == (val.shape, val.dtype, val.stride())
        return same and share_memory(before, val)

    def _operands(
        self, node: fx.Node, environment: _Environment
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with a `Ref` to the current value in the place of each node."""

        def ref(item: fx.Node) -> Any:
            slots = environment.value(item)
            if isinstance(slots, str):
                return Ref(self.slots.read(slots))
            return [Ref(self.slots.read(slot)) for slot in slots]

        kwargs = {k: v for k, v in node.kwargs.items() if k not in IGNORED_KWARGS}
        return thawed(fx.map_arg(node.args, ref)), thawed(fx.map_arg(kwargs, ref))

    def _operator(self, node: fx.Node, environment: _Environment, results: Sequence[Any]) -> Any:
        """One operator as it is; results that view an operand share its slot's memory."""
        origin = _origin(node)
        args, kwargs = self._operands(node, environment)
        target = canonical_target(str(node.target))
        metas = [meta_of(t) for t in results]
        if environment.autocast and short_name(target) not in CASTS:
            args, kwargs = self._autocast(target, args, kwargs, metas[0].dtype, origin)
        if target in BITS and (rank := len(self.builder.values[args[0].name].shape)) > 1:
            # first the bits of each row: data ranks gather those, and not all elements
            by_row = target.replace("default", "dims")
            (rows,) = self.builder.add(by_row, (args[0], [*range(1, rank)]), {}, origin)
            args = (Ref(rows),)
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
        slot, before = self._first(node, environment)
        views = (before is not None and share_memory(before, result) for result in results)
        slots = [
            self.slots.new(v, slot if view else None) for v, view in zip(values, views, strict=True)
        ]
        return slots if several else slots[0]

    def _leaf(self, node: fx.Node, environment: _Environment) -> list[str]:
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

    def _write(self, node: fx.Node, environment: _Environment, written: fx.Node) -> str:
        """An in-place call in functional form; its slot holds the new value from here on."""
        origin = _origin(node)
        slot: str = environment.value(written)
        before = self.slots.read(slot)
        if weight_write := self._weight_write(node, slot):
            self.weight_writes.append(weight_write)
            return slot
        hidden = not environment.grad and self.builder.values[before].requires_grad
        if hidden and self.slots.root(slot) not in self.state.parameters:  # refused at the end
            raise TraceError(
                f"at {origin} {node.target} under no_grad changes a tensor that carries a "
                "gradient, which would pass as if nothing had; write x = x + (f(x) - x).detach() "
                "for that"
            )
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

    def _weight_write(self, node: fx.Node, slot: str) -> Op | None:
        """The operator of a call that changes a parameter element by element, by plain numbers and
        before anything reads it; None for another call. Raises `Irregular` in a similar layer."""
        root, target = self.slots.root(slot), str(node.target)
        if root not in self.state.parameters or not self.slots.as_whole(slot):
            return None
        random = tagged(target, torch.Tag.nondeterministic_seeded)
        alone = "out" not in node.kwargs and len(node.all_input_nodes) == 1
        if random or not alone or not tagged(target, torch.Tag.pointwise):
            return None
        views = self.slots.whole_views(root)
        read = {v for op in self.builder.ops for v in op.operands if op.results[0] not in views}
        if not read.isdisjoint({root, *views}):
            return None
        if self.copies.open is not None:
            raise Irregular("a layer writes its parameters")
        origin = _origin(node)
        return Op(
            name=node.name,
            target=target,
            args=(Ref(root), *thawed(tuple(node.args[1:]))),
            kwargs=dict(node.kwargs),
            results=(),
            key=f"{origin.module}:{node.name}",
            module=origin.module,
            source=origin.source,
        )

    def _first(self, node: fx.Node, environment: _Environment) -> tuple[str, torch.Tensor | None]:
        """The slot and the fake tensor of a call's first argument; None where it is no tensor."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return "", None
        slot, before = environment.value(source), source.meta.get("val")
        if not isinstance(slot, str) or not isinstance(before, torch.Tensor):
            return "", None
        return slot, before

    def _autocast(
        self, target: str, args: Any, kwargs: Any, dtype: torch.dtype, origin: Origin
    ) -> tuple[Any, Any]:
        """Operands cast as autocast did: to the recorded dtype, where the call alone would give
        another, or takes no operands of two."""
        values = self.builder.values
        floating = {d for n in refs((args, kwargs)) if (d := values[n].dtype).is_floating_point}
        wanted = dtype.to_real() if dtype.is_complex else dtype
        if not wanted.is_floating_point or floating <= {wanted}:
            return args, kwargs
        if (
            len(floating) == 1
            or short_name(target) in PROMOTE
            or tagged(target, torch.Tag.pointwise)
            or traits_of_target(target).statistics is not None  # a norm's may be wider
        ):
            try:
                if infer_metas(values, target, args, kwargs)[0].dtype == dtype:
                    return args, kwargs
            except RuntimeError:
                pass  # the operator has no kernel for these dtypes

        def cast(name: str) -> Ref:
            floats = values[name].dtype.is_floating_point
            return Ref(self.builder.cast(name, wanted, origin) if floats else name)

        args, kwargs = map_refs((args, kwargs), cast)
        return args, kwargs


def _only(names: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name in used}


def _origin(node: fx.Node) -> Origin:
    return Origin(module=module_of(node), source=source_of(node))


def _written_argument(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator writes to: its first, or `out`."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
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
