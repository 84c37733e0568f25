"""Trace of a model to a Graph by `torch.export`; with `convert.py` the one adapter to torch's
tracing internals.

A copy of the model is traced whose tensors are fake (shapes on the CPU, no memory), in the
train/eval mode the user set. The graph is ATen before decomposition (`linear`, `layer_norm`,
`scaled_dot_product_attention` stay whole) and ends in the scalar loss.

In half precision parameters are in the compute dtype, inputs and buffers keep theirs, and the trace
runs under `torch.autocast`: where dtypes meet, it casts by operator, and its casts are operators of
the graph.
"""

from __future__ import annotations

import copy
import inspect
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.planner.batch import split_batch
from meshwright.planner.errors import (
    KeptTensors,
    ModelError,
    TraceError,
    Untraceable,
    enclosing_modules,
)
from meshwright.planner.garbage import seldom_collected
from meshwright.planner.tracing import context, user_module
from meshwright.planner.tracing.convert import convert
from meshwright.planner.tracing.fake_batch import FakeBatch, check_call
from meshwright.planner.tracing.leaves import LeafRecorder, check_backwards
from meshwright.planner.tracing.loss import LossModule
from meshwright.planner.tracing.similar import Irregular, StandIns
from meshwright.planner.tracing.transformers import adapted
from meshwright.planner.tracing.values import mixed_operands
from meshwright.profiles.inputs import ArgumentError

log = logging.getLogger(__name__)

SYMBOLIC = "traced by torch.fx.symbolic_trace, not torch.export alone"
COURSE = (
    "the forward asks for values of the batch (sizes in a tensor, flags), and is traced as the "
    "example has them: a batch with others is traced for itself"
)


@seldom_collected()
def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    repeats: bool = True,
    by_index: bool = False,
) -> Graph:
    """Trace forward and loss for one micro-batch of `batch_size` rows (default: the example's).

    With `repeats`, three of the layers that are built alike are traced for all of them, where that
    gives the graph of a full trace up to the names of values. Modules that can't be traced are kept
    as leaves. Where a forward can't be traced without values, it is with those of the example, and
    what it asked for is `known`; a mask that takes all selects nothing then, unless `by_index`.
    Raises `ValueError` for a batch that does not fit, and `TraceError` with the user's source line
    where neither `torch.export` nor `torch.fx.symbolic_trace` can follow the model.
    """
    if precision not in PRECISIONS:
        raise ArgumentError.refused("precision", precision, legal=PRECISIONS)
    dtype = PRECISIONS[precision].dtype
    _check_loss(loss_fn)
    FakeBatch.of(example_inputs, dtype, batch_size)
    check_call(model, example_inputs, loss_fn)
    user_module.check_hooks(model)
    before = user_module.Outside(model, loss_fn).values()
    fix: frozenset[str] = frozenset()  # numbers that can't be carried
    carried: frozenset[user_module.Key] = frozenset()
    without_values: TraceError | None = None
    fallback: Graph | None = None  # of code that caught that there were no values
    while True:
        batch = FakeBatch.of(example_inputs, dtype, batch_size, fix)
        if without_values is not None:
            batch = batch.with_values(example_inputs, by_index=by_index)
        tracer = _Tracer(model=model, loss_fn=loss_fn, dtype=dtype, batch=batch, carried=carried)
        try:
            graph = tracer.with_leaves(repeats)
        except KeptTensors as error:
            carried |= error.attributes
        except TraceError as error:
            if batch.numbers:
                fix |= batch.asked or batch.numbers.keys()
            elif fallback is not None:
                return _finished(fallback, model, loss_fn, before)
            elif without_values is None:
                without_values, fix = error, frozenset()
            else:
                asks = isinstance(error.__cause__, context.OF_VALUES)
                shown = without_values if asks else error
                raise shown from shown.__cause__
        else:
            if batch.asked:  # the model's code caught what was raised
                fix |= batch.asked
            elif tracer.questions and without_values is None:
                fallback, without_values, fix = graph, TraceError("no values"), frozenset()
            else:
                return _finished(graph, model, loss_fn, before)


