"""How far prices are off: quantiles of measured over predicted, of published rows that nothing was
fitted on.

`residuals.json` is written by `python -m scripts.fits.fit_intervals`. Its quantiles are conformal,
by model: each model's rows weigh 1 together, and one more model counts as beyond all of them (Vovk,
Gammerman, Shafer: Algorithmic Learning in a Random World, 2005, for exchangeable ones).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LEVEL = 0.8  # the part of rows that lies within


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Measured over predicted, at the lower and the upper end of the interval; of so many rows and
    models; `of` says of which."""

    low: float
    high: float
    rows: int
    models: int
    of: str


@cache
def _residuals() -> Mapping[str, Any]:
    text = Path(__file__).with_name("residuals.json").read_text()
    found: Mapping[str, Any] = json.loads(text)
    return found


def step_quantiles(device: str, target: str, *, experts: bool) -> Quantiles:
    """Of step times, on a device of the catalog under a target, for models with experts or without:
    the most particular group that has rows enough."""
    return _quantiles("step", device, target, experts=experts)


def memory_quantiles(device: str, target: str, *, experts: bool) -> Quantiles:
    """Of peak memory, likewise."""
    return _quantiles("memory", device, target, experts=experts)


def groups_of(device: str, target: str, *, experts: bool) -> tuple[str, ...]:
    """The groups that a prediction belongs to, the most particular first."""
    gpu, kind = device.split("-")[0], "experts" if experts else "dense"
    return f"{gpu}, {kind}, {target}", f"{gpu}, {kind}", kind, "all"


def _quantiles(what: str, device: str, target: str, *, experts: bool) -> Quantiles:
    table = _residuals()[what]
    group = next(g for g in groups_of(device, target, experts=experts) if g in table)
    return Quantiles(of=group, **table[group])
