"""The report of a search: its plan, the next best ones, the proofs, and alternatives as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.planner import report
from meshwright.planner.alternatives.alternatives import Alternative
from meshwright.planner.plan import Plan, PlanError, check_runs, describe, seconds, sized, slower
from meshwright.planner.pricing import Evaluation
from meshwright.planner.search import TIE, SearchResult, looks_of, why_simpler


def explain_search(
    result: SearchResult, problem: Problem, phases_s: Mapping[str, float]
) -> report.Report:
    """The report of a search; its deferred answers are not in it yet."""
    best = result.best.evaluation
    chosen = report.busiest(report.device_groups(best))
    runners = [
        {
            "plan": describe(c.plan),
            "step_time_s": c.step_time_s,
            **_slower(c.step_time_s, result.best.step_time_s),
            **_against(chosen, c.evaluation),
        }
        for c in result.candidates[1:]
    ]
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
        notes=(
            *_not_run_yet(result.best.plan),
            *_ties(result, problem.cluster.device.memory_bytes),
            *result.notes,
        ),
        searched=report.Searched(
            runners_up=runners, solver=proofs, bound={"complete": result.complete, **bound}
        ),
    )


def _slower(step_s: float, chosen_s: float) -> dict[str, Any]:
    """How much slower, and whether prices can't tell the two apart."""
    more = step_s / chosen_s - 1
    return {"slower": more, "tie": abs(more) <= TIE}


def _ties(result: SearchResult, memory_bytes: float) -> list[str]:
    """What simplicity costs, where a plan that is less simple is predicted to be faster."""
    best = result.best
    fastest = min(result.candidates, key=lambda c: c.step_time_s)
    if fastest.step_time_s >= best.step_time_s:
        return []
    simpler = why_simpler(
        *(
            looks_of(c.plan, c.evaluation.prediction.fullest_bytes, memory_bytes)
            for c in (best, fastest)
        )
    )
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


def _not_run_yet(plan: Plan) -> list[str]:
    """A note, where the executor can't run the plan yet."""
    try:
        check_runs(plan)
    except PlanError as error:
        return [f"{error}; executable=True asks for the best plan that it runs"]
    return []


def alternative_row(alternative: Alternative, best: Evaluation) -> dict[str, Any]:
    """An alternative as data, against the chosen plan; `components_s` are its seconds less ours."""
    draft, chosen = alternative.draft, report.busiest(report.device_groups(best))
    row: dict[str, Any] = {"family": alternative.family, "plan": None}
    if alternative.excluded:
        row["excluded"] = list(map(str, alternative.excluded))
    if alternative.bound_s is not None:
        row["bound_s"] = alternative.bound_s
    if draft is None and alternative.bound_s is not None:
        least = f"at least {seconds(alternative.bound_s)}; " if alternative.bound_s else ""
        return {**row, "why": f"{least}not explored in the time given"}
    if draft is None:
        short = alternative.shortfall_bytes or 0.0
        lacks = f"the leanest lacks {sized(short)} a device"
        why = f"no plan with equal stages was found to fit{': ' + lacks if short else ''}"
        return {**row, "shortfall_bytes": short, "why": why}
    compared, other = _against(chosen, draft.evaluation), alternative.instead
    if other is not None:
        more = slower(other.step_time_s / best.prediction.step_time_s - 1)
        row["instead"] = {"plan": describe(other.plan), "step_time_s": other.step_time_s}
        compared["why"] += f"; its override alone gives no pipeline, {more}"
    return {
        **row,
        "plan": describe(draft.plan),
        "step_time_s": draft.step_time_s,
        **_slower(draft.step_time_s, best.prediction.step_time_s),
        **compared,
    }


def _against(chosen: report.Components, other: Evaluation) -> dict[str, Any]:
    """What another plan takes on its fullest device, the intervals of that and of its step, and its
    seconds less the chosen one's by component, as data and in words."""
    parts = report.busiest(report.device_groups(other))
    ours, theirs = chosen.as_dict(), parts.as_dict()
    return {
        "step_interval_s": list(other.prediction.step_interval_s),
        "peak_memory_bytes": other.prediction.fullest_bytes,
        "memory_interval_bytes": list(other.prediction.memory_interval_bytes),
        "components_s": {name: theirs[name] - ours[name] for name in ours},
        "why": report.why_slower(chosen, parts),
    }
