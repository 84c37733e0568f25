"""What no plan with equal stages can undercut: the formulas.

W seconds of forward and backward per micro-batch at least, all blocks together; p device groups, m
micro-batches.

*Work.* Some group computes no less than W/p per micro-batch; and as blocks stay whole, of n equal
ones no less than ⌈n/p⌉. So T >= m · slowest.

*Chain.* Under GPipe and (eager) 1F1B stage k starts after one micro-batch went forward through all
before it, which then wait for its way back, and works m times: T >= t₁ + .. + t_{k-1} + m·t_k for
every k. The least T for which such t add up to W is where all of these hold with equality:

    T  >=  W / (1 - (1 - 1/m)^p)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def chained_s(work: float, m: int, groups: int) -> float:
    """Seconds of a step whose stages, of so much work per micro-batch together, wait for each
    other."""
    return work / (1 - (1 - 1 / m) ** groups)


def slowest_s(least: np.ndarray, classes: Sequence[str], groups: int) -> float:
    """Seconds per micro-batch of the slowest of so many device groups, at least; `least` seconds
    and class of each block."""
    counts = Counter(classes)
    whole = max(
        -(-counts[own] // groups) * float(seconds)
        for own, seconds in zip(classes, least, strict=True)
    )
    return max(float(least.sum()) / groups, whole)
