"""Model -> Graph, by `torch.export` on meta tensors; the one adapter to torch's tracing internals.

The user's model is never touched and no weight is materialised: a copy with meta parameters is traced, in
the train/eval mode the user set, for one micro-batch of `batch_size` rows. The graph is ATen before decomposition
(`linear`, `layer_norm`, `scaled_dot_product_attention` stay whole) and ends in the scalar loss.
"""

from __future__ import annotations

import copy
import inspect
import logging
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from costmodel.graph import Graph, Op, Ref, TensorMeta, map_refs, refs
from planner.hf_adapter import adapted

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ELIDED = {"_assert_tensor_metadata", "alias", "lift_fresh_copy"}


class TraceError(ValueError):
    """The model can't be traced: says where in the user's source, why, and what to do."""


def batch_rows(example_inputs: Any) -> int:
    """Rows of the sample batch: the commonest dim 0 of its tensors."""
    sizes = [
        t.shape[0]
        for t in pytree.tree_leaves(example_inputs)
        if isinstance(t, torch.Tensor) and t.dim()
    ]
    if not sizes:
        raise ValueError(
            f"example_inputs={_shown(example_inputs)} holds no tensor with a batch dim; pass a dict of keyword or a tuple "
            "of positional arguments of the model for one sample batch, batch dim first, e.g. "
            "example_inputs={'input_ids': ids, 'labels': ids}"
        )
    return Counter(sizes).most_common(1)[0][0]


def _shown(value: Any) -> str:
    return (
        f"{value!r:.60}" if not isinstance(value, torch.Tensor) else f"tensor{tuple(value.shape)}"
    )


def input_leaves(batch: Any) -> tuple[list[tuple[str, Any]], Any]:
    """A batch as (path, leaf) pairs and its structure; paths like `input_ids`, `0`, `0.mask`."""
    leaves, spec = pytree.tree_flatten_with_path(batch)
    named = [(".".join(_key(k) for k in path), leaf) for path, leaf in leaves]
    return named, spec


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))


class _Loss(nn.Module):
    """`model(batch) -> loss` as a module of flat tensor arguments."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, example: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        named, self.spec = input_leaves(example)
        self.leaves = [leaf for _, leaf in named]
        self.train(model.training)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        batch = pytree.tree_unflatten(leaves, self.spec)
        args, kwargs, targets = split_batch(batch, self.loss_fn)
        output = self.model(*args, **kwargs)
        if self.loss_fn is None:
            loss = (
                output.get("loss")
                if isinstance(output, Mapping)
                else getattr(output, "loss", output)
            )
            loss = loss[0] if isinstance(loss, (tuple, list)) else loss
        else:
            loss = self.loss_fn(output, *targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise TraceError(
                f"the model gives {what} where a scalar loss is needed; pass loss_fn=, or labels among the inputs "
                "so that the model computes its loss"
            )
        return loss


def split_batch(batch: Any, loss_fn: Callable[..., Any] | None) -> tuple[tuple, dict, tuple]:
    """(args, kwargs, targets) of a batch. With a `loss_fn` of two arguments the targets are the dict's
    `targets` entry or the tuple's last element, and do not go to the model."""
    wants_targets = loss_fn is not None and _arity(loss_fn) >= 2
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        if not wants_targets:
            return (), kwargs, ()
        if "targets" not in kwargs:
            raise ValueError(
                f"loss_fn takes (output, targets) but the batch has only {sorted(kwargs)}; add the entry 'targets'"
            )
        targets = kwargs.pop("targets")
        return (), kwargs, (targets,)
    args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if not wants_targets:
        return args, {}, ()
    if len(args) < 2:
        raise ValueError(
            "loss_fn takes (output, targets) but the batch is one tensor; pass (inputs..., targets)"
        )
    return args[:-1], {}, args[-1:]


def _arity(fn: Callable[..., Any]) -> int:
    target = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return 2
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return 2 if any(p.kind == p.VAR_POSITIONAL for p in parameters) else len(needed)


