"""Tracing a model into a Graph by `torch.export`; with `convert.py` the one adapter to torch's
tracing internals.

The user's model is never touched and no weight is materialised: a copy is traced whose tensors are
fake (shapes on the CPU, no memory), in the train/eval mode the user set, for one micro-batch of
`batch_size` rows. The graph is ATen before decomposition (`linear`, `layer_norm`,
`scaled_dot_product_attention` stay whole) and ends in the scalar loss.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from meshwright.costmodel.graph import Graph
from meshwright.planner.batch import split_batch
from meshwright.planner.errors import TraceError, Untraceable, enclosing_modules
from meshwright.planner.tracing.batch import FakeBatch, check_call
from meshwright.planner.tracing.context import explain, quiet, recorded_gradients, unvalidated
from meshwright.planner.tracing.convert import convert
from meshwright.planner.tracing.dtypes import CastStrategy, cast_strategies, writes_floats
from meshwright.planner.tracing.leaves import LeafRecorder
from meshwright.planner.tracing.loss import LossModule
from meshwright.planner.tracing.similar import Irregular, StandIns
from meshwright.planner.tracing.transformers import adapted
from meshwright.planner.tracing.user_module import (
    SimilarLayers,
    check_hooks,
    fake_copy,
    find_similar_layers,
    more_leaves,
    running_module,
    user_frame,
)
from meshwright.planner.tracing.values import mixed_operands

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    repeats: bool = True,
) -> Graph:
    """Trace forward and loss for one micro-batch of `batch_size` rows (default: the example's).

    With `repeats`, three of the layers that are built alike are traced for all of them, where that
    gives the graph of a full trace up to the names of values. Modules that can't be traced are kept
    as leaves. Raises `ValueError` for a batch that does not fit, and `TraceError` with the user's
    source line where neither `torch.export` nor `torch.fx.symbolic_trace` can follow the model.
    """
    if precision not in DTYPES:
        raise ValueError(f"precision={precision!r}; legal: {', '.join(DTYPES)}")
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ValueError(
            "loss_fn has parameters of its own; make it a part of the model, which then returns "
            "the loss"
        )
    batch = FakeBatch.of(example_inputs, DTYPES[precision], batch_size)
    check_call(model, example_inputs, loss_fn)
    check_hooks(model)
    tracer = _Tracer(model=model, loss_fn=loss_fn, dtype=DTYPES[precision], batch=batch)
    leaves: dict[str, str] = {}
    first: Untraceable | None = None
    while True:
        try:
            return (tracer.short_graph(leaves) if repeats else None) or tracer.graph((), leaves)
        except Untraceable as error:
            first = first or error
            leaves = more_leaves(model, leaves, error)
            if not leaves:
                raise first if first is error else _no_leaf(first, error) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tracer:
    """The trace of one model: what all attempts at it have in common.

    Of an attempt, `groups` are the similar layers of which only some are traced, and `leaves` the
    modules, by FQN, that are one node because they can't be traced, each with the reason.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    dtype: torch.dtype
    batch: FakeBatch

    def graph(self, groups: Sequence[SimilarLayers], leaves: Mapping[str, str]) -> Graph:
        """The graph by `torch.export`. Raises `TraceError`, and `Irregular` where `groups` do not
        prove to be similar."""

        def make(cast_buffers: bool) -> LossModule:
            return self._loss_module(groups, leaves, cast_buffers)

        program, module, notes = _export(make, cast_strategies(self.dtype, full=not groups))
        return convert(
            program, module, loss_fn=self.loss_fn, notes=(*notes, *module.leaf_recorder.notes())
        )

    def short_graph(self, leaves: Mapping[str, str]) -> Graph | None:
        """The graph by way of similar layers; None where only a full trace can tell."""
        try:
            groups = find_similar_layers(self.model)
            return self.graph(groups, leaves) if groups else None
        except Exception:  # a full trace is the judge of whatever went wrong, and gives the message
            log.debug("traced in full", exc_info=True)
            return None

    def _loss_module(
        self, groups: Sequence[SimilarLayers], leaves: Mapping[str, str], cast_buffers: bool
    ) -> LossModule:
        """A copy of model and loss in fake tensors, ready to be exported once."""

        def empty_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            with self.batch.mode:
                return torch.empty(t.shape, dtype=dtype)

        def fake(module: Any, replaced: Mapping[int, Any]) -> Any:
            return fake_copy(
                module, self.dtype, empty_like, cast_buffers=cast_buffers, replaced=replaced
            )

        stand_ins = StandIns(self.model, groups)
        loss_fn = fake(self.loss_fn, {}) if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        copied = fake(self.model, stand_ins.memo())
        recorder = LeafRecorder(self.model, leaves, self.batch.scale)
        recorder.instrument(copied, tuple(stand_ins.blank))
        stand_ins.instrument(copied)
        return LossModule(copied, loss_fn, self.batch, stand_ins, recorder)


def _no_leaf(first: Untraceable, last: Untraceable) -> TraceError:
    return TraceError(f"{first}\nAs one node of the graph it won't do either: {last}")


def _export(
    make: Callable[[bool], LossModule], strategies: Sequence[CastStrategy]
) -> tuple[torch.export.ExportedProgram, LossModule, tuple[str, ...]]:
    """The exported loss by the first strategy that works, its module, and notes on the strategy.

    `make` gives a new module, with buffers cast or not. Raises the `TraceError` of the first
    strategy where none works.
    """
    first: TraceError | None = None
    for strategy in strategies:
        module = make(strategy.buffers)
        if strategy.symbolic and module.leaf_recorder.classes:
            break  # it would look into leaves
        try:
            with (
                quiet(),
                torch.enable_grad(),
                adapted(module.model),
                recorded_gradients(),
                unvalidated(),
                strategy.casts(),
            ):
                if strategy.symbolic:
                    module.model = _symbolic(module)
                program = torch.export.export(module, module.batch.tensors, strict=False)
                module.stand_ins.check()
        except (TraceError, Irregular):
            raise
        except Exception as error:  # whatever export raises, another strategy may work
            log.debug("tracing failed", exc_info=True)
            first = first or _failure(error, module)
        else:
            module.leaf_recorder.restore()
            mixed_at = mixed_operands(program)
            if mixed_at is None and not (strategy.buffers and writes_floats(program)):
                return program, module, (strategy.note,) if strategy.note else ()
            first = first or _dtype_error(mixed_at or "an unknown place")
    assert first is not None
    raise first


def _failure(error: Exception, module: LossModule) -> Untraceable:
    reason = f"{user_frame(traceback.extract_tb(error.__traceback__))} can't be traced"
    modules = enclosing_modules(running_module(error, module.model))
    failure = Untraceable(explain(error), modules=modules, reason=reason)
    failure.__cause__ = error
    return failure


def _dtype_error(place: str) -> TraceError:
    return TraceError(
        f"the model can't run in this precision: at {place}; cast with .to(weight.dtype), or "
        "choose precision='fp32'"
    )


def _symbolic(module: LossModule) -> fx.GraphModule:
    """The model as `torch.fx.symbolic_trace` sees it, less what its output does not need."""
    args, kwargs, _ = split_batch(module.batch.filled(module.batch.tensors), module.loss_fn)
    signature = inspect.signature(module.model.forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    fixed = {
        name: value
        for name, value in bound.arguments.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }
    traced = fx.symbolic_trace(module.model, concrete_args=fixed or None)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    generated = traced.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # generated code renames arguments
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return generated(*bound.args, **bound.kwargs)

    traced.forward = forward
    return traced
