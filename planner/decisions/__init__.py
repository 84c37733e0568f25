"""Decisions as records: what each may be, where it acts, what rules it out, how it is said. Flags,
overrides, the check of a plan, its file, the report and the diff read them."""

from meshwright.planner.decisions.decision import Contradiction, Decision, divisors
from meshwright.planner.decisions.table import (
    ALLOWABLE,
    BY_BLOCK,
    CHOICES,
    CONTRADICTIONS,
    DECISIONS,
    FORBIDDABLE,
    FORBIDS,
    MESH,
    OFFLOADS,
    PLACEMENTS,
    SHARING,
    ZERO,
    taken,
)

__all__ = [
    "ALLOWABLE", "BY_BLOCK", "CHOICES", "CONTRADICTIONS", "DECISIONS", "FORBIDDABLE", "FORBIDS",
    "MESH", "OFFLOADS", "PLACEMENTS", "SHARING", "ZERO", "Contradiction", "Decision", "divisors",
    "taken",
]  # fmt: skip
