"""Errors of prices: measured over predicted, of a model that was not measured; by GPU, and on the
slowest of many nodes.

Step times: published rows that nothing was fitted on, pooled by `python -m
scripts.fits.fit_intervals` (`scripts/experts/residuals.py`), whose result is `residuals.json`: an
interval for each GPU, framework and kind of model, which evidence of these narrows, and which is
widest where there is none.

Memory: of targets that this project's executor runs, what rehearsals and prices differ by
(`docs/archive/measurements.md`), and an allowance for what rehearsals don't have: fragments of an
allocator and kernels' workspaces, nothing to `ALLOWANCE` of the tensors, evenly (assumed). Of other
software, what its allocator was published to have reached.

Errors of computing are root mean squares of predicted over published step times, less one, of rows
that nothing was fitted on and whose step is communication by less than 5 %:
`python -m scripts.validate_costmodel --errors` prints them. That of communication is one for all:
the published rows separate it badly from the rest (least squares of squared errors on squared
sensitivities give 20 % for H100, 21 % for V100, and anything for A100).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

LEVEL = 0.8  # the part of rows that lies within
SURE = 0.9  # probability from which on something fits, or doesn't
OTHER = "other"  # GPU or target of which nothing was measured
REHEARSED = 0.01  # by which rehearsals and prices differ, one deviation
ALLOWANCE = 0.05  # for fragments and workspaces at most; `memory_margin` leaves as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Measured over predicted: the `middle` and both ends of the 80 % interval; of so many rows and
    models, those that `of` says."""

    low: float
    middle: float
    high: float
    rows: int
    models: int
    of: str

    def around(self, value: float) -> tuple[float, float]:
        """Interval of a predicted value."""
        return self.low * value, self.high * value

    def below(self, ratio: float) -> float:
        """Probability that measured over predicted is below a ratio: logarithms are normal, on
        either side of the middle with a deviation of its own."""
        if ratio <= 0:
            return 0.0
        end = self.low if ratio < self.middle else self.high
        deviation = abs(math.log(end / self.middle)) / NormalDist().inv_cdf((1 + LEVEL) / 2)
        return NormalDist().cdf(math.log(ratio / self.middle) / deviation)


# `scripts/quickstart` on 1, 2 and 4 ranks of a machine with 2 cores (docs/archive/measurements.md)
CPU = "local-cpu"
OF_CPU = Quantiles(low=0.9, middle=1.3, high=1.7, rows=3, models=1, of="ranks on a CPU")


@cache
def _residuals() -> Mapping[str, Any]:
    text = Path(__file__).with_name("residuals.json").read_text()
    residuals: Mapping[str, Any] = json.loads(text)
    return residuals


def step_quantiles(device: str, target: str, *, experts: bool) -> Quantiles:
    """Quantiles of step times on a device under a target, of models with experts or without."""
    if device == CPU:
        return OF_CPU
    table, gpu = _residuals()["step"], family_of(device)
    kind, intervals = "experts" if experts else "dense", table["intervals"]
    # what was not measured counts as any other; a framework that was, on any GPU
    places = [(g, t) for g in (gpu, OTHER) for t in (target, OTHER)]
    at = next(place for place in places if f"{place[0]}, {kind}, {place[1]}" in intervals)
    rows, here = table["rows"][kind], table["rows"][kind].get(gpu, 0)
    return Quantiles(
        **intervals[f"{at[0]}, {kind}, {at[1]}"],
        rows=sum(rows.values()),
        models=table["models"],
        of=f"{kind}, {here} on {gpu}" if here else f"{kind}, none on {device}",
    )


def memory_quantiles(target: str, *, executed: bool) -> Quantiles:
    """Quantiles of peak memory under a target, run by this project's executor or other software."""
    if executed:
        deviation = math.hypot(REHEARSED, ALLOWANCE / math.sqrt(12))
        reach, middle = NormalDist(0, deviation).inv_cdf((1 + LEVEL) / 2), 1 + ALLOWANCE / 2
        return Quantiles(
            low=middle * math.exp(-reach),
            middle=middle,
            high=middle * math.exp(reach),
            rows=0,
            models=0,
            of=f"rehearsals, 0 to {ALLOWANCE:.0%} for the allocator",
        )
    table = _residuals()["memory"]
    return Quantiles(**table.get(target, table["all"]))


def family_of(device: str) -> str:
    """The GPU of a device of the catalog, whatever its memory and its form."""
    return device.split("-")[0]


def verdict(probability: float) -> str:
    """A probability that memory is enough, in a word."""
    if probability >= SURE:
        return "fits"
    return "tight" if probability > 1 - SURE else "does not fit"


# the scatter of nodes' speeds about their mean, as a fraction: fitted to the nine weak-scaling
# series of DGXC (Nemotron-15B, Llama-3.1-8B and 70B on 8 to 2,048 H100; 1.0 % in the mean, -0.3 to
# 1.9 %), scored by all other sources on several nodes
NODE_SCATTER = 0.01
COMMUNICATION_ERROR = 0.20
HOST_ERROR = 0.20  # of links to host memory and flash that were not measured (assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeError:
    """Fraction by which seconds of computing are off, of so many rows at a date."""

    fraction: float
    rows: int
    date: str


# by the first word of a device's name; the rest, and GPUs of few rows, take those of all
COMPUTE_ERRORS = {
    "a100": ComputeError(fraction=0.079, rows=197, date="2026-11-23"),
    "h100": ComputeError(fraction=0.055, rows=65, date="2026-11-23"),
}
ALL_GPUS = ComputeError(fraction=0.076, rows=273, date="2026-11-23")


def compute_error(device: str) -> float:
    """The error of computing on a device of the catalog, by its name."""
    return COMPUTE_ERRORS.get(family_of(device), ALL_GPUS).fraction


@lru_cache(maxsize=1024)
def slowest_of(nodes: int) -> float:
    """Seconds on the slowest of so many nodes over those on a usual one: the expected largest of
    normal variables (Blom 1958: Phi^-1((n - 3/8) / (n + 1/4)))."""
    if nodes <= 1:
        return 1.0
    return 1 + NODE_SCATTER * NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))
