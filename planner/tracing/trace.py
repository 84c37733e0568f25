"""Tracing a model into a Graph by `torch.export`; with `convert.py` the one adapter to torch's
tracing internals.

The user's model is never touched and no weight is materialised: a copy is traced whose tensors are
fake (shapes on the CPU, no memory), in the train/eval mode the user set, for one micro-batch of
`batch_size` rows. The graph is ATen before decomposition (`linear`, `layer_norm`,
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.costmodel.fp8 import FP8
from meshwright.costmodel.graph import Graph
from meshwright.planner.batch import split_batch
from meshwright.planner.errors import KeptTensors, TraceError, Untraceable, enclosing_modules
from meshwright.planner.garbage import seldom_collected
from meshwright.planner.tracing import context, user_module
from meshwright.planner.tracing.batch import FakeBatch, check_call
from meshwright.planner.tracing.convert import convert
from meshwright.planner.tracing.leaves import LeafRecorder
from meshwright.planner.tracing.loss import LossModule
from meshwright.planner.tracing.similar import Irregular, StandIns
from meshwright.planner.tracing.transformers import adapted
from meshwright.planner.tracing.values import mixed_operands
from meshwright.profiles.inputs import MeshwrightError

log = logging.getLogger(__name__)

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(FP8, torch.bfloat16),
}
SYMBOLIC = "traced by torch.fx.symbolic_trace, not torch.export alone"


@seldom_collected()
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
        raise MeshwrightError.refused("precision", precision, legal=DTYPES)
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise MeshwrightError(
            " has parameters of its own",
            place="loss_fn",
            legal="a function, or a module without parameters",
            way_out="make it a part of the model, which then returns the loss",
        )
    fix: frozenset[str] = frozenset()  # numbers that can't be carried
    FakeBatch.of(example_inputs, DTYPES[precision], batch_size)
    check_call(model, example_inputs, loss_fn)
    user_module.check_hooks(model)
    carried: frozenset[user_module.Key] = frozenset()
    while True:
        batch = FakeBatch.of(example_inputs, DTYPES[precision], batch_size, fix)
        tracer = _Tracer(
            model=model, loss_fn=loss_fn, dtype=DTYPES[precision], batch=batch, carried=carried
        )
        try:
            graph = tracer.with_leaves(repeats)
        except KeptTensors as kept:
            carried |= kept.attributes
        except TraceError:
            if not batch.numbers:
                raise
            fix |= batch.asked or batch.numbers.keys()
        else:
            if not batch.asked:
                return _as_stored(graph, model)
            fix |= batch.asked  # the model's code caught what was raised


def _as_stored(graph: Graph, model: nn.Module) -> Graph:
    """The graph, whose frozen parameters say what dtype they have in the model: no copy of them is
    made that an optimizer would step."""
    stored = {}
    for value, fqn in graph.parameters.items():
        meta, dtype = graph.values[value], model.get_parameter(fqn).dtype
        if not meta.requires_grad and dtype != meta.dtype:
            stored[value] = replace(meta, stored=dtype)
    return replace(graph, values={**graph.values, **stored}) if stored else graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tracer:
    """The trace of one model: what all attempts at it have in common.

    Of an attempt, `groups` are the similar layers of which only some are traced, and `leaves` the
    modules, by FQN, that are one node because they can't be traced, each with the reason.
    `carried` are attributes whose tensors are carried like buffers.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    dtype: torch.dtype
    batch: FakeBatch
    carried: frozenset[user_module.Key]

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
                if not leaves or self.batch.asked:
                    whole: TraceError = first
                    if first is not error:
                        message = "As one node of the graph it won't do either"
                        whole = TraceError(f"{first}\n{message}: {error}")
                    raise whole from first.__cause__  # the user's own, if it is one

    def graph(
        self, groups: Sequence[user_module.SimilarLayers], leaves: Mapping[str, str]
    ) -> Graph:
        """The graph by `torch.export`. Raises `TraceError`, `Irregular` where `groups` do not prove
        to be similar, and `KeptTensors`."""

        def make() -> LossModule:
            return self._loss_module(groups, leaves)

        program, module, notes = _export(make, self.dtype, full=not groups)
        return convert(
            program,
            module,
            loss_fn=self.loss_fn,
            autocast=self.dtype != torch.float32,
            notes=(*notes, *module.leaf_recorder.notes()),
        )

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

    def _loss_module(
        self, groups: Sequence[user_module.SimilarLayers], leaves: Mapping[str, str]
    ) -> LossModule:
        """A copy of model and loss in fake tensors, ready to be exported once."""

        def empty_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            with self.batch.mode:
                return torch.empty(t.shape, dtype=dtype)

        def fake(module: Any, replaced: Mapping[int, Any]) -> Any:
            return _fake_copy(module, self.dtype, empty_like, replaced)

        stand_ins = StandIns(self.model, groups)
        loss_fn = fake(self.loss_fn, {}) if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        copied = fake(self.model, stand_ins.memo())
        for path, name in self.carried:
            owner = copied.get_submodule(path.removeprefix("model").removeprefix("."))
            tensor = vars(owner).pop(name)
            owner.register_buffer(name, empty_like(tensor, tensor.dtype), persistent=False)
        recorder = LeafRecorder(self.model, leaves, self.batch.scale)
        recorder.instrument(copied, tuple(stand_ins.blank))
        stand_ins.instrument(copied)
        return LossModule(copied, loss_fn, self.batch, stand_ins, recorder)


