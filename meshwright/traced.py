"""TracedModel: the user's model with its loss as a graph, at any number of rows."""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial, reduce
from itertools import count, zip_longest
from operator import length_hint
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Graph, Op, map_refs
from meshwright.costmodel.rules import runs_as_reshape, traits_of
from meshwright.costmodel.user_rules import verified
from meshwright.executor.errors import StateError
from meshwright.executor.ranks import same_random_state
from meshwright.executor.stages import REFUSES_CALLS
from meshwright.planner.batch import batch_rows, unusual_kind
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.errors import ModelError
from meshwright.planner.garbage import seldom_collected
from meshwright.planner.tracing import CALL_HOOKS, OUTSIDE, TENSOR_HOOKS, Outside, held, trace
from meshwright.planner.tracing.transformers import check_positions
from meshwright.profiles.inputs import MeshwrightError

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
        by_index: bool = False,
    ) -> None:
        """The model is cut into blocks as in the graph `like`, where there is one; `by_index` as
        for `trace`."""
        self._by_index = by_index
        self.example, self._loss_fn, self._precision = example, loss_fn, precision
        self.model = model
        _check_parameters(model)
        self.check_batch(example)
        started = time.process_time()
        # at least two rows: a batch of one would look like no batch at all
        self._modes = [(m, m.training) for m in model.modules()]
        self.graph, self.factors = self._traced(max(2, batch_rows(example)), like=like)
        self._at: dict[int, tuple[Graph, sharding.FactorTable]] = {}  # traces at other rows
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
        """Use of rows by a step: as `use`, but smaller batches are not filled up where the number
        of rows is in it, as its trace at other rows tells."""
        use = self.use
        if not use.filling:
            return use
        try:
            same = sharding.same_numbers(self.graph, self.at(2 * self.graph.batch_size)[0])
        except ValueError:  # it can't be traced there
            same = not use.numbers
        return use if same else replace(use, filling=None)

    @cached_property
    def why_not_evaluated(self) -> str:
        """The first operator that an evaluation does not share with the graph, which is traced in
        training mode; empty where both run the same."""
        if not any(training for _, training in self._modes):
            return _writes(self.graph)
        before, self._modes = self._modes, [(m, False) for m, _ in self._modes]
        try:
            evaluated, _ = self._traced(self.graph.batch_size, like=None)
            return first_difference(self.graph, evaluated) or _writes(evaluated)
        except ValueError as error:
            return f"its trace in evaluation mode, which fails: {error}"
        finally:
            self._modes = before

    def with_example(self, example: Any, *, by_index: bool = False) -> TracedModel:
        """The model traced with an example of other sizes. The attributes that it reads so are
        among the compared from now on."""
        with self._in_first_modes():
            other = TracedModel(
                self.model,
                example,
                self._loss_fn,
                self._precision,
                like=self.graph,
                by_index=by_index,
            )
        self.attributes.add(other.graph)
        return other

    def at(self, rows: int) -> tuple[Graph, sharding.FactorTable]:
        """The graph and the factors of its tensors' dims at so many rows, cut into blocks alike."""
        if rows == self.graph.batch_size:
            return self.graph, self.factors
        if rows not in self._at:
            self._at[rows] = self._traced(rows, like=self.graph)
        return self._at[rows]

    def in_microbatches(self, rows: int, batch: int) -> tuple[Graph, sharding.FactorTable]:
        """The graph and factors at so many rows, a micro-batch of a batch, whose loss is its share
        of the batch's. Raises ValueError where that can't be told."""
        graph, factors = self.at(rows)
        if rows == batch or self.use.meetings:  # which are in each micro-batch by itself
            return graph, factors
        try:
            whole, _ = self.at(batch)
        except ValueError:
            if self.use.numbers:
                raise
            return graph, factors  # it has its rows in it, and no number beside them is known
        return sharding.with_numbers_of(graph, whole), factors

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
                by_index=self._by_index,
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
            raise ModelError(
                " is a DTensor: the model was parallelized before",
                place=place,
                legal="plain parameters",
                way_out="go on with the result's replan(), or give a model of plain parameters",
            )
        if is_lazy(p):
            raise ModelError(
                " has no shape before the first forward",
                place=place,
                legal="parameters of known shapes",
                way_out="run the model on a batch once, or give the layer its sizes",
            )
        kind = unusual_kind(p) or ("complex" if p.is_complex() and p.requires_grad else None)
        if kind:
            raise ModelError(
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
    return ModelError(
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


def _writes(graph: Graph) -> str:
    """The first write of an evaluation's forward to its own weights, which an evaluation leaves
    out."""
    writes = [f"{op.target} on a parameter at {op.source}" for op in graph.weight_writes]
    return writes[0] if writes else ""


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


# --- state that is unchanged ----------------------------------------------------------------------

# Checks that a model is as it was planned: attributes that its forward read, modules, hooks.


_CONTAINERS = (list, tuple, dict, set, frozenset)
_MISSING = object()
_DEPTH = 3  # of objects and containers in each other


class Attributes:
    """Values of the attributes that a graph has read. Modules are not kept alive: of those that
    were freed nothing is compared. Of objects the identity is, and of tensors the version too."""

    def __init__(self, model: nn.Module, loss_fn: Any, graph: Graph) -> None:
        self._roots = {"model": model, "loss_fn": loss_fn}
        self._seen: set[tuple[str, str]] = set()
        self._known: list[tuple[str, Callable[[], Any], list[tuple[str, Any]]]] = []
        self._outside = Outside(model, loss_fn, graph)
        self._outside_then: dict[str, Any] = {}
        self.add(graph)

    def add(self, graph: Graph) -> None:
        """Compare the attributes that another graph of the model has read, too."""
        names = defaultdict[str, list[str]](list)
        for path, name in graph.reads:
            if (path, name) not in self._seen:
                names[path].append(name)
        self._seen.update(graph.reads)
        named, now = set(names.pop(OUTSIDE, ())), self._outside.values()
        self._outside_then |= {name: x for name, x in now.items() if name in named}
        for path, of_holder in names.items():
            find = _finder(self._roots, path)
            holder = find()
            keys = [(name, _compared(getattr(holder, name, _MISSING))) for name in of_holder]
            self._known.append((path, find, keys))

    def check(self, *, training: bool) -> None:
        """Raise ValueError for an attribute with another value; modes matter to `training` only."""
        for path, find, known in self._known:
            holder = find()
            if holder is None:
                continue
            for name, before in known:
                now = getattr(holder, name, _MISSING)
                same = now is before or _compared(now) == before
                if not same and (name != "training" or training):
                    raise StateError(_message(path, name, before, now))
        for name in sorted(self._outside.changed(self._outside_then)):
            raise StateError(f"{name} was changed since the model was planned: {_WAYS_OUT}")


def _finder(roots: Mapping[str, Any], path: str) -> Callable[[], Any]:
    """The function that finds the holder at a path: a module, or an object below it; None where it
    was freed."""
    root, *names = path.split(".")
    holder = roots[root]
    while names and isinstance(holder, nn.Module) and names[0] in holder._modules:
        holder = holder._modules[names.pop(0)]
    root_of = weakref.ref(holder) if isinstance(holder, nn.Module) else lambda: holder
    return lambda: reduce(lambda holder, name: getattr(holder, name, None), names, root_of())


def _compared(value: Any, depth: int = 0) -> Any:
    """The key by which a value is compared: plain ones by themselves, nan as nan."""
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), 0 if value.is_inference() else value._version
    if isinstance(value, dict) and depth <= _DEPTH:
        pairs = value.items()
        return type(value), [(_compared(k, depth + 1), _compared(x, depth + 1)) for k, x in pairs]
    if isinstance(value, _CONTAINERS) and depth <= _DEPTH:
        return type(value), [_compared(x, depth + 1) for x in value]
    if isinstance(value, float) and value != value:
        return "nan"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, partial):
        return id(value.func), _compared((value.args, value.keywords), depth)
    if hasattr(value, "__length_hint__"):  # an iterator
        return id(value), length_hint(value)
    whole = depth or not hasattr(value, "__dict__")  # attributes of others are read one by one
    if whole and depth <= _DEPTH and not isinstance(value, nn.Module) and not callable(value):
        return type(value), id(value), [(n, _compared(x, depth + 1)) for n, x in held(value)]
    return type(value), id(value)