def meta_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same modules on meta tensors, ties kept, floating parameters in the compute dtype.

    Buffers keep their dtype, and so do modules with running statistics, as mixed-precision recipes do.
    """
    kept = {
        id(p)
        for module in model.modules()
        if getattr(module, "running_mean", None) is not None
        for p in module.parameters(recurse=False)
    }
    memo: dict[int, Any] = {}
    for p in model.parameters():
        cast = p.is_floating_point() and id(p) not in kept
        like = torch.empty_like(p, device="meta", dtype=dtype if cast else p.dtype)
        memo[id(p)] = nn.Parameter(like, requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
) -> Graph:
    """Trace forward and loss for one micro-batch of `batch_size` rows (default: the example's).

    Raises `TraceError` with the user's source line where neither `torch.export` nor
    `torch.fx.symbolic_trace` can follow the model.
    """
    rows = batch_rows(example_inputs)
    wanted = batch_size or rows
    dtype = DTYPES[precision]
    batched: list[bool] = []

    def to_meta(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        is_batched = x.dim() > 0 and x.shape[0] == rows
        batched.append(is_batched)
        shape = (wanted, *x.shape[1:]) if is_batched else x.shape
        return torch.empty(shape, device="meta", dtype=dtype if x.is_floating_point() else x.dtype)

    example = pytree.tree_map(to_meta, example_inputs)
    named, _ = input_leaves(example)
    paths = [path for path, leaf in named if isinstance(leaf, torch.Tensor)]
    tensors = tuple(leaf for _, leaf in named if isinstance(leaf, torch.Tensor))
    wrapper = _Loss(meta_copy(model, dtype), loss_fn, example)
    split_batch(example, loss_fn)
    program, notes = _export(wrapper, tensors)
    return _Converter(program, wrapper, model, paths, batched, wanted, notes).graph()


def _export(wrapper: _Loss, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, tuple[str, ...]]:
    try:
        with adapted(wrapper.model):
            return torch.export.export(wrapper, tensors, strict=False), ()
    except TraceError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever export raises, the fallback may still work
        first = error
    try:
        wrapper.model = fx.symbolic_trace(wrapper.model)
        program = torch.export.export(wrapper, tensors, strict=False)
        return program, ("torch.export could not follow the model; torch.fx.symbolic_trace did",)
    except Exception:  # noqa: BLE001 - the first error is the one that tells the user something
        raise TraceError(_explain(first)) from first


def _explain(error: Exception) -> str:
    """Where in the user's source tracing stopped, why, and the ways out."""
    installed = Path(torch.__file__).parent
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if installed not in Path(f.filename).parents and not f.filename.startswith("<")
    ]
    here = Path(__file__)
    frames = [f for f in frames if Path(f.filename) != here] or frames[-1:]
    where = (
        f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
        if frames
        else "unknown place"
    )
    reason = (
        str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    )
    return (
        f"the model can't be traced: at {where}\n  {type(error).__name__}: {reason}\n"
        "Shapes and Python control flow must not depend on tensor values. Ways out: compute that value with tensor "
        "operations (torch.where, masks), take it out of forward, or pass the loss as loss_fn= if the loss is what "
        "branches; and check that example_inputs are the arguments that forward expects."
    )


