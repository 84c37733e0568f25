"""Corrections of prices by measured steps: one factor for each component.

Of plan p and term t let y be the measured seconds, a_k the seconds of component k in its price
without corrections, and r the rest of that price, which nothing corrects. Factors f minimise

    Σ_p  w_p · huber(‖e_p‖)  +  RIDGE · Σ_k (ln f_k)²,    e_pt = (y - r - Σ_k a_k f_k) / s_p

s_p is the geometric mean of the plan's measured and priced step, so that residuals are parts of a
step and a plan that is off n-fold weighs as much whichever way. w_p = n / (n + HALF_WEIGHT) of n
samples: more of them don't make a plan say more of others. The ridge is the prior belief that a
price is right within a factor of e, where a measured plan tells a component within 5 % of its
step. Huber's loss (Robust Estimation of a Location Parameter, 1964) of a plan's residuals together,
by reweighting, keeps a plan that went wrong from deciding: beside two others at least. Components
that stand in one proportion in all plans share what is found. A component that the rows say nothing
of keeps 1: where its share of the steps is so small that they would move it by less than `TOLD` of
the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.steps.timing import COMPONENTS, STEP, StepTiming

Floats = NDArray[np.float64]

RIDGE = 0.0025  # (5 %)², where ln f is 0 ± 1
HALF_WEIGHT = 5.0  # samples of which a plan has half of its weight
TOLD = 0.25
TUNING = 1.345  # Huber's: 95 % of the efficiency of least squares where nothing is wrong
LEAST_DEVIATION = 0.05  # of a step: below it a plan's residual is noise
FARTHEST = 16.0  # no factor is above this, or below its inverse
ROUNDS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A factor of a component's seconds, and how many plans and samples of steps it rests on."""

    factor: float
    plans: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Corrections by component; a component without one is priced as it is."""

    by_component: Mapping[str, Correction] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_component)

    def factor(self, component: str) -> float:
        """Factor of a component's seconds."""
        correction = self.by_component.get(component)
        return correction.factor if correction is not None else 1.0

    def lines(self) -> list[str]:
        """The corrections in words, as the report says them."""
        return [
            f"{name} × {c.factor:.3g}, measured on {c.plans} plan{'s' * (c.plans > 1)}, "
            f"{c.samples} steps"
            for name, c in self.by_component.items()
        ]


NO_CORRECTIONS = Corrections()


def fitted(rows: Iterable[StepTiming]) -> Corrections:
    """The corrections that measured steps ask for, of one device and one kind of run."""
    usable = _with_steps(list(rows))
    if not usable:
        return NO_CORRECTIONS
    steps = {row.plan: row for row in usable if row.term == STEP}
    scales = {p: math.sqrt(row.measured_s * row.predicted_s) for p, row in steps.items()}
    scale = np.array([scales[row.plan] for row in usable])
    parts = np.array([[row.parts.get(name, 0.0) for name in COMPONENTS] for row in usable])
    parts /= scale[:, None]
    errors = np.array([row.measured_s - row.predicted_s for row in usable]) / scale
    weights = np.array([row.samples / (row.samples + HALF_WEIGHT) for row in usable])
    sizes = weights @ np.square(parts)
    told = np.flatnonzero(sizes >= TOLD * (sizes + RIDGE))  # by the rows, were each one alone
    _, plan = np.unique([row.plan for row in usable], return_inverse=True)
    changes = _changes(parts[:, told], errors, weights, plan)
    corrections = {}
    for component, change in zip((COMPONENTS[k] for k in told), changes, strict=True):
        plans = {row.plan for row in usable if row.parts.get(component)}
        samples = sum(steps[plan].samples for plan in plans)
        factor = float(1 + change)
        corrections[component] = Correction(factor=factor, plans=len(plans), samples=samples)
    return Corrections(by_component=corrections)


def _with_steps(rows: Sequence[StepTiming]) -> list[StepTiming]:
    """The rows of plans whose step is measured and priced."""
    plans = {r.plan for r in rows if r.term == STEP and min(r.measured_s, r.predicted_s) > 0}
    return [row for row in rows if row.plan in plans]


def _changes(parts: Floats, errors: Floats, weights: Floats, plan: NDArray[np.int64]) -> Floats:
    """f - 1 of the components, by least squares in which plans that are far off lose weight;
    `plan` numbers the plan of each row."""
    changes, now = np.zeros(parts.shape[1]), weights
    for _ in range(ROUNDS):
        before = changes
        normal = parts.T @ (now[:, None] * parts)
        changes = _bounded(normal, parts.T @ (now * errors), _ridge(before), before)
        off = np.sqrt(np.bincount(plan, weights=np.square(errors - parts @ changes)))
        limit = TUNING * max(1.4826 * float(np.median(off)), LEAST_DEVIATION)
        if len(off) > 2:  # of two nobody knows which went wrong
            now = weights * np.minimum(1.0, limit / np.maximum(off, 1e-12))[plan]
        if np.allclose(changes, before, rtol=0, atol=1e-6):
            break
    return changes


def _ridge(changes: Floats) -> Floats:
    """Weight of a square of f - 1 that is as much as RIDGE of one of ln f, at these factors."""
    near = np.abs(changes) < 1e-6
    slopes = np.log1p(changes) / np.where(near, 1.0, changes)
    ridge: Floats = RIDGE * np.square(np.where(near, 1.0, slopes))
    return ridge


def _bounded(normal: Floats, target: Floats, ridge: Floats, start: Floats) -> Floats:
    """The ridge solution within the bounds, one coordinate after the other until none moves: the
    program is convex."""
    changes, low, high = start.copy(), 1 / FARTHEST - 1, FARTHEST - 1
    for _ in range(20 * ROUNDS):
        moved = 0.0
        for k in range(len(changes)):
            rest = target[k] - normal[k] @ changes + normal[k, k] * changes[k]
            new = float(np.clip(rest / (normal[k, k] + ridge[k]), low, high))
            moved, changes[k] = max(moved, abs(new - changes[k])), new
        if moved < 1e-9:
            break
    return changes