def _export(
    make: Callable[[], LossModule], dtype: torch.dtype, *, full: bool
) -> tuple[torch.export.ExportedProgram, LossModule, tuple[str, ...]]:
    """The loss exported in a compute dtype, its module (a new one of `make`), and notes on how.

    A `full` trace, the last attempt, goes by `torch.fx.symbolic_trace` where export alone fails.
    Raises the `TraceError` of the first way where none works.
    """
    first: TraceError | None = None
    for symbolic in (False, True) if full else (False,):
        module = make()
        if symbolic and module.leaf_recorder.classes:
            break  # it would look into leaves
        try:
            with _tracing(module, dtype):
                if symbolic:
                    module.model = _symbolic(module)
                with _use_lazy_graph_module(True):  # most graphs of an export never run
                    program = torch.export.export(module, module.batch.tensors, strict=False)
                module.stand_ins.check()
            if module.watch.left - module.watch.written_first:
                _check_second_forward(module, make, dtype)
        except (TraceError, Irregular, KeptTensors) as error:
            chosen = first if symbolic and first else error
            raise chosen from chosen.__cause__
        except Exception as error:  # whatever export raises, another strategy may work
            log.debug("tracing failed", exc_info=True)
            first = first or _failure(error, module)
        else:
            module.leaf_recorder.restore()
            mixed_at = mixed_operands(program, autocast=dtype != torch.float32)
            if mixed_at is None:
                return program, module, (SYMBOLIC,) if symbolic else ()
            first = first or TraceError(
                f"the model can't run in this precision: at {mixed_at}; cast with "
                ".to(weight.dtype), or choose precision='fp32'"
            )
    assert first is not None
    raise first


@contextmanager
def _tracing(module: LossModule, dtype: torch.dtype) -> Iterator[None]:
    """Context in which a forward is recorded as it is written."""
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
        nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype),
    ):
        yield


def _check_second_forward(
    module: LossModule, make: Callable[[], LossModule], dtype: torch.dtype
) -> None:
    """Raise `TraceError` where the forward of the exported `module` leaves something that changes
    the next one, `KeptTensors` where that can be carried."""
    again = make()
    tensors, mode = again.batch.tensors, again.batch.mode
    with _tracing(again, dtype), mock.patch.object(mode, "allow_non_fake_inputs", True), mode:
        known = (*tensors, *again.parameters())
        carried = kept_tensors(lambda: again.once(*tensors), again.watch, known)
        again.stand_ins.check()
    if carried:
        raise KeptTensors(carried)


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
    held, drawn = user_module.Held(module.watch.holders), torch.get_rng_state()
    with module.watch.recording(), context.generators_untouched():
        traced = fx.symbolic_trace(module.model, concrete_args=fixed or None)
    changed = held.changed(user_module.Held(module.watch.holders)) - module.watch.written_first
    if changed or not torch.equal(drawn, torch.get_rng_state()):
        raise TraceError("a forward with state, or random draws, that a symbolic trace would fix")
    traced.graph.eliminate_dead_code()
    traced.recompile()
    generated = traced.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # generated code renames arguments
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return generated(*bound.args, **bound.kwargs)

    traced.forward = forward
    return traced


