"""Divisors: what a degree may be."""

import math


def divisors(n: int) -> list[int]:
    """All divisors of n >= 1, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
