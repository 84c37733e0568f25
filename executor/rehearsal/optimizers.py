"""The user's optimizer in a rehearsal: made and stepped, or refused with what it did, and where."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException

from meshwright.executor.errors import RehearsalError

# makes the optimizer of a rank's parameters
MakeOptimizer = Callable[[Sequence[nn.Parameter]], optim.Optimizer]


def line_of(error: BaseException) -> str:
    """The user's line that an error came from, or the optimizer's; empty where it is neither."""
    skipped = Path(__file__).resolve().parents[1], Path(torch.__file__).parent
    optimizers = Path(optim.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_relative_to(optimizers) and path.name != "optimizer.py":
            return f" in {path.name}:{frame.lineno} ({frame.line})"
        if not any(path.is_relative_to(folder) for folder in skipped):
            return f" in {frame.filename}:{frame.lineno} ({frame.line})"
    return ""


def made_of(make: MakeOptimizer, parameters: Sequence[nn.Parameter]) -> optim.Optimizer:
    """The optimizer of a rank's parameters. Raises ValueError where none is made of them."""
    legal = (
        "a function of a list of parameters (DTensors where ranks hold parts) that returns "
        "a torch.optim.Optimizer, e.g. optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
    )
    try:
        optimizer = make(parameters)
    except DataDependentOutputException:
        raise
    except Exception as error:  # whatever the user's function does
        raise RehearsalError(
            f"rehearse: optimizer={make!r} raises {type(error).__name__}: {error}{line_of(error)}",
            legal=legal,
        ) from error
    if not isinstance(optimizer, optim.Optimizer):
        raise RehearsalError(f"rehearse: optimizer={make!r} returns {optimizer!r}", legal=legal)
    return optimizer


def step(optimizer: optim.Optimizer) -> None:
    """Raises ValueError for an optimizer that can't step here, as it couldn't on the ranks."""
    try:
        optimizer.step()
    except DataDependentOutputException:
        raise
    except Exception as error:  # whatever an optimizer does with parts of parameters
        lines = str(error).strip().splitlines() or [""]
        raise RehearsalError(
            f"rehearse: {type(optimizer).__name__}.step() raises {type(error).__name__}: "
            f"{lines[0][:300]}{line_of(error)}; it would on the plan's ranks",
            legal="an optimizer that needs no closure and can step DTensors",
            way_out="others on whole tensors, by whole_tensor_optimizer, which no rehearsal has",
        ) from error