_WAYS_OUT = (
    "the plan has what its forward read then. Ways out: set it back; plan again; to change it "
    "between steps, make it an entry of the batch (a number in example_inputs is an input), or a "
    "buffer (register_buffer)"
)


def _message(path: str, name: str, before: Any, now: Any) -> str:
    attribute = f"{path}.{name}"
    if name == "training":
        mode = "training" if before else "evaluation"
        return (
            f"{attribute} is {now}, but the model was planned in {mode} mode: call "
            f"{path}.train({before}) before train_step, or plan again"
        )
    if isinstance(now, (torch.Tensor, *_CONTAINERS)) or isinstance(before, tuple):
        changed = "was changed since the model was planned"
    else:
        shown = "deleted" if now is _MISSING else repr(now)
        changed = f"was {before!r} when the model was planned, and is {shown} now"
    return f"{attribute} {changed}: {_WAYS_OUT}"


# --- modules, forwards, hooks ---------------------------------------------------------------------

_PLANNED = "train_step and eval_step run what was traced"
_WAY_OUT = "remove it for them, or call auto_parallelize again"


class Calls:
    """Modules of a planned model, which are not kept alive, their forwards and hooks: a step runs
    what was traced, so others that came since are refused."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.named_modules()]
        # (FQN, the table that it is in, its name there, what was there)
        self._children = [
            (f"{path}.{name}".lstrip("."), module._modules, name, weakref.ref(child))
            for path, module in modules
            for name, child in module._modules.items()
            if child is not None
        ]
        self._parameters = [
            (f"{path}.{name}".lstrip("."), module._parameters, name)
            for path, module in modules
            for name in module._parameters
        ]
        self._forwards = [(path, vars(m), vars(m).get("forward")) for path, m in modules]
        self._of_classes = {type(m): type(m).forward for _, m in modules}
        self._hooks = [
            (path, vars(module)[kind], _numbers(vars(module)[kind]))
            for path, module in modules
            for kind in CALL_HOOKS
        ]

    def check(self) -> None:
        """Raise ValueError for a module that was replaced, and for hooks and forwards that no step
        calls."""
        for what, table, name, child in self._children:
            if table.get(name) is not child():
                raise StateError(
                    " was replaced after planning, which train_step can't see",
                    place=f"module {what!r}",
                    way_out="call auto_parallelize again",
                )
        for cls, forward in self._of_classes.items():
            if cls.forward is not forward:
                raise StateError(
                    f" has another forward than planned: {_PLANNED}",
                    place=f"class {cls.__qualname__}",
                    way_out=_WAY_OUT,
                )
        for path, attributes, forward in self._forwards:
            if attributes.get("forward") is not forward:
                raise _other(path, "another forward")
        for path, hooks, known in self._hooks:
            if (hooks or known) and _numbers(hooks) != known:
                raise _other(path, "other hooks")
        for what, table, name in self._parameters:
            p = table.get(name)
            if p is not None and any(getattr(p, hooks, None) for hooks in TENSOR_HOOKS):
                raise StateError(
                    f" has a hook, and {_PLANNED}",
                    place=f"parameter {what!r}",
                    way_out=f"{_WAY_OUT}; gradients can be changed between train_step and the "
                    "optimizer's step",
                )


def _numbers(hooks: dict[int, Any]) -> tuple[int, ...]:
    """The numbers of a table's hooks, which are unique, but for ours."""
    return tuple(n for n, hook in hooks.items() if not hasattr(hook, REFUSES_CALLS))


def _other(path: str, what: str) -> StateError:
    return StateError(
        f" has {what} than planned, and {_PLANNED}",
        place=f"module {path!r}" if path else "the model",
        way_out=_WAY_OUT,
    )
