"""Around a trace: what hides operators from it is opened or refused, and its failures are
explained."""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint

from planner.functional import TraceError

log = logging.getLogger(__name__)


@contextmanager
def recorded_gradients() -> Iterator[None]:
    """Inside, whatever hides operators from autograd is opened or refused.

    Reentrant checkpointing runs its function under no_grad: it is called directly (recompute is the
    planner's own choice). A custom autograd.Function would be traced by its forward alone and get
    wrong gradients.
    """

    def run(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)

    untouched = vars(torch.autograd.Function)["apply"].__func__

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):  # a custom_op's: one operator, backward included
            return untouched(cls, *args, **kwargs)
        raise TraceError(
            f"the model can't be traced: at {user_frame(traceback.extract_stack())} it calls "
            f"autograd.Function {cls.__qualname__}, whose backward the tracer can't see. Ways out: "
            "write it with differentiable operators (e.g. x + (f(x) - x).detach() for a "
            "straight-through estimator), or make it a torch.library.custom_op with "
            "register_autograd and register_fake"
        )

    direct = type("Direct", (), {"apply": staticmethod(run)})
    with (
        mock.patch.object(torch.utils.checkpoint, "CheckpointFunction", direct),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse)),
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """torch's own reports of a failed export silenced, printed ones too: the error raised says
    it."""
    names = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")
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


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """file:line of the innermost frame outside torch and this package."""
    skipped = (Path(torch.__file__).parent, Path(__file__).parent)
    own = [
        f
        for f in frames
        if not f.filename.startswith("<") and not set(skipped) & set(Path(f.filename).parents)
    ]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "an unknown place"


def explain(error: Exception) -> str:
    """Where in the user's source tracing stopped, why, and the ways out."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    where = user_frame(traceback.extract_tb(error.__traceback__))
    return (
        f"the model can't be traced: at {where}\n  {type(error).__name__}: {lines[0][:300]}\n"
        "Shapes and Python control flow must not depend on tensor values, and tensors must meet in "
        "one dtype. Ways out: compute that value with tensor operations (torch.where, masks), take "
        "it out of forward, cast with .to(x.dtype), or pass the loss as loss_fn= if the loss is "
        "what branches; and check that example_inputs are the arguments that forward expects."
    )
