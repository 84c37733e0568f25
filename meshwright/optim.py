"""Optimizers and learning rates of large batches: LAMB, LARS, Muon; rules that scale a rate with
the rows of a step, and warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from meshwright.executor.parameters import LAMB, LARS, Muon
from meshwright.profiles.inputs import ArgumentError, shown
from meshwright.profiles.inputs.limits import is_number

__all__ = ["LAMB", "LARS", "Muon", "betas_of_adam", "linear_rate", "square_root_rate", "warmup"]


def linear_rate(lr: float, rows: int, rows_before: int) -> float:
    """The rate for steps of `rows`, in proportion to the rows, where `lr` was good for
    `rows_before`: SGD's rule, with a warm-up (Goyal et al., arXiv 1706.02677)."""
    return _rate(lr) * _times(rows, rows_before)


def square_root_rate(lr: float, rows: int, rows_before: int) -> float:
    """The rate for steps of `rows`, by the root of the rows: the rule of adaptive optimizers (Adam:
    Malladi et al., arXiv 2205.10287; LAMB: arXiv 1904.00962, section 4)."""
    return _rate(lr) * math.sqrt(_times(rows, rows_before))


def betas_of_adam(betas: tuple[float, float], rows: int, rows_before: int) -> tuple[float, float]:
    """Betas of Adam that forget as many rows as those for `rows_before` do: 1 − β in proportion to
    the rows, beside the rate of `square_root_rate` and eps over the root of as many times (Malladi
    et al., arXiv 2205.10287, square root scaling rule). Raises `ArgumentError` where one would be
    below 0."""
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ArgumentError.refused("betas_of_adam: betas", betas, legal="two numbers from 0 to 1")
    times = _times(rows, rows_before)
    found = tuple(1 - times * (1 - beta) for beta in betas)
    if min(found) < 0:
        raise ArgumentError(
            f": {rows} rows a step would need betas of {shown(found)}", place="betas_of_adam",
            legal="from 0", way_out="fewer rows, or betas nearer to 1",
        )  # fmt: skip
    return found[0], found[1]


def warmup(steps: int, total: int | None = None, power: float = 1.0) -> Callable[[int], float]:
    """Factors of a rate by step, for `torch.optim.lr_scheduler.LambdaLR`: from 1/`steps` up in
    equal parts to 1 (Goyal et al., section 2.2); then 1, or with a `total` down to 0 there by
    (1 − part)^`power` (linear for LAMB, 2 for LARS, as their papers have it)."""
    for name, value in (("steps", steps), ("total", total)):
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentError.refused(f"warmup: {name}", value, legal="an integer from 1")
    if not is_number(power) or power < 0:
        raise ArgumentError.refused("warmup: power", power, legal="a number from 0")
    if total is not None and total <= steps:
        raise ArgumentError.refused("warmup: total", total, legal=f"more than steps={steps}")
    return partial(_factor, steps, total, power)


def _factor(steps: int, total: int | None, power: float, step: int) -> float:
    if step < steps:
        return (step + 1) / steps
    if total is None:
        return 1.0
    left = max(0.0, 1 - (step - steps) / (total - steps))
    return math.pow(left, power)


def _times(rows: int, rows_before: int) -> float:
    for name, value in (("rows", rows), ("rows_before", rows_before)):
        if type(value) is not int or value < 1:
            raise ArgumentError.refused(name, value, legal="an integer from 1")
    return rows / rows_before


def _rate(lr: float) -> float:
    if not is_number(lr) or lr < 0:
        raise ArgumentError.refused("lr", lr, legal="a number from 0")
    return lr
