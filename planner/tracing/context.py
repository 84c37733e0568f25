"""Context managers of a trace, and the explanation of an export that failed."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import logging
import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.user_module import (
    TRACE,
    calling_place,
    condition,
    leaf,
    refused,
    refused_hooks,
    user_frame,
)

log = logging.getLogger(__name__)

# code asked for a number that only real tensors have
OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
NO_DRAWS = ("getstate", "setstate", "get_state", "set_state", "get_bit_generator")


def _ctc_result(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """A tensor like the result of `ctc_loss`."""
    rows = log_probs.shape[1:-1] if reduction == "none" else ()
    return log_probs.new_empty(rows)


@contextmanager
def recorded_gradients() -> Iterator[None]:
    """Context in which constructs that hide operators from autograd are opened, kept as leaves or
    refused.

    Reentrant checkpointing, which runs its function under no_grad, calls it directly (recompute is
    the planner's own choice). A custom autograd.Function would get wrong gradients, and hooks of a
    tensor would be lost. CTC's loss, whose workspace depends on the values of lengths, is a leaf.
    A SyncBatchNorm is a batch norm, whose statistics are over all data-parallel ranks here.
    """
    apply = vars(torch.autograd.Function)["apply"].__func__

    def keep(cls: type, *args: Any, **kwargs: Any) -> Any:
        trace = TRACE.get()
        if trace is None or cls.__module__.startswith("torch."):  # a custom_op's: one operator
            return apply(cls, *args, **kwargs)
        return trace.function(cls, args, kwargs)

    run = staticmethod(lambda function, preserve, *args: function(*args))
    direct = type("Direct", (), {"apply": run})
    with (
        mock.patch.object(torch.utils.checkpoint, "CheckpointFunction", direct),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(keep)),
        mock.patch.object(torch.nn.SyncBatchNorm, "forward", torch.nn.BatchNorm2d.forward),
        mock.patch.object(functional, "ctc_loss", leaf(functional.ctc_loss, result=_ctc_result)),
        refused_hooks(),
    ):
        yield


def refused_gradients() -> AbstractContextManager[None]:
    """Context in which traced code that calls autograd raises TraceError; leaves may."""

    def refusal(*_: Any) -> TraceError:
        return TraceError(
            f"at {calling_place()} the forward calls autograd, whose own backward a trace would "
            "lose (what it saved is detached there). Way out: put what needs the gradient, its "
            "parameters included, in a module of its own, and keep that as one node: "
            "meshwright.leaf(module, result=lambda *args: ...)"
        )

    return refused([(torch.autograd, "grad"), (torch.autograd, "backward")], refusal)


def refused_draws() -> AbstractContextManager[None]:
    """Context in which traced code that draws from the global generators of `random` or
    `numpy.random`, or makes a new one without a seed, raises TraceError: a trace has one outcome of
    them for ever."""

    def refusal(module: ModuleType, name: str, *arguments: Any) -> TraceError | None:
        if name == "default_rng" and any(x is not None for x in arguments):  # a seed
            return None
        return _drawn(f"{calling_place()} the forward calls {module.__name__}.{name}")

    calls = [(module, name) for module in (random, np.random) for name in module.__all__]
    draws = [(m, n) for m, n in calls if n not in NO_DRAWS and inspect.isroutine(getattr(m, n))]
    return refused(draws, refusal)


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Context at whose end TraceError is raised where it drew from a global generator."""
    before = _states()
    yield
    if _states() != before:
        raise _drawn("an unknown place the forward draws from random or numpy.random")


def _states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())


def _drawn(what: str) -> TraceError:
    return TraceError(
        f"at {what}: a plan would have this one outcome at every step. Ways out: draw with torch "
        "(torch.rand, torch.randint), draw outside and pass the outcome in the batch, switch it "
        "off (SpecAugment of transformers: config.apply_spec_augment=False, or pass "
        "mask_time_indices), or keep the module that draws as one node (meshwright.leaf)"
    )


