"""What a search found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.drafts import Candidate, MeshChoice, PlanDraft
from meshwright.planner.intra_op import Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The chosen plan first, runners-up after it (some of them drafts); solver certificates of the
    chosen plan's block classes by block name; CPU seconds spent per phase; what was left out and
    why. `meshes` are those whose combinations were offered, `drafts` the plans simulated.

    No plan that the search may choose takes less than `bound_s` under the cost model; 0 where
    there was no time to bound them all. `complete` says that no time limit cut the search, or a
    block's program, short.
    """

    candidates: tuple[Candidate | PlanDraft, ...]
    certificates: Mapping[str, Certificate]
    phases_s: Mapping[str, float]
    notes: tuple[str, ...]
    meshes: tuple[MeshChoice, ...]
    drafts: tuple[PlanDraft, ...]
    bound_s: float
    complete: bool = True

    @property
    def best(self) -> Candidate:
        best = self.candidates[0]
        assert isinstance(best, Candidate)
        return best

    @property
    def gap(self) -> float:
        """Fraction by which the chosen step may exceed the fastest there is; inf without a
        bound."""
        return max(0.0, self.best.step_time_s / self.bound_s - 1.0) if self.bound_s else math.inf
