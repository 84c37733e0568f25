"""The terms of a plan's step and what they are made of: by how many seconds each component of it
could be corrected.

Pricing is the same with the component's correction a little larger: the difference is what the
component adds to a term, behind whatever hides it and through the simulated schedule. Where nothing
is hidden that is exact, elsewhere it holds for corrections near 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.costmodel.operators import Problem
from meshwright.planner.plan import Plan, passes_of
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator
from meshwright.profiles.profile import Profile
from meshwright.profiles.steps import COMPONENTS, NO_CORRECTIONS, STEP, Correction, Corrections

MORE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedTerm:
    """Seconds of a term of a step without corrections, and each component's part of them."""

    seconds: float
    parts: Mapping[str, float]


def priced_terms(plan: Plan, problem: Problem, profile: Profile) -> dict[str, PricedTerm]:
    """The terms of a plan's step on a profile, whose corrections are left out. Raises `PlanError`
    as `check_plan` does."""

    def under(corrections: Corrections) -> dict[str, float]:
        own = replace(problem, profile=replace(profile, corrections=corrections))
        return terms_of(evaluator.under(own).price(plan))

    evaluator = Evaluator(problem)
    plain = under(NO_CORRECTIONS)
    parts: dict[str, dict[str, float]] = {term: {} for term in plain}
    for name in COMPONENTS:
        larger = Correction(factor=1 + MORE, plans=0, samples=0)
        for term, seconds in under(Corrections(found={name: larger})).items():
            if abs(seconds - plain[term]) > 1e-9 * plain[term]:
                parts[term][name] = (seconds - plain[term]) / MORE
    return {term: PricedTerm(seconds=plain[term], parts=parts[term]) for term in plain}


def terms_of(evaluation: Evaluation) -> dict[str, float]:
    """Seconds of a `train_step` by term: forward, backward and reduction are the sums over the
    device groups, the step (without the optimizer's) is the mean."""
    m, groups = passes_of(evaluation.plan), len(evaluation.plan.devices)

    def total(name: str) -> float:
        return float(sum(getattr(stage, name) for stage in evaluation.stages))

    step_s = evaluation.prediction.step_time_s - total("optimizer_s") / groups
    return {
        "forward": m * total("forward_s"),
        "backward": m * total("backward_s"),
        "reduction": total("reduce_s"),
        STEP: max(step_s, 0.0),
    }
