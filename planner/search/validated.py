"""Steps that are validated afterwards: where they are allowed, and make the found plan faster."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.planner.search.result import SearchResult
    from meshwright.planner.search.search import Search

ALLOWED = "post_validation"
PAYS = 0.98  # of the step without: within it, the simpler plan wins


def if_validated_pays(search: Search, found: SearchResult) -> SearchResult:
    """The result, or a faster plan on the best one's meshes whose steps are validated afterwards,
    under any schedule, where the user allows it and leaves it open."""
    problem, best = search.problem, found.best
    plan = best.plan
    alike = {(s.dp, s.tp, s.cp, s.ep) for s in plan.stages}
    free = search.restrictions.validated is None and ALLOWED in problem.allow
    if not free or not problem.target.gradients_come or len(plan.devices) == 1 or len(alike) > 1:
        return found
    if any(s.host for s in plan.stages) or search.programs.time.over():
        return found
    there = search.like(overrides=dataclasses.replace(search.overrides, post_validation=True))
    other = there.on_meshes_of(plan)
    if other is None or other.step_time_s >= PAYS * best.step_time_s:
        return found
    return found.led_by(other)
