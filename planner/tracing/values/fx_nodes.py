"""Reading the nodes of an exported fx graph: results, aliasing, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from meshwright.costmodel.graph import TensorMeta
from meshwright.planner.errors import TraceError, Untraceable, around


@dataclass(frozen=True, slots=True)
class Unknown:
    """A result that no value of the graph can stand for: it has no fixed shape, or is made by a
    `call` that is no operator."""

    source: str
    call: str
    module: str
    dynamic: bool

    def error(self) -> Untraceable:
        places, why = around(self.module), f"{self.source} {self.call} can't be traced"
        if not self.dynamic:
            return Untraceable(
                f"the model can't be traced: at {self.source} it calls {self.call}, which is no "
                "tensor operator; write it with plain tensor operations (e.g. a batch dim in place "
                "of torch.vmap), take it out of forward, or keep the module around it as one node "
                "(meshwright.leaf)",
                places=places,
                why=why,
            )
        return Untraceable(
            f"the model can't be traced: at {self.source} {self.call} makes a number or a shape "
            "that depends on tensor values. Ways out: masks and torch.where in place of selecting "
            "(x[mask], nonzero), tensor operations in place of .item(), or the module around it "
            "kept as one node (meshwright.leaf)",
            places=places,
            why=why,
        )


# operators whose floating operands must have one dtype; fake tensors do not check it
ONE_DTYPE = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip


def mixed_operands(program: torch.export.ExportedProgram) -> str | None:
    """Where a matrix product meets operands of two dtypes, which no device computes; None if
    nowhere.

    Under autocast they are cast."""
    modules = dict(program.graph_module.named_modules())
    cast = {
        str(n.args[4].target)
        for module in modules.values()
        if isinstance(module, fx.GraphModule)
        for n in module.graph.nodes
        if "autocast" in str(n.target) and n.args[2] and isinstance(n.args[4], fx.Node)
    }
    for name, module in modules.items():
        if not isinstance(module, fx.GraphModule) or name.rpartition(".")[2] in cast:
            continue
        for node in module.graph.nodes:
            vals = [n.meta.get("val") for n in node.all_input_nodes]
            dtypes = {v.dtype for v in vals if isinstance(v, torch.Tensor)}
            floating = {str(d).removeprefix("torch.") for d in dtypes if d.is_floating_point}
            if _short(node) in ONE_DTYPE and len(floating) > 1:
                return f"{where(node)} {_short(node)} meets {' and '.join(sorted(floating))}"
    return None


def check_dense(node: fx.Node) -> None:
    """Refuse a table whose gradient would be a sparse tensor."""
    if str(node.target) == "aten.embedding.default" and node.args[4:5] == (True,):
        raise TraceError(
            f"at {where(node)} an embedding has sparse=True: gradients are reduced and handed over "
            "as dense tensors; drop it, and take a dense optimizer"
        )


def _short(node: fx.Node) -> str:
    packet = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target).split(".")[1] if packet else ""


def results_of(node: fx.Node) -> list[Any]:
    val = node.meta.get("val")
    return list(val) if isinstance(val, (tuple, list)) else [val]


def is_dynamic(results: Sequence[Any]) -> bool:
    """Whether sizes or results are symbols, known only when the values are."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    sizes = [s for r in results if isinstance(r, torch.Tensor) for s in r.shape]
    return any(isinstance(x, symbols) for x in (*results, *sizes))


def schema_of(node: fx.Node) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def shapes_of(tensors: Sequence[Any]) -> set[tuple[int, ...]]:
    return {tuple(t.shape) for t in tensors}


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def plain(tree: Any) -> Any:
    """fx's immutable lists and dicts as plain ones."""
    if isinstance(tree, list):
        return [plain(x) for x in tree]
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return tuple(plain(x) for x in tree)
    return tree


def module_of(node: fx.Node) -> str:
    """FQN in the user's model of the innermost module a node was called in."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    parts = [part.split("@")[0] for part in path.split(".")]
    return ".".join(parts[1:] if parts[0] == "model" else parts)


def where(node: fx.Node) -> str:
    """`source_of` for messages."""
    return source_of(node) or "an unknown place"


def source_of(node: fx.Node) -> str:
    """file:line of the innermost call outside torch."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))
    lines = [
        line.split('"')
        for line in (node.meta.get("stack_trace") or "").splitlines()
        if line.strip().startswith("File")
    ]
    found = [parts for parts in lines if not parts[1].startswith(skipped)]
    if not found:
        return ""
    number = found[-1][2].split()[2].rstrip(",")
    return f"{found[-1][1]}:{number}"
