"""Context managers of a trace: hidden operators are opened or refused, torch is quiet; and the
explanation of an export that failed."""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from meshwright.planner.tracing.user_module import TRACE, condition, refused_hooks, user_frame

log = logging.getLogger(__name__)


@contextmanager
def recorded_gradients() -> Iterator[None]:
    """Context in which constructs that hide operators from autograd are opened, kept as leaves or
    refused.

    Reentrant checkpointing runs its function under no_grad: it is called directly (recompute is the
    planner's own choice). A custom autograd.Function would be traced by its forward alone and get
    wrong gradients, and the hooks of a tensor would be run on none.
    """

    def run(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)

    apply = vars(torch.autograd.Function)["apply"].__func__

    def keep(cls: type, *args: Any, **kwargs: Any) -> Any:
        trace = TRACE.get()
        if trace is None or cls.__module__.startswith("torch."):  # a custom_op's: one operator
            return apply(cls, *args, **kwargs)
        return trace.function(cls, args, kwargs)

    direct = type("Direct", (), {"apply": staticmethod(run)})
    with (
        mock.patch.object(torch.utils.checkpoint, "CheckpointFunction", direct),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(keep)),
        refused_hooks(),
    ):
        yield


@contextmanager
def unvalidated() -> Iterator[None]:
    """Context in which `torch.distributions` validate arguments only where asked to: a trace has no
    values."""
    with mock.patch.object(torch.distributions.Distribution, "_validate_args", False):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Context that silences torch's logs, warnings and stderr about a failed export: the error
    raised says it."""
    names = [
        "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export",
        "torch._subclasses.fake_tensor",
    ]  # fmt: skip
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()) as printed:
            warnings.simplefilter("ignore")
            yield
        log.debug("torch printed: %s", printed.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def explain(error: Exception) -> str:
    """The message for a failed export: the user's source line, the reason, the ways out."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = traceback.extract_tb(error.__traceback__)
    asked = condition(frames) if depends_on_values(error) else ""
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


def depends_on_values(error: Exception) -> bool:
    """Whether a trace failed because code asked for a number that only real tensors have."""
    return isinstance(
        error,
        (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode),
    )
