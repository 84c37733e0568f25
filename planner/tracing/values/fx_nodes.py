"""Node metadata of an exported fx graph: results, aliasing, module and source line."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from meshwright.costmodel.graph import TensorMeta
from meshwright.costmodel.rules import Dims
from meshwright.planner.errors import TraceError, Untraceable, enclosing_modules


@dataclass(frozen=True, slots=True)
class Unknown:
    """A result of `dynamic` shape, or of a `call` that is no operator: an error only where the loss
    depends on it."""

    source: str
    call: str
    module: str
    dynamic: bool

    def error(self) -> Untraceable:
        """The error to raise where the loss depends on it."""
        if self.dynamic:
            what = (
                f"{self.call} makes a number or a shape that depends on tensor values. Ways out: "
                "masks and torch.where in place of selecting (x[mask], nonzero), tensor operations "
                "in place of .item(), or the module around it kept as one node (meshwright.leaf)"
            )
        else:
            what = (
                f"it calls {self.call}, which is no tensor operator; write it with plain tensor "
                "operations (e.g. a batch dim in place of torch.vmap), take it out of forward, or "
                "keep the module around it as one node (meshwright.leaf)"
            )
        return Untraceable(
            f"the model can't be traced: at {self.source} {what}",
            modules=enclosing_modules(self.module),
            reason=f"{self.source} {self.call} can't be traced",
        )


# operators whose floating operands must have one dtype; fake tensors do not check it
ONE_DTYPE = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip


def mixed_operands(program: torch.export.ExportedProgram, *, autocast: bool) -> str | None:
    """The first matrix product or convolution outside of autocast whose operands differ in
    dtype, which no device computes: its source line and dtypes; None without one. `autocast` says
    whether the program was exported under it."""
    modules = program.graph_module.named_modules()
    graphs = {name: m.graph for name, m in modules if isinstance(m, fx.GraphModule)}
    enabled = {
        str(n.args[4].target): bool(n.args[2])
        for graph in graphs.values()
        for n in graph.nodes
        if "autocast" in str(n.target) and isinstance(n.args[4], fx.Node)
    }
    for name, graph in graphs.items():
        if enabled.get(name.rpartition(".")[2], autocast):
            continue
        for node in graph.nodes:
            vals = [n.meta.get("val") for n in node.all_input_nodes]
            dtypes = {v.dtype for v in vals if isinstance(v, torch.Tensor)} - {torch.bool}  # masks
            names = sorted(str(d).removeprefix("torch.") for d in dtypes)
            packet = isinstance(node.target, torch._ops.OpOverload)
            short = str(node.target).split(".")[1] if packet else ""
            if short in ONE_DTYPE and len(names) > 1:
                return f"{where(node)} {short} meets {' and '.join(names)}"
    return None


def check_dense(node: fx.Node) -> None:
    """Raise `TraceError` for an embedding whose gradient would be a sparse tensor."""
    if str(node.target) == "aten.embedding.default" and node.args[4:5] == (True,):
        raise TraceError(
            "gradients are reduced and handed over as dense tensors",
            place=f"at {where(node)} an embedding has sparse=True",
            way_out="drop it, and take a dense optimizer",
        )


def results_of(node: fx.Node) -> list[Any]:
    """Results of a node as the export recorded them: fake tensors, or other values."""
    val = node.meta.get("val")
    return list(val) if isinstance(val, (tuple, list)) else [val]


def is_dynamic(results: Sequence[Any]) -> bool:
    """Whether a result, or a size of one, is a symbol: it depends on the values of tensors."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    sizes = [s for r in results if isinstance(r, torch.Tensor) for s in r.shape]
    return any(isinstance(x, symbols) for x in (*results, *sizes))


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLike:
    """Shape, stride, dtype and `requires_grad` of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(x: torch.Tensor) -> TensorLike:
        return TensorLike(
            shape=tuple(x.shape), stride=x.stride(), dtype=x.dtype, requires_grad=x.requires_grad
        )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def resized(self, dims: Dims, sizes: Mapping[str, int]) -> TensorLike:
        """Contiguous, each dim as wide as the product of the `sizes` of its factors."""
        shape = tuple(math.prod(sizes[name] for name in names) for names in dims)
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return replace(self, shape=shape, stride=strides)

    def empty(self) -> torch.Tensor:
        x = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return x.requires_grad_(self.requires_grad)

    def random(self) -> torch.Tensor:
        """Normal numbers; zeros where they are integers, which may count something."""
        x = torch.zeros(self.shape, dtype=self.dtype)
        x = x.normal_() if self.dtype.is_floating_point else x
        return x.requires_grad_(self.requires_grad)

    def copy_of(self, x: torch.Tensor) -> torch.Tensor:
        copy = x.detach().to("cpu", self.dtype, copy=True)
        return copy.requires_grad_(self.requires_grad)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are aliases: views of one storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def thawed(tree: Any) -> Any:
    """fx's immutable lists as plain ones, in lists and tuples."""
    if isinstance(tree, list):
        return [thawed(x) for x in tree]
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return tuple(thawed(x) for x in tree)
    return tree


def module_of(node: fx.Node) -> str:
    """FQN in the user's model of the innermost module a node was called in."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    parts = [part.split("@")[0] for part in path.split(".")]
    return ".".join(parts[1:] if parts[0] == "model" else parts)


def where(node: fx.Node) -> str:
    """`source_of` for messages: never empty."""
    return source_of(node) or "an unknown place"


def source_of(node: fx.Node) -> str:
    """file:line of the innermost call outside of torch and this package; "" without one."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))
    for line in reversed((node.meta.get("stack_trace") or "").splitlines()):
        if line.strip().startswith("File"):
            _, file, rest, *_ = line.split('"')
            if not file.startswith(skipped):
                return f"{file}:{rest.split()[2].rstrip(',')}"
    return ""


# torch's second names of one operator
SYNONYMS: Mapping[str, str] = MappingProxyType({
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg",
    "absolute": "abs", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "not_equal": "ne", "clip": "clamp", "concat": "cat", "concatenate": "cat", "arctan": "atan",
    "special_expit": "sigmoid", "special_log1p": "log1p", "special_expm1": "expm1",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax",
})  # fmt: skip


@functools.cache
def canonical_target(target: str) -> str:
    """`aten.multiply.Tensor` -> `aten.mul.Tensor`, where their schemas have equal arguments."""
    namespace, name, overload = target.split(".")
    if namespace != "aten" or name not in SYNONYMS:
        return target
    packets = (getattr(torch.ops.aten, n) for n in (name, SYNONYMS[name]))
    forms = [getattr(packet, overload, None) for packet in packets]
    takes = [[(a.name, str(a.type)) for a in f._schema.arguments] if f else None for f in forms]
    return f"aten.{SYNONYMS[name]}.{overload}" if takes[0] == takes[1] else target
