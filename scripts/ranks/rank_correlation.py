"""Spearman's rank correlation, for the scripts that compare predicted with measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of the ranks of two equally long lists; not a number for fewer than three."""
    if len(left) < 3:
        return float("nan")
    return statistics.correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, equal values in the order given."""
    ranks = [0.0] * len(values)
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        ranks[index] = float(rank)
    return ranks
