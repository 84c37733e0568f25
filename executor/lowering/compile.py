"""Lowered blocks through torch.compile, one compilation for all blocks that share a graph.

A lowered block is a pure function of the tensors it is called with: shapes, placements and groups
are constants of its graph. So what is compiled is the whole graph, for its one shape, and a call
checks only the tensors (their shapes, types and whether they require gradients) and torch's global
state, no attribute of a module. Collectives are operators of the compiled graph; torch keeps their
order, which is the same on every rank because the graphs are.

ZeRO-3's gathers surround the compiled block. Recompute lies inside it: torch plans forward and
backward together and runs again what it must, except collectives, whose results it keeps. Weight
gradients can't be put off from within a compiled backward, so under schedules that split it I
computes them, too, and W has nothing left to do: the same results, without what the split hides.
Blocks that share experts out run as they are: how much they exchange depends on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton

from meshwright.executor.errors import StateError
from meshwright.profiles.inputs import ArgumentError

DEFAULT = "inductor"
# duplicates: an argument given twice; the rest as their names say
_CHECKED = ("TENSOR_MATCH", "DUPLICATE_INPUT", "SHAPE_ENV", "GLOBAL_STATE", "GRAD_MODE")
WAY_OUT = "pass compile=False to run without a compiler"


def backend_of(compile: Any, device_type: str | None = None) -> str | None:
    """The backend that `compile=` names: True is torch.compile's default, False none.

    With a `device_type`, also checks that the backend can compile for it here. Raises ValueError
    for what names none, RuntimeError where the machine lacks what the backend needs.
    """
    if isinstance(compile, bool):
        backend = DEFAULT if compile else None
    else:
        backend = compile
        legal = torch.compiler.list_backends(exclude_tags=())
        if backend not in legal:
            raise ArgumentError.refused(
                "compile",
                compile,
                legal=f"True, False, or a backend of torch.compile: {', '.join(legal)}",
            )
    if backend == DEFAULT and device_type is not None:
        _check_tools(device_type)
    return backend


def _check_tools(device_type: str) -> None:
    """Raise RuntimeError if torch.compile's default backend can't compile for a device here."""
    if device_type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise StateError(
                "torch.compile needs a C++ compiler for CPU ranks, and none was found",
                place="compile=True",
                legal="a machine with one",
                way_out=f"install g++ or clang++, or name yours in CXX; or {WAY_OUT}",
            ) from error
    elif not has_triton():
        raise StateError(
            f"torch.compile needs Triton on {device_type} ranks, and it is not installed or does "
            "not support this device",
            place="compile=True",
            legal="devices that Triton supports",
            way_out=f"install it (pip install triton), or {WAY_OUT}",
        )


class CompiledBlock(nn.Module):
    """A lowered graph, compiled when it is first called.

    torch looks compilations up by the code that is called, and no check here tells modules apart:
    it must be a GraphModule, whose code is its own.
    """

    def __init__(self, graph: fx.GraphModule, *, name: str, backend: str) -> None:
        """`name` is that of a block with this graph, for messages."""
        super().__init__()
        self.graph, self.name, self.backend = graph, name, backend
        self.compiled = torch.compile(
            graph,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            options={"guard_filter_fn": _on_tensors},
        )

    def forward(self, *args: torch.Tensor) -> Any:
        if not self.training:  # compiled as it trains
            return self.graph(*args)
        try:
            return self.compiled(*args)
        except TorchDynamoException as error:
            raise StateError(
                f"torch.compile (backend {self.backend!r}) failed; {WAY_OUT}. "
                f"The cause: {type(error).__name__}: {error}",
                place=f"block {self.name!r}",
            ) from error


def _on_tensors(guards: Sequence[Any]) -> list[bool]:
    """The guards that a call checks: those on its arguments and on torch's global state."""
    return [guard.guard_type in _CHECKED for guard in guards]
