"""Residuals of predictions (measured over predicted), and the intervals that they give.

The logarithm of a residual is the sum of a mean and of effects of the GPU, of the target, of the
model, and of the row, each normal with a variance of its own (the most likely ones, but no less
than those given). A prediction for another model is what that says given all rows: a normal
variable (a Gaussian process; Rasmussen, Williams, 2006, chapter 2). Knowing of more rows never
widens it, and a GPU of which no row is known adds its effect's whole variance.

The ends of the interval are where so many of the rows of each left-out model lie, in deviations
from what the others predict: by model, each weighing 1, and one more beyond all (conformal). Ten
models are the fewest that say where 80 % are, so that kinds whose effects differ have the same
ends, each in deviations of its own.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.intervals import LEVEL, OTHER

Floats = NDArray[np.float64]
EFFECTS = ("gpu", "target", "model")
MEAN = 0.1**2  # variance of the mean: prices are not off all one way
# the least variance of an effect: rows of three GPUs and of eight frameworks tell nothing smaller,
# and the GPUs are those whose curves were fitted (assumed)
NO_LESS = {"gpu": 0.1**2, "target": 0.05**2, "model": 0.05**2, "row": 0.02**2}
STEPS = 2.0 ** np.array([2.0, 1.0, 0.5, -0.5, -1.0, -2.0])  # by which variances are varied


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Measured over predicted, of a row of a model on a GPU under a target."""

    model: str
    ratio: float
    gpu: str = OTHER
    target: str = OTHER


@dataclass(frozen=True)
class Effects:
    """Rows, and the variances of their effects and of rows themselves."""

    residuals: Sequence[Residual]
    variances: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(NO_LESS, 0.02))

    @cached_property
    def _logs(self) -> Floats:
        return np.array([math.log(each.ratio) for each in self.residuals])

    @cached_property
    def _inverse(self) -> Floats:
        return np.linalg.inv(self._covariance(self.residuals))

    def _covariance(self, others: Sequence[Residual]) -> Floats:
        """Of rows with `others`, (rows, others); with themselves if they are the same."""
        found = np.full((len(self.residuals), len(others)), MEAN)
        for name in EFFECTS:
            own, theirs = (
                np.array([getattr(each, name) for each in rows], dtype=object)
                for rows in (self.residuals, others)
            )
            found += self.variances[name] * (own[:, None] == theirs[None])
        if others is self.residuals:
            found += self.variances["row"] * np.eye(len(others))
        return found

    @property
    def likelihood(self) -> float:
        """The logarithm of the rows' density, without its constant."""
        covariance = self._covariance(self.residuals)
        _, logarithm = np.linalg.slogdet(covariance)
        return float(-0.5 * (self._logs @ np.linalg.solve(covariance, self._logs) + logarithm))

    def fitted(self, least: Mapping[str, float] = NO_LESS) -> Effects:
        """The same rows with the most likely variances, one varied after the other, none of them
        below the `least`."""
        first = {name: max(least[name], own) for name, own in self.variances.items()}
        best = Effects(self.residuals, first)
        score = best.likelihood
        better = True
        while better:
            better = False
            for name, step in itertools.product(NO_LESS, STEPS):
                value = max(least[name], best.variances[name] * step)
                tried = Effects(self.residuals, {**best.variances, name: value})
                if tried.likelihood > score + 1e-3:
                    best, score, better = tried, tried.likelihood, True
        return best

    def predicted(self, of: Residual) -> tuple[float, float]:
        """Mean and deviation of the logarithm of another row; its own ratio is not asked."""
        known = self._covariance([of])[:, 0]
        mean = float(known @ self._inverse @ self._logs)
        whole = MEAN + sum(self.variances.values())
        return mean, math.sqrt(max(0.0, whole - float(known @ self._inverse @ known)))

    def left_out(self) -> list[tuple[str, float]]:
        """Of each row its model, and the deviations that it is off what other models predict."""
        found = []
        for model in dict.fromkeys(each.model for each in self.residuals):
            others = Effects([r for r in self.residuals if r.model != model], self.variances)
            for own in (r for r in self.residuals if r.model == model):
                mean, deviation = others.predicted(own)
                found.append((model, (math.log(own.ratio) - mean) / deviation))
        return found


def ends(found: Sequence[tuple[str, float]], level: float = LEVEL) -> tuple[float, float]:
    """The deviations between which another model's row lies with probability `level`: every model
    weighs 1, and one more lies beyond all of them; never beyond the last row."""
    of_model = collections.Counter(model for model, _ in found)
    wanted = (1 + level) / 2 * (len(of_model) + 1) - 1e-9
    both = []
    for sign in (-1, 1):
        rising = sorted(found, key=lambda each: sign * each[1])
        end, weight = rising[-1][1], 0.0
        for model, deviations in rising:
            weight += 1 / of_model[model]
            if weight >= wanted:
                end = deviations
                break
        both.append(end)
    return both[0], both[1]


def coverage(of: Sequence[tuple[str, float]], found: Sequence[tuple[str, float]]) -> float:
    """The part of some of the rows found that is within the interval of the other models' rows."""
    within = 0
    for model in {name for name, _ in of}:
        low, high = ends([each for each in found if each[0] != model])
        within += sum(low <= each <= high for name, each in of if name == model)
    return within / len(of)


def interval(effects: Effects, of: Residual, reach: tuple[float, float]) -> dict[str, float]:
    """The interval of a row of another model, whose ends are so many deviations off."""
    mean, deviation = effects.predicted(of)
    logs = {"low": mean + reach[0] * deviation, "middle": mean, "high": mean + reach[1] * deviation}
    return {name: round(math.exp(value), 4) for name, value in logs.items()}
