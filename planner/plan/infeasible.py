"""InfeasibleError: no plan fits the devices' memory, by how many bytes, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.plan.words import seconds
from meshwright.profiles.inputs import MeshwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """One change (`what`), the nodes that it adds, and in words a plan that is possible then, with
    its step time; None where that is not known."""

    what: str
    more_nodes: int
    plan: str
    step_time_s: float | None

    def __str__(self) -> str:
        step = "" if self.step_time_s is None else f": {seconds(self.step_time_s)} a step"
        return f"{self.what} ({self.plan}{step})"


WAYS_OUT = "Way out: "  # what the message of a search without a plan has before its ways out


def without_ways_out(message: str) -> str:
    """The first part of such a message."""
    return message.partition(f" {WAYS_OUT}")[0]


class InfeasibleError(MeshwrightError):
    """No plan fits the cluster's memory. `shortfall_bytes` per stage of the plan that comes
    closest; `relaxations` that would help, those that change least first."""

    CODE = "MW210"
    PLACE = "memory of the devices"
    LEGAL = "plans whose stages fit it"
    WAY_OUT = "more or larger devices, a smaller batch or model, or fewer overrides"

    def __init__(
        self, message: str, shortfall_bytes: Sequence[float], relaxations: Sequence[Relaxation] = ()
    ) -> None:
        super().__init__(message)
        self.shortfall_bytes = tuple(shortfall_bytes)
        self.relaxations = tuple(relaxations)

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[Any, ...]]:
        return InfeasibleError, (str(self), self.shortfall_bytes, self.relaxations)