class DataAccess(TorchFunctionMode):
    """Mode in which traced code reads `x.data` as `x.detach()`, which a trace sees, and can't
    assign it (TraceError)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if TRACE.get() is not None and func in (_DATA.__get__, _DATA.__set__):
            if func == _DATA.__get__:
                return args[0].detach()
            raise TraceError(
                f"at {calling_place()} the forward assigns .data of a tensor, which a trace can't "
                "see; change parameters between steps, and give other tensors a new name"
            )
        return func(*args, **(kwargs or {}))


_TENSOR: Any = torch.Tensor
_DATA: Any = _TENSOR.data  # the descriptor


@contextmanager
def noted_questions(asked: set[str]) -> Iterator[None]:
    """Context in which code that asks for a value that a trace doesn't have adds its line to
    `asked`, also where it catches the error."""

    def noting(plain: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if TRACE.get() is not None:
                asked.add(calling_place())
            plain(self, *args, **kwargs)

        return init

    with ExitStack() as stack:
        for kind in OF_VALUES:
            patch = mock.patch.object(kind, "__init__", noting(kind.__init__))
            stack.enter_context(patch)
        yield


@contextmanager
def recorded_inference_mode() -> Iterator[None]:
    """Context in which `torch.inference_mode` turns gradients off (on, for mode=False) as `no_grad`
    does: a trace records that, and has no tensors of the other kind."""
    outer: dict[int, list[bool]] = {}

    def enter(self: torch.inference_mode) -> None:
        outer.setdefault(id(self), []).append(torch.is_grad_enabled())
        torch.set_grad_enabled(not self.mode)

    def leave(self: torch.inference_mode, *_: Any) -> None:
        torch.set_grad_enabled(outer[id(self)].pop())

    with mock.patch.multiple(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Context that silences torch's logs, warnings and stderr about a failed export: the error
    raised says it."""
    names = [
        "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export",
        "torch._subclasses.fake_tensor",
    ]  # fmt: skip
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()) as printed:
            warnings.simplefilter("ignore")
            yield
        log.debug("torch printed: %s", printed.getvalue())
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def explain(error: Exception) -> str:
    """The message for a failed export: the user's source line, the reason, the ways out."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = traceback.extract_tb(error.__traceback__)
    asked = condition(frames) if isinstance(error, OF_VALUES) else ""
    why = f"the condition `{asked}` depends on tensor values\n  " if asked else ""
    return (
        f"the model can't be traced: at {user_frame(frames)}\n  "
        f"{why}{type(error).__name__}: {lines[0][:300]}\n"
        "Shapes and Python control flow must not depend on tensor values, and tensors must meet in "
        "one dtype. Ways out: compute that value with tensor operations (torch.where, masks), take "
        "it out of forward, cast with .to(x.dtype); keep the module that branches as one node "
        "(meshwright.leaf), or pass the loss as loss_fn= if the loss is what branches; and check "
        "that example_inputs are the arguments that forward expects."
    )


# --- caches of functions (`functools.lru_cache`) -------------------------------------------------


CACHE = functools._lru_cache_wrapper
# packages whose functions keep no fake tensor
THEIRS = {"torch", "meshwright", *sys.stdlib_module_names}
_installed: WeakKeyDictionary[ModuleType, list[Any]] = WeakKeyDictionary()


@contextmanager
def emptied_caches(*roots: object) -> Iterator[None]:
    """Context after which no cache holds fake tensors: those that do are emptied, of the functions
    and classes of all modules, and of objects reached from `roots`. All objects of a process are
    too many to look through."""
    try:
        yield
    finally:
        for cache in (*_in_modules(), *_reached(roots)):
            if _holds_fake(gc.get_referents(cache)):
                cache.cache_clear()


def _in_modules() -> Iterator[Any]:
    """The caches among the functions of modules and their classes."""
    for name, module in _modules():
        if name.partition(".")[0] in THEIRS:
            continue
        if "site-packages" not in (getattr(module, "__file__", None) or ""):
            yield from _of_module(name, module)
        else:  # whose functions stay
            if module not in _installed:
                _installed[module] = [*_of_module(name, module)]
            yield from _installed[module]


def _modules() -> list[tuple[str, ModuleType]]:
    return [(name, m) for name, m in [*sys.modules.items()] if isinstance(m, ModuleType)]


def _of_module(name: str, module: ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == name:
            for attribute in list(vars(value).values()):
                yield from _of_function(attribute)
        else:
            yield from _of_function(value)


def _of_function(value: object) -> Iterator[Any]:
    """The cache that a value is, or that a function keeps in its closure."""
    if type(value) is CACHE:
        yield value
    elif isinstance(value, staticmethod | classmethod):
        yield from _of_function(value.__func__)
    elif isinstance(value, FunctionType) and value.__closure__:
        yield from (x for x in gc.get_referents(*value.__closure__) if type(x) is CACHE)


def _reached(roots: tuple[object, ...]) -> Iterator[Any]:
    """The caches that objects hold, by whatever way that doesn't lead through a class or module."""
    border = type | ModuleType | torch.Tensor
    seen: dict[int, object] = {id(vars(module)): module for _, module in _modules()}
    reached: list[object] = [roots]
    while reached:
        referents = [x for x in gc.get_referents(*reached) if gc.is_tracked(x)]
        new = {id(x): x for x in referents if id(x) not in seen and not isinstance(x, border)}
        seen |= new
        reached = list(new.values())
        yield from (x for x in reached if type(x) is CACHE)


def _holds_fake(value: Any) -> bool:
    if isinstance(value, tuple | list | dict):
        return any(map(_holds_fake, value.values() if isinstance(value, dict) else value))
    return isinstance(value, FakeTensor)
