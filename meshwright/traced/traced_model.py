"""TracedModel: the user's model with its loss as a graph, at any number of rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import count, zip_longest
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Graph, Op, map_refs
from meshwright.costmodel.rules import runs_as_reshape, traits_of
from meshwright.costmodel.user_rules import verified
from meshwright.executor.ranks import same_random_state
from meshwright.planner.batch import batch_rows, unusual_kind
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.garbage import seldom_collected
from meshwright.planner.tracing import trace
from meshwright.planner.tracing.transformers import check_positions
from meshwright.profiles.inputs import MeshwrightError
from meshwright.traced.unchanged import Attributes, Calls

progress = logging.getLogger("meshwright.progress")
PARTS = 3  # of a trace


class TracedModel:
    """A model traced at the sample batch, and again at a plan's micro-batch when it is lowered, in
    rank 0's random state. Raises ValueError for a model whose parameters are DTensors already, not
    dense, or complex and trained."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        loss_fn: Callable[..., Any] | None,
        precision: str,
        *,
        like: Graph | None = None,
    ) -> None:
        """The model is cut into blocks as in the graph `like`, where there is one."""
        self.example, self._loss_fn, self._precision = example, loss_fn, precision
        self.model = model
        _check_parameters(model)
        self.check_batch(example)
        started = time.process_time()
        # at least two rows: a batch of one would look like no batch at all
        self._modes = [(m, m.training) for m in model.modules()]
        self.graph, self.factors = self._traced(max(2, batch_rows(example)), like=like)
        self.phases_s = {"trace": time.process_time() - started}
        self.use = sharding.row_use(self.graph, self.factors)
        self.attributes = Attributes(model, loss_fn, self.graph)
        self.calls = Calls(model)

    def check_batch(self, batch: Any) -> None:
        """Raise ValueError where the model would not do with a batch what its trace does."""
        check_positions(self.model, batch)

    def check_unchanged(self, *, training: bool) -> None:
        """Raise ValueError where the model is not what was traced; modes matter to `training`
        only."""
        self.calls.check()
        self.attributes.check(training=training)

    @property
    def batched(self) -> frozenset[str]:
        """The paths of the batch's tensors whose first dim is its rows."""
        return frozenset(self.graph.inputs[name] for name in self.graph.batched)

    @cached_property
    def run_use(self) -> sharding.RowUse:
        """Use of rows by a step: as `use`, but smaller batches are not filled up where the loss has
        their number of rows in it, as its trace at other rows tells."""
        use = self.use
        if not use.filling or not use.numbers:
            return use
        try:
            same = sharding.same_numbers(self.graph, self.at(2 * self.graph.batch_size)[0])
        except ValueError:  # it can't be traced there
            same = False
        return use if same else replace(use, filling=None)

    @cached_property
    def why_not_evaluated(self) -> str:
        """The first operator that an evaluation does not share with the graph, which is traced in
        training mode; empty where both run the same."""
        if not any(training for _, training in self._modes):
            return ""
        before, self._modes = self._modes, [(m, False) for m, _ in self._modes]
        try:
            evaluated, _ = self._traced(self.graph.batch_size, like=None)
            return first_difference(self.graph, evaluated)
        except ValueError as error:
            return f"its trace in evaluation mode, which fails: {error}"
        finally:
            self._modes = before

    def with_example(self, example: Any) -> TracedModel:
        """The model traced with an example of other sizes. The attributes that it reads so are
        among the compared from now on."""
        with self._in_first_modes():
            other = TracedModel(
                self.model, example, self._loss_fn, self._precision, like=self.graph
            )
        self.attributes.add(other.graph)
        return other

    def at(self, rows: int) -> tuple[Graph, sharding.FactorTable]:
        """The graph and the factors of its tensors' dims at so many rows, cut into blocks alike."""
        if rows == self.graph.batch_size:
            return self.graph, self.factors
        return self._traced(rows, like=self.graph)

    def in_microbatches(self, rows: int, batch: int) -> tuple[Graph, sharding.FactorTable]:
        """The graph and factors at so many rows, a micro-batch of a batch, whose loss is its share
        of the batch's. Raises ValueError where that can't be told."""
        graph, factors = self.at(rows)
        if rows < batch and self.use.numbers:
            graph = sharding.with_numbers_of(graph, self.at(batch)[0])
        return graph, factors

    @seldom_collected()
    def _traced(self, rows: int, *, like: Graph | None) -> tuple[Graph, sharding.FactorTable]:
        _said(0, "running it on shapes")
        with same_random_state(), self._in_first_modes():
            traced = trace(
                self.model,
                self.example,
                loss_fn=self._loss_fn,
                batch_size=rows,
                precision=self._precision,
            )
        graph = verified(traced)
        _said(1, "which dims belong together")
        factors = sharding.analyse(graph)
        _said(2, "cutting it into blocks")
        return cut_blocks(graph, factors, like), factors

    @contextmanager
    def _in_first_modes(self) -> Iterator[None]:
        """Context in which the model's modules train or evaluate as when they were first traced."""
        now = [(m, m.training) for m in self.model.modules()]
        try:
            for m, training in self._modes:
                m.training = training
            yield
        finally:
            for m, training in now:
                m.training = training


def _said(done: int, what: str) -> None:
    """Tell who watches which of the `PARTS` of a trace begins."""
    progress.debug("tracing the model: %s", what, extra={"share": done / PARTS})