class _Converter:
    """One ExportedProgram -> Graph: plain operators, tied parameters once, in-place made functional."""

    def __init__(
        self, program: Any, wrapper: _Loss, model: nn.Module, paths: list[str], batched: list[bool],
        rows: int, notes: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.program, self.wrapper, self.rows, self.notes = (
            program,
            wrapper,
            rows,
            notes,
        )
        self.paths, self.batched_flags = paths, batched
        self.values: dict[str, TensorMeta] = {}
        self.current: dict[str, Any] = {}  # fx node name -> value name, or a list of them
        self.ops: list[Op] = []
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, str] = {}
        self.batched: set[str] = set()
        self.updates: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.by_tensor: dict[int, str] = {}
        self.keys: Counter[str] = Counter()
        self.views: dict[str, str] = {}
        kept: dict[int, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            first = kept.setdefault(id(p), name)
            self.aliases[name] = first

    def graph(self) -> Graph:
        self._placeholders()
        graph_module = self.program.graph_module
        output = self._run(graph_module, {}, grad=True)
        loss = output[0] if isinstance(output, (list, tuple)) else output
        derived, ops = self._partition(loss)
        used = {n for op in (*derived, *ops) for n in (*op.operands, *op.results)} | {loss}
        used |= set(self.inputs) | set(self.updates)
        keep = lambda names: {k: v for k, v in names.items() if k in used}  # noqa: E731
        return Graph(
            values=keep(self.values),
            ops=tuple(ops),
            derived=tuple(derived),
            inputs=self.inputs,
            batched=frozenset(self.batched),
            parameters=keep(self.parameters),
            buffers=keep(self.buffers),
            constants=keep(self.constants),
            loss=loss,
            batch_size=self.rows,
            updates=self.updates,
            aliases={k: v for k, v in self.aliases.items() if k != v},
            notes=self.notes,
        )

    def _placeholders(self) -> None:
        signature = self.program.graph_signature
        parameters, buffers = (
            signature.inputs_to_parameters,
            signature.inputs_to_buffers,
        )
        constants = {**signature.inputs_to_lifted_tensor_constants}
        user = iter(zip(self.paths, self.batched_flags, strict=True))
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            name = node.name
            if name in parameters:
                fqn = parameters[name].removeprefix("model.")
                fqn = self.aliases.get(fqn, fqn)
                value = self.by_tensor_name(fqn)
                tensor = self.wrapper.get_parameter(parameters[name])
                self.values[value] = TensorMeta(
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    requires_grad=tensor.requires_grad,
                )
                self.parameters[value] = fqn
                self.current[name] = value
            elif name in buffers:
                self.buffers[name] = buffers[name].removeprefix("model.")
                self._define(name, node)
            elif name in constants:
                self.constants[name] = self.program.constants[constants[name]]
                self._define(name, node)
            else:
                path, batched = next(user)
                self.inputs[name] = path
                if batched:
                    self.batched.add(name)
                self._define(name, node)

    def by_tensor_name(self, fqn: str) -> str:
        return "p_" + fqn.replace(".", "_")

    def _define(self, name: str, node: fx.Node) -> None:
        val = node.meta["val"]
        self.values[name] = TensorMeta(shape=tuple(val.shape), dtype=val.dtype)
        self.current[node.name] = name

    def _run(
        self,
        module: fx.GraphModule,
        env: dict[str, Any],
        *,
        grad: bool,
        prefix: str = "",
    ) -> Any:
        """Convert one graph (or an inlined subgraph whose placeholders `env` binds)."""
        bound = env if prefix else self.current

        def value(node: Any) -> Any:
            return bound[node.name] if isinstance(node, fx.Node) else node

        for node in module.graph.nodes:
            if node.op == "get_attr":
                found = module
                for part in node.target.split("."):
                    found = getattr(found, part)
                bound[node.name] = (
                    found
                    if isinstance(found, nn.Module)
                    else self._constant(prefix + node.name, found)
                )
            elif node.op == "output":
                return (
                    fx.map_arg(node.args[0], value)
                    if not isinstance(node.args[0], fx.Node)
                    else value(node.args[0])
                )
            elif node.op == "call_function":
                bound[node.name] = self._call(node, value, grad, prefix)
        raise AssertionError("a graph without output")

    def _constant(self, name: str, tensor: torch.Tensor) -> str:
        self.constants[name] = tensor
        self.values[name] = TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype)
        return name

    def _call(self, node: fx.Node, value: Callable[[Any], Any], grad: bool, prefix: str) -> Any:
        target = node.target
        if target is operator.getitem:
            return value(node.args[0])[node.args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, value, grad, prefix)
        if not isinstance(target, torch._ops.OpOverload):
            raise TraceError(f"unsupported call {target} in the traced graph at {_source(node)}")
        short = target._schema.name.split("::")[1]
        if short in ELIDED or self._is_noop(node, short):
            return value(node.args[0])
        if short == "broadcast_tensors" and _same_shapes(node.args[0]):
            return [value(a) for a in node.args[0]]  # type: ignore[union-attr]
        return self._emit(node, str(target), value, grad, prefix)

    def _is_noop(self, node: fx.Node, short: str) -> bool:
        if short == "dropout" and (not node.args[2] or node.args[1] == 0.0):
            return True
        if short not in ("to", "_to_copy", "type_as", "float"):
            return False
        source = node.args[0]
        return isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype

    def _inline(self, node: fx.Node, value: Callable[[Any], Any], grad: bool, prefix: str) -> Any:
        """`wrap_with_set_grad_enabled(enabled, graph, *args)` and its kin: their body, in place."""
        name = str(node.target)
        if "set_grad_enabled" not in name:
            raise TraceError(f"unsupported higher-order operator {name} at {_source(node)}")
        enabled, body = bool(node.args[0]), value(node.args[1])
        inner_prefix = f"{prefix}{node.name}_"
        holders = [n for n in body.graph.nodes if n.op == "placeholder"]
        env = {h.name: value(a) for h, a in zip(holders, node.args[2:], strict=True)}
        return self._run(body, env, grad=grad and enabled, prefix=inner_prefix)

    def _emit(
        self,
        node: fx.Node,
        target: str,
        value: Callable[[Any], Any],
        grad: bool,
        prefix: str,
    ) -> Any:
        name = prefix + node.name

        def ref(item: fx.Node) -> Any:
            found = value(item)
            return [Ref(x) for x in found] if isinstance(found, (list, tuple)) else Ref(found)

        args = _freeze(fx.map_arg(node.args, ref))
        kwargs = {
            k: _freeze(fx.map_arg(v, ref))
            for k, v in node.kwargs.items()
            if k not in ("pin_memory", "layout")
        }
        mutated, target = self._functional(node, target, args)
        val = node.meta["val"]
        metas = list(val) if isinstance(val, (tuple, list)) else [val]
        metas = [m for m in metas if isinstance(m, torch.Tensor)]
        needs = (
            grad
            and any(self.values[n].requires_grad for n in refs((args, kwargs)))
            and "detach" not in target
        )
        results = tuple(
            name if len(metas) == 1 and not isinstance(val, (tuple, list)) else f"{name}_{i}"
            for i in range(len(metas))
        )
        for result, meta in zip(results, metas, strict=True):
            floating = meta.dtype.is_floating_point
            self.values[result] = TensorMeta(
                shape=tuple(meta.shape),
                dtype=meta.dtype,
                requires_grad=needs and floating,
            )
        module = _module_of(node)
        short = target.split(".")[1]
        count = self.keys[f"{module}:{short}"]
        self.keys[f"{module}:{short}"] += 1
        key = f"{module}:{short}" + (f"#{count}" if count else "")
        self.ops.append(
            Op(name=name, target=target, args=args, kwargs=kwargs, results=results, key=key, module=module, source=_source(node))
        )  # fmt: skip
        if mutated is not None:
            self._rebind(mutated, results[0], node)
        elif args and isinstance(args[0], Ref) and _is_view(target):
            self.views[results[0]] = args[0].name
        return list(results) if isinstance(val, (tuple, list)) else results[0]

    def _functional(
        self, node: fx.Node, target: str, args: tuple[Any, ...]
    ) -> tuple[str | None, str]:
        """(value mutated, functional form) of an in-place operator; (None, target) for others."""
        namespace, base, overload = target.split(".")
        if (
            not base.endswith("_")
            or base.startswith("__")
            or not args
            or not isinstance(args[0], Ref)
        ):
            return None, target
        packet = getattr(getattr(torch.ops, namespace), base[:-1], None)
        if packet is None or overload not in packet.overloads():
            raise TraceError(
                f"in-place operator {target} at {_source(node)} has no functional form; write it out of place"
            )
        if args[0].name in self.views or args[0].name in self.views.values():
            raise TraceError(
                f"in-place operator {target} on a view at {_source(node)}: other names of that memory would go stale; "
                "write it out of place (torch.where, torch.cat, x = x + y)"
            )
        return args[0].name, f"{namespace}.{base[:-1]}.{overload}"

    def _rebind(self, old: str, new: str, node: fx.Node) -> None:
        if old in self.buffers or old in self.updates.values():
            buffer = next((b for b, v in self.updates.items() if v == old), old)
            self.updates[buffer] = new
        for name, bound in self.current.items():
            if bound == old:
                self.current[name] = new

    def _partition(self, loss: str) -> tuple[list[Op], list[Op]]:
        """Dead operators dropped; (derived from raw inputs alone, the rest)."""
        live = {loss, *self.updates.values()}
        kept: list[Op] = []
        for op in reversed(self.ops):
            if live & set(op.results):
                live |= set(op.operands)
                kept.append(op)
        kept.reverse()
        raw = set(self.inputs) | set(self.buffers) | set(self.constants)
        derived, ops = [], []
        for op in kept:
            random = op.short in (
                "dropout",
                "bernoulli",
                "rand",
                "randn",
                "rand_like",
                "randn_like",
            )
            if all(n in raw for n in op.operands) and not random:
                raw |= set(op.results)
                derived.append(op)
            else:
                ops.append(op)
        return derived, ops


def _freeze(tree: Any) -> Any:
    """fx's immutable lists as plain tuples and lists."""
    if isinstance(tree, (fx.immutable_collections.immutable_list, list)):
        return [_freeze(x) for x in tree]
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return tuple(_freeze(x) for x in tree)
    return map_refs(tree, Ref)


def _same_shapes(tensors: Any) -> bool:
    return len({tuple(t.meta["val"].shape) for t in tensors}) == 1


def _is_view(target: str) -> bool:
    return target.split(".")[1] in (
        "view", "slice", "select", "transpose", "permute", "expand", "unsqueeze", "squeeze", "split", "chunk", "t",
    )  # fmt: skip


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = path.removeprefix("model").removeprefix(".")
    return ".".join(part.split("@")[0] for part in path.split("."))


def _source(node: fx.Node) -> str:
    lines = [
        x.strip()
        for x in (node.meta.get("stack_trace") or "").splitlines()
        if x.strip().startswith("File")
    ]
    if not lines:
        return ""
    parts = lines[-1].split('"')
    return f"{parts[1]}:{parts[2].split()[2].rstrip(',')}" if len(parts) > 2 else lines[-1]