# --- the copy that is traced ---------------------------------------------------------------------


def _fake_copy(
    model: nn.Module,
    dtype: torch.dtype,
    like: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    replaced: Mapping[int, Any],
) -> Any:
    """A deep copy, sharing no tensor, whose parameters and buffers are made by `like`.

    Floating parameters are made in `dtype`, but for those of modules with running statistics;
    buffers keep theirs. `replaced` maps ids of modules and tensors to what takes their place.
    Raises `TraceError` for a module that can't be copied.
    """
    memo: dict[int, Any] = dict(replaced)
    modules = list(_modules(model, replaced))
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
        new = like(p, dtype if cast else p.dtype)
        memo[id(p)] = nn.Parameter(new, requires_grad=p.requires_grad)
    for b in (b for module in modules for b in module.buffers(recurse=False)):
        memo[id(b)] = like(b, b.dtype)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TraceError(
            f"{type(model).__name__} can't be copied ({error}); keep locks, files, process groups "
            "and tensors with a history out of the model's attributes"
        ) from error


def _modules(model: nn.Module, replaced: Mapping[int, Any]) -> Iterator[nn.Module]:
    """The modules of `model`, without those replaced and the ones below them."""
    seen = set(replaced)
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack += reversed([m for m in module._modules.values() if m is not None])


# --- modules that can't be traced ----------------------------------------------------------------
#
# The innermost module around the failing line becomes a leaf, with all that are built like it, and
# the trace starts again; where a leaf won't do, the module around it is the next to try. The model
# itself is none: nothing would be left to plan.


