"""Booleans of the public functions, checked by their signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from meshwright.profiles.inputs.errors import MeshwrightError

P = ParamSpec("P")
R = TypeVar("R")

NAMES = ("bool", "bool_")  # numpy's, too
LEGAL = {"bool": "True, False", "bool | None": "True, False, None"}


def checked_booleans(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which refuses for its keywords of type bool what is none: a text or a number
    would be taken as true."""
    parameters = inspect.signature(function).parameters.values()
    legal = {p.name: LEGAL[p.annotation] for p in parameters if p.annotation in LEGAL}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in legal.keys() & kwargs.keys():
            value = kwargs[name]
            if type(value).__name__ in NAMES or (value is None and "None" in legal[name]):
                continue
            raise MeshwrightError.refused(
                f"{function.__name__}: {name}", value, legal=legal[name], way_out="leave it out"
            )
        return function(*args, **kwargs)

    return checked
