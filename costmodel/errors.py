"""What prices miss: errors by GPU, and the slowest of many nodes.

Errors of computing are root mean squares of predicted over published step times, less one, of rows
that nothing was fitted on and whose step is communication by less than 5 %:
`python -m scripts.validate_costmodel --errors` prints them. That of communication is one for all:
the published rows separate it badly from the rest (least squares of squared errors on squared
sensitivities give 20 % for H100, 21 % for V100, and anything for A100).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

# the scatter of nodes' speeds about their mean, as a fraction: fitted to the nine weak-scaling
# series of DGXC (Nemotron-15B, Llama-3.1-8B and 70B on 8 to 2,048 H100; 1.0 % in the mean, -0.3 to
# 1.9 %), scored by all other sources on several nodes
NODE_SCATTER = 0.01
COMMUNICATION_ERROR = 0.20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeError:
    """The fraction by which seconds of computing are off, of so many rows at a date."""

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
    return COMPUTE_ERRORS.get(device.split("-")[0], ALL_GPUS).fraction


@lru_cache(maxsize=1024)
def slowest_of(nodes: int) -> float:
    """Seconds on the slowest of so many nodes over those on a usual one: the expected largest of
    normal variables (Blom 1958: Phi^-1((n - 3/8) / (n + 1/4)))."""
    if nodes <= 1:
        return 1.0
    return 1 + NODE_SCATTER * NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))