def _running_module(error: BaseException, model: nn.Module) -> str:
    """FQN in `model` of the innermost module whose method was running when `error` was raised."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    fqn = ""
    for frame in _frames(error.__traceback__):
        for name in ("self", "proxy"):
            holder = frame.get(name)
            if isinstance(holder, nn.Module):  # or a proxy of it, with the same attributes
                fqn = names.get(id(vars(holder)), fqn)
    return fqn


def _frames(trace: TracebackType | None) -> Iterator[Mapping[str, object]]:
    while trace is not None:
        yield trace.tb_frame.f_locals
        trace = trace.tb_next


def _more_leaves(model: nn.Module, leaves: Mapping[str, str], error: Untraceable) -> dict[str, str]:
    """FQN -> reason of the modules to keep as leaves next; none where nothing is left to try."""
    modules = dict(model.named_modules())
    for fqn in error.modules:
        if fqn in leaves or fqn not in modules or not _has_forward(modules[fqn]):
            continue
        parts = user_module.describe(modules[fqn])[0]
        like = [name for name, m in modules.items() if name and _is_like(m, modules[fqn], parts)]
        inside = tuple(f"{name}." for name in like)
        outer = {name: why for name, why in leaves.items() if not name.startswith(inside)}
        return outer | dict.fromkeys(like, error.reason)
    return {}


def _is_like(module: nn.Module, other: nn.Module, parts: list[object]) -> bool:
    return module is other or (
        type(module) is type(other) and user_module.describe(module)[0] == parts
    )


def _has_forward(module: nn.Module) -> bool:
    """Whether a call runs the forward of its class, and there is one."""
    return type(module).forward is not _ABSTRACT and "forward" not in vars(module)


_ABSTRACT = nn.Module.forward  # what containers have: they are never called


# --- second forward -------------------------------------------------------------------------------

# A forward that leaves something in its modules, run a second time on fake tensors.
#
# A trace is one forward, and every step runs it again from the same attributes. That is right
# where a second forward, which starts with what the first left, does the same: a mask that is made
# once, a tensor kept to be looked at. It is wrong for counters, for flags of a first call, and for
# tensors of one step that the next one reads. A tensor attribute that every forward replaces by
# one of its shape is carried from step to step as a buffer; the rest is refused with its line.
#
# Calls are compared that depend on inputs, parameters or random draws; those that do not (a mask)
# may be made once or always.


WAYS_OUT = (
    "A plan is one forward, run at every step. Ways out: keep tensors by register_buffer, which "
    "every forward may write; count, and set attributes, between steps; pass what differs from "
    "step to step in the batch"
)


class _Calls(TorchDispatchMode):
    """Records the calls of one forward that depend on the tensors `known`, and the first use of
    each of `kept`."""

    def __init__(self, known: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = [*known]  # ids are compared: none is used again
        self.known = {id(x) for x in self.alive}
        self.kept = {id(x) for x in kept}
        self.used: dict[int, str] = {}
        self.calls: list[tuple[Any, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        operands = [x for x in leaves if isinstance(x, torch.Tensor)]
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        self.alive += made
        for x in operands:
            if id(x) in self.kept:
                self.used.setdefault(id(x), user_module.calling_place())
        if func.namespace == "prim":  # questions about a tensor
            return output
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or any(id(x) in self.known for x in operands):
            self.known.update(map(id, made))
            told = [tuple(x.shape) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
            self.calls.append(((str(func), told), user_module.calling_place()))
        return output


def kept_tensors(
    forward: Callable[[], Any], watch: user_module.Watch, known: Sequence[torch.Tensor]
) -> frozenset[user_module.Key]:
    """The tensor attributes to carry like buffers from one `forward` to the next, whose inputs and
    parameters are `known`. Raises TraceError where a second forward would not do what the first
    did."""
    start = user_module.Held(watch.holders)
    with _Calls(known) as first:
        forward()
    left = user_module.Held(watch.holders)
    tensors = {id(x): key for key in start.changed(left) for x in left.tensors.get(key, [])}
    kept = [x for held in left.tensors.values() for x in held if id(x) in tensors]
    with _Calls(known, kept) as second:
        forward()
    again = user_module.Held(watch.holders)
    carried: set[user_module.Key] = set()
    for number, place in second.used.items():
        key = tensors[number]
        x = next(x for x in kept if id(x) == number)
        if number not in first.known:
            continue  # the same in every forward
        if x.requires_grad:
            raise _refusal(watch, key, place, "carries a gradient: detach() it")
        if start.values.get(key) != left.values[key] or left.values[key][:1] != ("tensor",):
            raise _refusal(watch, key, place, "is read by the next one")
        carried.add(key)
    if carried:
        return frozenset(carried)
    for key in start.changed(left) | left.changed(again):
        if key not in watch.written_first and left.values.get(key) != again.values.get(key):
            raise _refusal(watch, key, None, "would be another after the next one")
    for (call, place), (other, _) in zip(first.calls, second.calls, strict=False):
        if call != other:
            raise _other_course(start.changed(left), watch, place)
    if len(first.calls) != len(second.calls):
        longer = max(first.calls, second.calls, key=len)
        raise _other_course(
            start.changed(left), watch, longer[min(len(first.calls), len(second.calls))][1]
        )
    return frozenset()


def name_of(key: user_module.Key) -> str:
    """An attribute as users write it."""
    return ".".join(part for part in key if part)


def _refusal(
    watch: user_module.Watch, key: user_module.Key, used: str | None, why: str
) -> TraceError:
    at = f", read at {used}," if used else ""
    return TraceError(
        f"at {watch.place(key)} the forward leaves something in the attribute "
        f"{name_of(key)!r} which{at} {why}. {WAYS_OUT}"
    )


def _other_course(
    changed: Iterable[user_module.Key], watch: user_module.Watch, place: str
) -> TraceError:
    key = min(changed)
    return TraceError(
        f"at {watch.place(key)} the forward changes the attribute {name_of(key)!r}, and at "
        f"{place} a second forward takes another course. {WAYS_OUT}"
    )