def _check_loss(loss_fn: Callable[..., Any] | None) -> None:
    """Raise `MeshwrightError` for a loss that would be trained itself."""
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ModelError(
            " has parameters of its own",
            place="loss_fn",
            legal="a function, or a module without parameters",
            way_out="make it a part of the model, which then returns the loss",
        )


def _finished(
    graph: Graph, model: nn.Module, loss_fn: Callable[..., Any] | None, before: Mapping[str, Any]
) -> Graph:
    """The graph with what its forward reads outside of the model, but for what it changes there
    (since it was as `before`). Raises TraceError where that is a number."""
    outside = user_module.Outside(model, loss_fn, graph)
    written, now = sorted(outside.changed(before, tensors=False)), outside.values()
    for name in written:
        if user_module.is_counter(before[name], now[name]):
            raise TraceError(
                f"the forward changes {name}, which is outside of the model: a plan has its value "
                "when it was traced. Make it a buffer (register_buffer), or an entry of the batch"
            )
    reads = [(user_module.OUTSIDE, name) for name in outside.finds if name not in written]
    found = replace(graph, notes=(*graph.notes, *outside.notes), reads=(*graph.reads, *reads))
    return _as_stored(found, model)


def _as_stored(graph: Graph, model: nn.Module) -> Graph:
    """The graph with the model's dtypes of frozen parameters: no copy of them is made that an
    optimizer would step."""
    values = dict(graph.values)
    for value, fqn in graph.parameters.items():
        meta, dtype = values[value], model.get_parameter(fqn).dtype
        if not meta.requires_grad and dtype != meta.dtype:
            values[value] = replace(meta, stored=dtype)
    return replace(graph, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tracer:
    """Trace of one model. Of an attempt, `groups` are the similar layers of which only some are
    traced, and `leaves` the modules, by FQN, that are one node because they can't be traced, each
    with the reason. `carried` are attributes whose tensors are carried like buffers; `questions`
    are the lines that asked for a value that the trace didn't have."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    dtype: torch.dtype
    batch: FakeBatch
    carried: frozenset[user_module.Key]
    questions: set[str] = field(default_factory=set)

    def with_leaves(self, repeats: bool) -> Graph:
        """The graph, modules that can't be traced kept as leaves. Raises `TraceError`, and
        `KeptTensors` where more is to be carried."""
        leaves: dict[str, str] = {}
        first: Untraceable | None = None
        while True:
            try:
                return (self.short_graph(leaves) if repeats else None) or self.graph((), leaves)
            except Untraceable as error:
                first = first or error
                leaves = _more_leaves(self.model, leaves, error)
                if leaves and not self.batch.asked:
                    continue
                if first is error:
                    raise
                message = f"{first}\nAs one node of the graph it won't do either: {error}"
                raise TraceError(message) from first.__cause__  # the user's own, if it is one

    def graph(
        self, groups: Sequence[user_module.SimilarLayers], leaves: Mapping[str, str]
    ) -> Graph:
        """The graph by `torch.export`. Raises `TraceError`, `Irregular` where `groups` do not prove
        to be similar, and `KeptTensors`."""
        program, module, notes = self._export(
            partial(self._loss_module, groups, leaves), full=not groups
        )
        graph = convert(
            program,
            module,
            loss_fn=self.loss_fn,
            autocast=self.dtype != torch.float32,
            notes=(*notes, *module.leaf_recorder.notes(), *((COURSE,) if module.known else ())),
        )
        check_backwards(graph)
        return graph

    def short_graph(self, leaves: Mapping[str, str]) -> Graph | None:
        """The graph by way of similar layers; None where only a full trace can tell."""
        apart: Sequence[str] = ()
        try:
            while groups := user_module.find_similar_layers(self.model, apart):
                try:
                    return self.graph(groups, leaves)
                except Irregular as error:
                    if apart or not error.apart:
                        raise
                    apart = error.apart
            return None
        except Exception:  # a full trace is the judge of whatever went wrong, and gives the message
            log.debug("traced in full", exc_info=True)
            return None

    def _export(
        self, make: Callable[[], LossModule], *, full: bool
    ) -> tuple[torch.export.ExportedProgram, LossModule, tuple[str, ...]]:
        """The exported loss, its module (a new one of `make`), and notes. A `full` trace, the last
        attempt, goes by `torch.fx.symbolic_trace` where export alone fails; the `TraceError` of the
        first way is raised."""
        first: TraceError | None = None
        for symbolic in (False, True) if full else (False,):
            module = make()
            self.questions.clear()
            if symbolic and module.leaf_recorder.classes:
                break  # it would look into leaves
            try:
                with self._tracing(module):
                    if symbolic:
                        module.model = _symbolic(module)
                    with _use_lazy_graph_module(True):  # most graphs of an export never run
                        program = torch.export.export(module, module.batch.tensors, strict=False)
                    module.stand_ins.check()
                if module.watch.changed - module.watch.written_first:
                    self._check_second_forward(make())
            except (TraceError, Irregular, KeptTensors) as error:
                chosen = first if symbolic and first else error
                raise chosen from chosen.__cause__
            except Exception as error:  # whatever export raises, another strategy may work
                log.debug("tracing failed", exc_info=True)
                first = first or _failure(error, module)
            else:
                module.leaf_recorder.restore()
                mixed_at = mixed_operands(program, autocast=self.dtype != torch.float32)
                if mixed_at is None:
                    return program, module, (SYMBOLIC,) if symbolic else ()
                first = first or TraceError(
                    f"the model can't run in this precision: at {mixed_at}; cast with "
                    ".to(weight.dtype), or choose precision='fp32'"
                )
        assert first is not None
        raise first

    @contextmanager
    def _tracing(self, module: LossModule) -> Iterator[None]:
        """Context in which a forward is recorded as it is written."""
        half = self.dtype != torch.float32
        with (
            context.quiet(),
            context.emptied_caches(module.model, module.loss_fn),
            torch.enable_grad(),
            adapted(module.model),
            context.recorded_gradients(),
            context.recorded_inference_mode(),
            context.refused_draws(),
            context.refused_gradients(),
            # arguments are validated only where asked to: a trace has no values
            mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
            context.DataAccess(),
            context.noted_questions(self.questions),
            self.batch.known or nullcontext(),
            torch.autocast("cpu", dtype=self.dtype) if half else nullcontext(),
        ):
            yield

    def _check_second_forward(self, module: LossModule) -> None:
        """Raise `TraceError` where a forward leaves something that changes the next one,
        `KeptTensors` where that can be carried."""
        tensors, mode = module.batch.tensors, module.batch.mode
        with self._tracing(module), mock.patch.object(mode, "allow_non_fake_inputs", True), mode:
            known = (*tensors, *module.parameters())
            _compare_forwards(lambda: module.once(*tensors), module.watch, known)
            module.stand_ins.check()

    # --- the copy that is traced ---

    def _loss_module(
        self, groups: Sequence[user_module.SimilarLayers], leaves: Mapping[str, str]
    ) -> LossModule:
        """A copy of model and loss in fake tensors, ready to be exported once."""
        stand_ins, loss_fn = StandIns(self.model, groups), self.loss_fn
        if isinstance(loss_fn, nn.Module):
            loss_fn = self._fake_copy(loss_fn, StandIns(loss_fn, ()))
        copied = self._fake_copy(self.model, stand_ins)
        for path, name in self.carried:
            owner = copied.get_submodule(path.removeprefix("model").removeprefix("."))
            tensor = vars(owner).pop(name)
            owner.register_buffer(name, self._empty(tensor, tensor.dtype), persistent=False)
        recorder = LeafRecorder(self.model, leaves, self.batch.scale)
        recorder.instrument(copied, tuple(stand_ins.blank))
        stand_ins.instrument(copied)
        return LossModule(copied, loss_fn, self.batch, stand_ins, recorder)

    def _fake_copy(self, model: nn.Module, stand_ins: StandIns) -> Any:
        """A deep copy with fake tensors and `stand_ins`. Floating parameters are in the compute
        dtype, but for those of modules with running statistics; buffers keep theirs. Raises
        `TraceError` for a module that can't be copied."""
        memo = stand_ins.memo()
        spared = {*stand_ins.originals.values()}
        modules = [m for _, m in model.named_modules(memo=spared)]
        keep_dtype = {
            id(p)
            for module in modules
            if getattr(module, "running_mean", None) is not None
            for p in module.parameters(recurse=False)
        }
        for module in modules:  # tensors that are no state: constants, which a trace may write to
            plain = [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
            memo |= {id(t): t.detach().clone() for t in plain}
        for p in (p for module in modules for p in module.parameters(recurse=False)):
            cast = p.is_floating_point() and id(p) not in keep_dtype
            tensor = self._empty(p, self.dtype if cast else p.dtype)
            memo[id(p)] = nn.Parameter(tensor, requires_grad=p.requires_grad)
        for b in (b for module in modules for b in module.buffers(recurse=False)):
            memo[id(b)] = self._empty(b, b.dtype)
        try:
            return copy.deepcopy(model, memo)
        except (TypeError, RuntimeError) as error:
            raise TraceError(
                f"{type(model).__name__} can't be copied ({error}); keep locks, files, process "
                "groups and tensors with a history out of the model's attributes"
            ) from error

    def _empty(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self.batch.mode:
            return torch.empty(like.shape, dtype=dtype)


def _failure(error: Exception, module: LossModule) -> Untraceable:
    reason = f"{user_module.user_frame(traceback.extract_tb(error.__traceback__))} can't be traced"
    modules = enclosing_modules(_running_module(error, module.model))
    message = context.explain(error)
    if module.batch.scale != 1:
        message += (
            f" (It was traced for a micro-batch of {module.batch.rows} rows, not as many as "
            "example_inputs have: buffers and attributes must not have the rows of a batch.)"
        )
    failure = Untraceable(message, modules=modules, reason=reason)
    failure.__cause__ = error
    return failure


def _symbolic(module: LossModule) -> fx.GraphModule:
    """The model as `torch.fx.symbolic_trace` sees it, less what its output does not need."""
    args, kwargs, _ = split_batch(module.batch.filled(module.batch.tensors), module.loss_fn)
    signature = inspect.signature(module.model.forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    fixed = {
        name: value
        for name, value in bound.arguments.items()
        if value is None or type(value) in (bool, int, float, str)
    }
    before, drawn = user_module.Held(module.watch.holders), torch.get_rng_state()
    state = (module.model.named_parameters, module.model.named_buffers)
    attributes = {name for named in state for name, _ in named(remove_duplicate=False)}
    with module.watch.recording(), context.generators_untouched():
        traced = fx.symbolic_trace(module.model, concrete_args=fixed or None)
    changed = before.changed(user_module.Held(module.watch.holders)) - module.watch.written_first
    if changed or not torch.equal(drawn, torch.get_rng_state()):
        raise TraceError("a forward with state, or random draws, that a symbolic trace would fix")
    traced.graph.eliminate_dead_code()
    made = [n for n in traced.graph.find_nodes(op="get_attr") if n.target not in attributes]
    if made:
        raise TraceError("a tensor made in the forward that a symbolic trace would fix")
    traced.recompile()
    generated = traced.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # generated code renames arguments
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return generated(*bound.args, **bound.kwargs)

    traced.forward = forward
    return traced


# --- modules that can't be traced ----------------------------------------------------------------
#
# The innermost module around the failing line becomes a leaf, with all that are built like it, and
# the trace starts again; where a leaf won't do, the module around it is the next to try. The model
# itself is none: nothing would be left to plan.


def _running_module(error: BaseException, model: nn.Module) -> str:
    """FQN in `model` of the innermost module whose method was running when `error` was raised."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    fqn = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in ("self", "proxy"):
            holder = frame.f_locals.get(name)
            if isinstance(holder, nn.Module):  # or a proxy of it, with the same attributes
                fqn = names.get(id(vars(holder)), fqn)
    return fqn


def _more_leaves(model: nn.Module, leaves: Mapping[str, str], error: Untraceable) -> dict[str, str]:
    """FQN -> reason of the modules to keep as leaves next; none where nothing is left to try."""
    modules = dict(model.named_modules())
    for fqn in error.modules:
        module = modules.get(fqn)
        if fqn in leaves or module is None or "forward" in vars(module):
            continue
        cls = type(module)
        if cls.forward is nn.Module.forward:  # a container, which is never called
            continue
        parts = user_module.describe(module)[0]
        alike = [
            name
            for name, m in modules.items()
            if name and (m is module or (type(m) is cls and user_module.describe(m)[0] == parts))
        ]
        inside = tuple(f"{name}." for name in alike)
        outer = {name: why for name, why in leaves.items() if not name.startswith(inside)}
        return outer | dict.fromkeys(alike, error.reason)
    return {}


# --- second forward -------------------------------------------------------------------------------
#
# A trace is one forward, and every step runs it again from the same attributes: right for a mask
# that is made once, wrong for counters, for flags of a first call, and for tensors of one step that
# the next one reads. A tensor attribute that every forward replaces by one of its shape is carried
# from step to step as a buffer; the rest is refused with its line.
#
# Calls are compared that depend on inputs, parameters or random draws; those that do not (a mask)
# may be made once or always.


WAYS_OUT = (
    "A plan is one forward, run at every step. Ways out: keep tensors by register_buffer, which "
    "every forward may write; count, and set attributes, between steps; pass what differs from "
    "step to step in the batch"
)


class _Calls(TorchDispatchMode):
    """The calls of one forward that depend on the tensors `known`, and the first use of each of
    the tensors with the ids `watched`."""

    def __init__(self, known: Iterable[torch.Tensor], watched: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = [*known]  # ids are compared: none is used again
        self.known = {id(x) for x in self.alive}
        self.watched = watched
        self.used: dict[int, str] = {}
        self.calls: list[tuple[Any, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        operands = [x for x in leaves if isinstance(x, torch.Tensor)]
        results = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        self.alive += results
        for x in operands:
            if id(x) in self.watched:
                self.used.setdefault(id(x), user_module.calling_place())
        if func.namespace == "prim":  # questions about a tensor
            return output
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or any(id(x) in self.known for x in operands):
            self.known.update(map(id, results))
            shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
            self.calls.append(((str(func), shapes), user_module.calling_place()))
        return output


def _compare_forwards(
    forward: Callable[[], Any], watch: user_module.Watch, known: Sequence[torch.Tensor]
) -> None:
    """Raise KeptTensors for tensor attributes to carry like buffers from one `forward` to the next,
    whose inputs and parameters are `known`, and TraceError where a second forward would not do what
    the first did."""
    start = user_module.Held(watch.holders)
    with _Calls(known) as first:
        forward()
    after = user_module.Held(watch.holders)
    changed = start.changed(after)
    tensors = {id(x): (key, x) for key in changed for x in after.tensors.get(key, [])}
    with _Calls(known, tensors) as second:
        forward()
    again = user_module.Held(watch.holders)
    carried: set[user_module.Key] = set()
    for number, place in second.used.items():
        key, tensor = tensors[number]
        if number not in first.known:
            continue  # the same in every forward
        if tensor.requires_grad:
            raise _refusal(watch, key, f", read at {place}, carries a gradient: detach() it")
        if start.values.get(key) != after.values[key] or after.values[key][:1] != ("tensor",):
            raise _refusal(watch, key, f", read at {place}, is read by the next one")
        carried.add(key)
    if carried:
        raise KeptTensors(frozenset(carried))
    for key in changed | after.changed(again):
        if key not in watch.written_first and after.values.get(key) != again.values.get(key):
            raise _refusal(watch, key, " would be another after the next one")
    for call, other in zip_longest(first.calls, second.calls, fillvalue=(None, "")):
        if call[0] != other[0]:
            key = min(changed)
            raise TraceError(
                f"at {watch.place(key)} the forward changes the attribute {'.'.join(key)!r}, and "
                f"at {call[1] or other[1]} a second forward takes another course. {WAYS_OUT}"
            )


def _refusal(watch: user_module.Watch, key: user_module.Key, why: str) -> TraceError:
    return TraceError(
        f"at {watch.place(key)} the forward leaves something in the attribute "
        f"{'.'.join(key)!r} which{why}. {WAYS_OUT}"
    )
