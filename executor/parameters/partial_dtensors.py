"""Norms, sums and means of sharded tensors, as optimizers and users take them.

DTensor leaves a norm, sum or mean over a sharded dim partial: every rank holds its own part until
an operator asks for the whole. In torch 2.13 two don't ask: `.item()` gives the rank's own part,
and arithmetic in place raises: `torch.optim.Adafactor` fails. `read_whole_items` makes the first
right; for the second, optimizers over DTensors step with partial results reduced, by torch's hooks
around all steps.

A DTensor knows its own stage only. So a norm of gradients under a pipeline, of which clipping would
make another on every stage, is refused: `StageGradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, _dtensor_spec
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from meshwright.executor.errors import StateError
from meshwright.executor.parameters.whole_operands import PROPERTY, all_reduced, attribute

NORMS = (
    torch._foreach_norm,
    torch.Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch.norm,
)


class Reduced(TorchFunctionMode):
    """Redistributes every partial DTensor result to replicated: `with Reduced(): p.norm().item()`.

    Collective where results are partial: every rank of the parameters' mesh calls it. Norms in it
    are those of one parameter, as optimizers take them.
    """

    entered = 0

    def __enter__(self) -> Reduced:
        Reduced.entered += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        Reduced.entered -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, PROPERTY):  # most calls are: an optimizer makes some 20 a parameter
            return attribute(func, args)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, DTensor):
            return all_reduced(result)
        if isinstance(result, list | tuple | dict):
            return tree_map_only(DTensor, all_reduced, result)
        return result


class _Steps:
    """The step of an optimizer over DTensors that runs: the `outermost`, if steps are nested."""

    def __init__(self) -> None:
        self.mode: Any = Reduced()
        self.outermost: torch.optim.Optimizer | None = None

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.outermost is None and _over_dtensors(optimizer):
            self.outermost = optimizer
            self.mode.__enter__()

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.outermost is optimizer:
            self.outermost = None
            self.mode.__exit__(None, None, None)


@cache
def reduce_in_optimizers() -> None:
    """From now on every optimizer over DTensors steps inside `Reduced`."""
    steps = _Steps()
    register_optimizer_step_pre_hook(steps.begin)
    register_optimizer_step_post_hook(steps.end)


def _over_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


class StageGradient(DTensor):
    """A gradient of one of several pipeline stages, or what is made of its elements outside of
    optimizers, whose norm outside `Reduced` is refused."""

    __slots__: list[str] = []

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in NORMS and not Reduced.entered:
            raise StateError(
                "a norm of gradients on one pipeline stage is not that of the model",
                way_out="clip by "
                "result.clip_grad_norm_(max_norm), which also returns the norm (max_norm=inf clips "
                "nothing); an optimizer that takes the norm of each parameter steps inside "
                "`with meshwright.Reduced():`",
            )
        parent: Any = super()
        result = parent.__torch_function__(func, types, args, kwargs)
        of = next((x for x in args if isinstance(x, StageGradient)), None)
        elements = type(result) is DTensor and of is not None and result.shape == of.shape
        if elements and not Reduced.entered:
            result.__class__ = StageGradient
        return result


def read_whole_items() -> None:
    """Have `.item()` of a partial DTensor give the whole's number, not this rank's part of it. It
    is collective then."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _whole_item


@cache
def read_strided_parts() -> None:
    """Have torch 2.11 redistribute parts that are strided (rows of a fused q, k, v): it takes them
    for orders of mesh axes alone, and raises where they are none; later versions don't."""
    if hasattr(_dtensor_spec, "_StridedShardNotDecodableError"):
        return
    spec: Any = DTensorSpec
    original = spec.__post_init__

    def post_init(self: Any) -> None:
        if self.use_strided_shard_as_shard_order is None and any(
            isinstance(p, _StridedShard) for p in self.placements
        ):
            order = spec._maybe_convert_StridedShard_to_shard_order(self.placements, self.mesh)
            self.use_strided_shard_as_shard_order = order is not None
        original(self)

    spec.__post_init__ = post_init


def _whole_item(op: object, args: tuple[Any, ...], kwargs: object) -> Any:
    return args[0].full_tensor().item()
