"""Published plans against the search's, under one cost model.

For each plan of `plans.py`: its price, and that of the plan that `Search` finds for the same traced
model, cluster, batch, precision, optimizer and software (`like_theirs`: with the published
recompute, too; what is left is the merit of degrees, cuts and shardings). A ratio above 1 +
TOLERANCE is a defect of the search: the published plan is in its space or should be. A published
plan that does not fit in memory by our model is compared, too, but can't fail: what it buys with
memory that we say isn't there, ours can't buy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.planner.overrides import Overrides, plan_overrides
from meshwright.planner.plan import GIB, InfeasibleError, Plan, describe, seconds
from meshwright.planner.pricing import Evaluator, Prediction
from meshwright.planner.search import Search, SearchResult
from scripts.experts.plans import Expert

TOLERANCE = 0.005
PIN_TOLERANCE = 0.01
BOUNDLESS = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Theirs and ours; `ours` is None where the search says that nothing fits. `again` is the step
    of the search restricted to their decisions, or why it could not be; faster than theirs where
    the search shards better what they leave open."""

    expert: Expert
    theirs: Plan
    their_step_s: float
    short_gib: float
    ours: SearchResult | None
    search_s: float
    again: float | str | None

    @property
    def ratio(self) -> float:
        return self.ours.best.step_time_s / self.their_step_s if self.ours else float("inf")

    @property
    def failed(self) -> bool:
        fits = not self.short_gib
        apart = isinstance(self.again, str) or (
            self.again is not None and self.again / self.their_step_s > 1 + PIN_TOLERANCE
        )
        return fits and (self.ratio > 1 + TOLERANCE or apart)


def compare(
    experts: Iterable[Expert],
    *,
    pin: bool = False,
    like_theirs: bool = False,
    time_limit_s: float | None = None,
) -> Iterator[Comparison]:
    """One comparison per published plan; equal work is searched once, each for so long."""
    found: dict[tuple[Any, ...], tuple[SearchResult | None, float]] = {}
    for expert in experts:
        theirs, predicted = _theirs(expert)
        recompute = _recompute(theirs) if like_theirs else None
        work = (
            theirs.model,
            repr(expert.cluster),
            expert.target,
            expert.precision,
            expert.optimizer,
            expert.global_batch_size,
            recompute,
        )
        if work not in found:
            started = time.process_time()
            result = _search(expert, Overrides(recompute=recompute), time_limit_s)
            found[work] = result, time.process_time() - started
        ours, search_s = found[work]
        yield Comparison(
            expert=expert,
            theirs=theirs,
            their_step_s=predicted.step_time_s,
            short_gib=max(predicted.shortfall_bytes(expert.cluster)) / GIB,
            ours=ours,
            search_s=search_s,
            again=_pinned(expert, theirs) if pin else None,
        )


def _theirs(expert: Expert) -> tuple[Plan, Prediction]:
    """The fastest reading that fits, else the one that lacks least; of pinned decisions the best
    plan, in boundless memory where none fits."""
    if expert.pinned is not None:
        device = replace(expert.cluster.device, memory_bytes=BOUNDLESS)
        roomy = replace(expert, cluster=replace(expert.cluster, device=device))
        found = _search(expert, expert.pinned) or _search(roomy, expert.pinned)
        assert found is not None
        return found.best.plan, found.best.evaluation.prediction
    problem = _problem(expert)
    evaluator, plans = Evaluator(problem), expert.plans(problem.graph)
    priced = [(plan, evaluator.price(plan).prediction) for plan in plans]
    return min(priced, key=lambda p: (max(p[1].shortfall_bytes(expert.cluster)), p[1].step_time_s))


def _recompute(plan: Plan) -> str | None:
    """The one policy of all blocks, if there is one."""
    policies = {policy for stage in plan.stages for policy in stage.policies}
    return policies.pop() if len(policies) == 1 else None


def _problem(expert: Expert) -> Problem:
    graph, factors = expert.traced()
    return Problem(
        graph=graph,
        factors=factors,
        cluster=expert.cluster,
        precision=expert.precision,
        optimizer=expert.optimizer,
        target=expert.target,
    )


def _search(
    expert: Expert, overrides: Overrides, time_limit_s: float | None = None
) -> SearchResult | None:
    problem = _problem(expert)
    try:
        return Search(problem, expert.global_batch_size, overrides, time_limit_s=time_limit_s).run()
    except InfeasibleError:
        return None


def _pinned(expert: Expert, plan: Plan) -> float | str:
    """The step of the search with every decision of the plan given as an override."""
    graph, _ = expert.traced()
    try:
        found = _search(expert, plan_overrides(plan, graph))
    except ValueError as error:
        return str(error)
    return found.best.step_time_s if found else "does not fit"


def show(c: Comparison) -> str:
    """Four lines: the ratio, both plans, what is taken for granted."""
    measured = f" (measured {c.expert.measured_s:.4g} s)" if c.expert.measured_s else ""
    short = f", lacks {c.short_gib:.3g} GiB" if c.short_gib else ""
    lines = [
        f"{c.expert.name}  [{c.expert.source}]" + ("  FAILED" if c.failed else ""),
        f"  theirs {seconds(c.their_step_s)}{measured}{short}: {describe(c.theirs)}",
    ]
    if c.ours is None:
        lines.append(f"  ours: nothing fits, by {c.search_s:.1f} CPU-s of search")
    else:
        lines.append(
            f"  ours   {seconds(c.ours.best.step_time_s)}, ratio {c.ratio:.3f}: "
            f"{describe(c.ours.best.plan)}; {c.search_s:.1f} CPU-s of search, "
            f"bound {seconds(c.ours.bound_s)}" + ("" if c.ours.complete else ", not complete")
        )
    if c.again is not None:
        again = c.again if isinstance(c.again, str) else f"{c.again / c.their_step_s:.4f} of theirs"
        lines.append(f"  theirs as overrides: {again}")
    return "\n".join([*lines, *([f"  {c.expert.note}"] if c.expert.note else [])])


def summary(comparisons: list[Comparison]) -> str:
    """How many, and the worst, of those that fit; the others apart."""
    fitting = [c for c in comparisons if not c.short_gib]
    other = len(comparisons) - len(fitting)
    if not fitting:
        return f"none of {other} published plans fits by our memory model"
    faster = sum(c.ratio <= 1 for c in fitting)
    worst = max(fitting, key=lambda c: c.ratio)
    return (
        f"ours is no slower than theirs in {faster} of {len(fitting)}; worst ratio "
        f"{worst.ratio:.3f} ({worst.expert.name}); {sum(c.failed for c in fitting)} failed"
        + (f"; {other} more don't fit by our memory model" if other else "")
    )
