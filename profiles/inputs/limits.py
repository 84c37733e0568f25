"""Limits of inputs, checked before one is expanded or looped over."""

from __future__ import annotations

import math
from typing import TypeGuard

MAX_DEVICES = 2**20
MAX_ROWS = 2**31  # of a batch; its divisors are enumerated
MAX_NAMES = 100_000  # blocks of a model, or patterns
MAX_TEXT = 1_000  # characters of a name or a pattern
MAX_DEPTH = 32  # of what is nested
MAX_COUNT = 2**62  # of bytes, and of what has no other limit
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30  # quotients and products of such are finite


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether this is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() < 1000
