"""Residuals of predictions (measured over predicted), and the intervals that they give."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.intervals import LEVEL

FEWEST_ROWS, FEWEST_MODELS = 20, 5


@dataclass(frozen=True, slots=True)
class Residual:
    """Measured over predicted, of a row of a model."""

    model: str
    ratio: float


def quantiles(residuals: Sequence[Residual], level: float = LEVEL) -> tuple[float, float]:
    """The ends of the interval in which another model's row lies with probability `level`: every
    model weighs 1, and one more lies beyond all of them (conformal); never beyond the last row."""
    of_model = collections.Counter(r.model for r in residuals)
    ends = []
    for sign in (-1, 1):
        rising = sorted(residuals, key=lambda r: sign * r.ratio)
        wanted = (1 + level) / 2 * (len(of_model) + 1) - 1e-9
        end, weight = rising[-1].ratio, 0.0
        for r in rising:
            weight += 1 / of_model[r.model]
            if weight >= wanted:
                end = r.ratio
                break
        ends.append(end)
    return ends[0], ends[1]


def coverage(residuals: Sequence[Residual]) -> float:
    """The part of rows within the interval of the other models."""
    within = 0
    for model in {r.model for r in residuals}:
        low, high = quantiles([r for r in residuals if r.model != model])
        within += sum(low <= r.ratio <= high for r in residuals if r.model == model)
    return within / len(residuals)


def table(groups: Mapping[str, Sequence[Residual]]) -> dict[str, dict[str, float]]:
    """The groups that have rows enough, with their intervals."""
    found = {}
    for name, residuals in sorted(groups.items()):
        models = len({r.model for r in residuals})
        if name == "all" or (len(residuals) >= FEWEST_ROWS and models >= FEWEST_MODELS):
            low, high = quantiles(residuals)
            found[name] = {
                "low": round(low, 4),
                "high": round(high, 4),
                "rows": len(residuals),
                "models": models,
            }
    return found
