"""Random draws of Python and numpy in a forward: a trace has one outcome of them for ever."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.user_module import TRACE, calling_place

NO_DRAWS = ("getstate", "setstate", "get_state", "set_state", "get_bit_generator")


@contextmanager
def refused_draws() -> Iterator[None]:
    """Context in which traced code that draws from the global generators of `random` or
    `numpy.random`, or makes a new one without a seed, raises TraceError."""
    with ExitStack() as stack:
        for module in (random, np.random):
            for name in module.__all__:
                plain = getattr(module, name)
                if not isinstance(plain, type) and callable(plain) and name not in NO_DRAWS:
                    draw = _refusing(f"{module.__name__}.{name}", plain)
                    stack.enter_context(mock.patch.object(module, name, draw))
        yield


def _refusing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        seeded = name.endswith("default_rng") and any(
            x is not None for x in (*args, *kwargs.values())
        )
        if TRACE.get() is None or seeded:
            return plain(*args, **kwargs)
        file, line = calling_place()
        raise TraceError(_message(f"{file}:{line} the forward calls {name}"))

    return draw


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Context at whose end TraceError is raised where it drew from a global generator."""
    before = _states()
    yield
    if _states() != before:
        raise TraceError(_message("an unknown place the forward draws from random or numpy.random"))


def _states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())


def _message(what: str) -> str:
    return (
        f"at {what}: a plan would have this one outcome at every step. Ways out: draw with torch "
        "(torch.rand, torch.randint), draw outside and pass the outcome in the batch, switch it "
        "off (SpecAugment of transformers: config.apply_spec_augment=False, or pass "
        "mask_time_indices), or keep the module that draws as one node (meshwright.leaf)"
    )
