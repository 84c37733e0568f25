"""Cast strategies: tracing a model in a compute dtype that it was not written for.

Parameters and inputs are in the compute dtype, buffers keep theirs. A float32 buffer that meets a
bf16 activation makes a float32 one, which no product takes beside bf16 weights. What helps is to
cast floating buffers too, as `model.bfloat16()` does, unless the forward writes to one (a running
mean in half precision stalls); else to cast the operands of products, as autocast does. These casts
are made while the model is traced, and are operators of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.costmodel.rules import traits_of_target
from meshwright.planner.tracing.values import ONE_DTYPE, share_memory

CAST = ONE_DTYPE | {"__matmul__", "__rmatmul__", "layer_norm", "group_norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CastStrategy:
    """How to make dtypes meet, or how else to trace.

    `buffers`: floating buffers are cast to the compute dtype; `products`: the dtype that operands
    of products are cast to; `symbolic`: by `torch.fx.symbolic_trace`; `note` tells the user.
    """

    buffers: bool = False
    products: torch.dtype | None = None
    symbolic: bool = False
    note: str = ""

    def casts(self) -> AbstractContextManager[Any]:
        return _ProductCasts(self.products) if self.products else nullcontext()


def cast_strategies(dtype: torch.dtype, *, full: bool) -> list[CastStrategy]:
    """The strategies to try, best first; a `full` trace is the last attempt and may be symbolic."""
    strategies = [CastStrategy()]
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        note = f"operands of products are cast to {name} where they differ"
        strategies += [
            CastStrategy(buffers=True, note="floating buffers are in the compute dtype too"),
            CastStrategy(products=dtype, note=note),
        ]
    if full:
        note = "traced by torch.fx.symbolic_trace, not torch.export alone"
        strategies.append(CastStrategy(symbolic=True, note=note))
    return strategies


class _ProductCasts(TorchFunctionMode):
    """Mode under which products and norms whose floating operands differ in dtype take them all in
    `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        call = args, kwargs or {}
        if getattr(func, "__name__", "") in CAST:
            floating = [x for x in pytree.tree_leaves(call) if _floating(x)]
            if len({x.dtype for x in floating}) > 1:
                call = pytree.tree_map_only(torch.Tensor, self._cast, call)
        return func(*call[0], **call[1])

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype) if _floating(x) else x


def _floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def writes_floats(program: torch.export.ExportedProgram) -> bool:
    """Whether the exported forward writes to a floating buffer or to an alias of one."""
    names = program.graph_signature.inputs_to_buffers
    buffers = [n.meta["val"] for n in program.graph.nodes if n.name in names]
    written = [
        node.meta["val"]
        for module in program.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for call in module.graph.nodes
        for node in _written(call)
    ]
    return any(_floating(b) and any(share_memory(b, w) for w in written) for b in buffers)


def _written(call: fx.Node) -> list[fx.Node]:
    if not isinstance(call.target, torch._ops.OpOverload):
        return []
    if statistics := traits_of_target(str(call.target)).statistics:  # its schema does not say so
        return [x for k in statistics.running if isinstance(x := call.args[k], fx.Node)]
    return list(call.all_input_nodes[:1]) if call.target._schema.is_mutable else []