def _check_parameters(model: nn.Module) -> None:
    """Raise `MeshwrightError` for parameters that can't be laid out, reduced or trained."""
    check_not_quantized(model)
    for name, p in model.named_parameters():
        place = f"model: parameter {name!r}"
        if hasattr(p, "device_mesh"):
            raise MeshwrightError(
                " is a DTensor: the model was parallelized before",
                place=place,
                legal="plain parameters",
                way_out="go on with the result's replan(), or give a model of plain parameters",
            )
        if is_lazy(p):
            raise MeshwrightError(
                " has no shape before the first forward",
                place=place,
                legal="parameters of known shapes",
                way_out="run the model on a batch once, or give the layer its sizes",
            )
        kind = unusual_kind(p) or ("complex" if p.is_complex() and p.requires_grad else None)
        if kind:
            raise MeshwrightError(
                f" is {kind}",
                place=place,
                legal="dense parameters of real numbers, whose gradients ranks reduce in float32",
                way_out="keep a sparse one as a buffer, a complex one as torch.view_as_real of it, "
                "and freeze one that isn't trained",
            )


# --- quantized weights: packed into fewer bits by other libraries ---------------------------------

PACKERS = ("bitsandbytes", "torchao", "hqq", "optimum", "quanto", "gptqmodel", "awq")
PACKED_CLASSES = ("Params4bit", "Int8Params")  # of bitsandbytes, and of what stands for it


def check_not_quantized(model: nn.Module) -> None:
    """Raise `MeshwrightError` for a model with packed weights (QLoRA), by the classes of parameters
    and what transformers notes on the model: no such library has to be there."""
    for name, p in model.named_parameters():
        kind = type(p)
        package = kind.__module__.partition(".")[0]
        if package in PACKERS or kind.__name__ in PACKED_CLASSES or hasattr(p, "quant_state"):
            raise _quantized(f"model: parameter {name!r}", f"{kind.__name__} of {package}")
    for name, module in model.named_modules():
        method = getattr(module, "quantization_method", None)
        if method is not None and getattr(module, "is_quantized", True):
            where = f"model: module {name!r}" if name else "model"
            raise _quantized(where, str(getattr(method, "value", method)))


def _quantized(place: str, how: str) -> MeshwrightError:
    return MeshwrightError(
        f" is quantized ({how}), as for QLoRA: the values are packed, so that no rank can take a "
        "part of them, and what they take and cost is not known",
        place=place,
        legal="weights in float32, bfloat16 or float16",
        way_out="load the base model in bfloat16 without quantization_config, and train LoRA on "
        "it: tp, pp and ZeRO-3 divide the frozen weights",
    )


# --- modes of training ----------------------------------------------------------------------------

# how a tensor lies in memory may depend on the mode by way of the kernels that are chosen
MEMORY = frozenset({"contiguous", "clone", "alias"})
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
UNSET = (None, False)  # what an export leaves out

_Line = tuple[str, Any, Any]  # an operator's target, args and kwargs, values by number


def first_difference(trained: Graph, evaluated: Graph) -> str:
    """The first operator of the loss that one mode runs and the other does not, with its place;
    empty where both modes run the same. Dropouts and running statistics follow the mode in which a
    plan runs: they don't count."""
    for line, other in zip_longest(_lines(trained), _lines(evaluated)):
        if line is None or other is None or line[1] != other[1]:
            op, _ = line or other
            at = f" at {op.source}" if op.source else ""
            mode = "training" if line else "evaluation"
            return f"{op.key} ({op.target}){at} in {mode} mode"
    return ""


def _lines(graph: Graph) -> Iterator[tuple[Op, _Line]]:
    """The operators behind the loss, without dropouts, in a form that compares."""
    numbers: dict[str, Any] = {}
    for names in (graph.inputs, graph.parameters, graph.buffers):
        numbers |= {name: (path,) for name, path in names.items()}
    numbers |= {name: (tuple(x.shape), str(x.dtype)) for name, x in graph.constants.items()}
    ops, live, number = (*graph.derived, *graph.ops), {graph.loss}, count()
    for op in reversed(ops):
        if not live.isdisjoint(op.results):
            live.update(op.operands)
    for op in ops:
        if live.isdisjoint(op.results):
            continue
        draw = traits_of(op).draw
        dropout = draw is not None and draw.kind in ("dropout", "channel dropout")
        if dropout or op.short in MEMORY:
            numbers[op.results[0]] = numbers[op.operands[0]]
            continue
        args, kwargs = map_refs(_without_mode(op), numbers.__getitem__)
        target = op.target
        if runs_as_reshape(op):
            target, args, kwargs = "reshape", (args[0], graph.values[op.results[0]].shape), {}
        numbers |= {result: next(number) for result in op.results}
        yield op, (target, args, kwargs)


def _without_mode(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with those of the mode as in evaluation."""
    args, kwargs, traits = list(op.args), dict(op.kwargs), traits_of(op)
    if traits.statistics is not None:
        args[traits.statistics.training] = False
    if traits.draw is not None and traits.draw.kind == "attention dropout":
        kwargs = dict(zip(ATTENTION, args, strict=False)) | kwargs
        args, kwargs = [], {n: x for n, x in kwargs.items() if n != "dropout_p" and x not in UNSET}
    return tuple(args), kwargs
