"""Limits of inputs, checked before one is expanded or looped over; booleans of public functions,
checked by their signatures."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import ParamSpec, TypeGuard, TypeVar

from meshwright.profiles.inputs.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

MAX_DEVICES = 2**20
MAX_ROWS = 2**31  # of a batch; its divisors are enumerated
MAX_NAMES = 100_000  # blocks of a model, or patterns
MAX_TEXT = 1_000  # characters of a name or a pattern
MAX_DEPTH = 32  # of what is nested
MAX_COUNT = 2**62  # of bytes, and of what has no other limit
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30  # quotients and products of such are finite
BOOLEANS = ("bool", "bool_")  # numpy's, too
LEGAL_BOOLEANS = {"bool": "True, False", "bool | None": "True, False, None"}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether this is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() < 1000


def checked_booleans(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which refuses for its keywords of type bool what is none: a text or a number
    would be taken as true."""
    parameters = inspect.signature(function).parameters.values()
    legal = {
        p.name: LEGAL_BOOLEANS[p.annotation] for p in parameters if p.annotation in LEGAL_BOOLEANS
    }

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in legal.keys() & kwargs.keys():
            value = kwargs[name]
            if type(value).__name__ in BOOLEANS or (value is None and "None" in legal[name]):
                continue
            raise ArgumentError.refused(
                f"{function.__name__}: {name}", value, legal=legal[name], way_out="leave it out"
            )
        return function(*args, **kwargs)

    return checked
