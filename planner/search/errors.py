"""Errors of the search: nothing fits, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.planner.search.relaxations import Relaxation


class InfeasibleError(ValueError):
    """No plan fits the cluster's memory. `shortfall_bytes` per stage of the plan that comes
    closest; `relaxations`, what would help by itself, the cheapest first."""

    def __init__(
        self, message: str, shortfall_bytes: Sequence[float], relaxations: Sequence[Relaxation] = ()
    ) -> None:
        super().__init__(message)
        self.shortfall_bytes = tuple(shortfall_bytes)
        self.relaxations = tuple(relaxations)

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[Any, ...]]:
        return InfeasibleError, (str(self), self.shortfall_bytes, self.relaxations)
