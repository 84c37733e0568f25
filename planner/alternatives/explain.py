"""The report of a search: its plan and the proofs, and other plans as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.planner import report
from meshwright.planner.alternatives.alternatives import Alternative
from meshwright.planner.plan import describe, seconds, sized, slower
from meshwright.planner.pricing import Evaluation
from meshwright.planner.search import TIE, SearchResult, looks_of, why_simpler


def explain_search(
    result: SearchResult, problem: Problem, phases_s: Mapping[str, float]
) -> report.Report:
    """The report of a search; its deferred answers are not in it yet."""
    best = result.best.evaluation
    proofs = [
        {
            "block": name,
            "objective_s": proof.objective,
            "gap": proof.gap,
            "time_s": proof.time_s,
            "solver": proof.solver,
            "integral_relaxation": proof.integral_relaxation,
        }
        for name, proof in result.certificates.items()
    ]
    bound = {"bound_s": result.bound_s, "gap": result.gap} if result.bound_s else {}
    return report.explain(
        best,
        problem,
        phases_s={**phases_s, **result.phases_s},
        notes=(*_ties(result, problem.cluster.device.memory_bytes), *result.notes),
        searched=report.Searched(solver=proofs, bound={"complete": result.complete, **bound}),
    )


def _ties(result: SearchResult, memory_bytes: float) -> list[str]:
    """The cost of simplicity, where a plan that is less simple is predicted to be faster."""
    best = result.best
    fastest = min(result.candidates, key=lambda c: c.step_time_s)
    if fastest.step_time_s >= best.step_time_s:
        return []
    looks = (
        looks_of(c.plan, c.evaluation.prediction.fullest_bytes, memory_bytes)
        for c in (best, fastest)
    )
    simpler = why_simpler(*looks)
    less = fastest.step_time_s / best.step_time_s - 1
    why = (
        f"so the simpler plan was chosen: it {simpler}"
        if simpler
        else "and with what prices are off by this one takes no longer"
    )
    resolved = f"less than prices resolve ({TIE:.0%})" if -less <= TIE else "within their errors"
    return [
        f"tie with {describe(fastest.plan)}: {less:+.1%}, {resolved}, {why}; "
        "objective='fastest' takes the other"
    ]


def alternative_row(other: Alternative, best: Evaluation) -> dict[str, Any]:
    """An alternative as data, against the chosen plan; `asks` are the overrides that find it."""
    row: dict[str, Any] = {"family": other.family, "plan": None, "asks": dict(other.asks)}
    row |= {"excluded": [*map(str, other.excluded)]} if other.excluded else {}
    if other.best is not None:
        row |= plan_row(other.best.evaluation, best)
    elif other.shortfall_bytes is not None:
        lacks = f": the closest lacks {sized(other.shortfall_bytes)} a device"
        row |= {"shortfall_bytes": other.shortfall_bytes}
        row |= {"why": f"no plan was found to fit{lacks if other.shortfall_bytes else ''}"}
    else:
        least = f"at least {seconds(other.bound_s)}; " if other.bound_s else ""
        why = f"{least}not searched to the end in the time given"
        row |= {"bound_s": other.bound_s, "why": why}
    if (smaller := other.smaller) is not None:
        plan, margin = plan_row(smaller.best.evaluation, best), smaller.memory_margin
        row["smaller_margin"] = {"memory_margin": margin, **plan}
        row["why"] += f"; {slower(plan['slower'])} with memory_margin={margin:g}: {plan['plan']}"
    return row


def plan_row(other: Evaluation, best: Evaluation) -> dict[str, Any]:
    """Another plan as data, against the chosen one; `components_s` are its seconds less ours."""
    prediction = other.prediction
    step_s, chosen_s = prediction.step_time_s, best.prediction.step_time_s
    more = step_s / chosen_s - 1
    chosen, parts = (report.busiest(report.device_groups(e)) for e in (best, other))
    ours, theirs = chosen.as_dict(), parts.as_dict()
    return {
        "plan": describe(other.plan),
        "step_time_s": step_s,
        "slower": more,
        "tie": abs(more) <= TIE,  # prices can't tell the two apart
        "step_interval_s": list(prediction.step_interval_s),
        "peak_memory_bytes": prediction.fullest_bytes,
        "memory_interval_bytes": list(prediction.memory_interval_bytes),
        "components_s": {name: theirs[name] - ours[name] for name in ours},
        "why": report.why_slower(chosen, parts),
    }
