"""A plan that is searched: checked overrides, the search on one rank, its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.costmodel.operators import Problem
from meshwright.decisions import Decision, Request, check_units, in_tf32
from meshwright.executor.ranks import launch
from meshwright.planner.alternatives import Answers, explain_search, with_ways_out
from meshwright.planner.overrides import check_overrides, restrict, without_effect
from meshwright.planner.plan import InfeasibleError, Plan
from meshwright.planner.search import Search
from meshwright.planner.stages import BlockPrograms
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.profile import load_profile
from meshwright.profiles.steps import RunKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedPlan(Decision):
    """A plan with the block programs of its search, for the next search to reuse."""

    programs: BlockPrograms


def search_plan(
    problem: Problem,
    request: Request,
    phases_s: Mapping[str, float],
    before: Decision | None = None,
) -> Decision:
    """The best plan under the overrides, searched by one rank for all, on what was priced for the
    decision `before`. Raises `OverrideError` and `InfeasibleError`."""
    programs = before.programs if isinstance(before, SearchedPlan) else None
    _check(problem, request)
    return launch.agree_on(lambda: _searched(problem, request, phases_s, programs))


def plan_elsewhere(problem: Problem, request: Request, cluster: Cluster) -> Plan:
    """The best plan of a problem on another cluster, searched by one rank for all, for ranks that
    will run there. Raises `OverrideError` and `InfeasibleError`."""
    check_units(problem.precision, cluster)
    profile = problem.profile
    if profile is not None:
        run = RunKind(precision=problem.products, target=problem.target.name)
        profile = load_profile(cluster, run=run)
    there = replace(problem, cluster=cluster, profile=profile, tf32=False)
    there = in_tf32(there) if request.tf32 else there
    _check(there, request)
    return launch.agree_on(lambda: _searched(there, request, {}, None).plan)


def _check(problem: Problem, request: Request) -> None:
    check_overrides(
        request.overrides,
        num_devices=problem.cluster.num_devices,
        global_batch_size=request.global_batch_size,
        num_blocks=len(problem.graph.blocks),
        sequences=problem.factors.sequence is not None,
    )


def search_of(problem: Problem, request: Request, programs: BlockPrograms | None = None) -> Search:
    """The search for a plan, which has not begun."""
    return Search(
        problem,
        request.global_batch_size,
        request.overrides,
        memory_margin=request.memory_margin,
        objective=request.objective,
        time_limit_s=request.time_limit_s,
        programs=programs,
    )


def _searched(
    problem: Problem,
    request: Request,
    phases_s: Mapping[str, float],
    programs: BlockPrograms | None,
) -> SearchedPlan:
    search = search_of(problem, request, programs)
    limit = search.programs.time
    with limit.until(limit.after(request.time_limit_s)):
        try:
            result = search.run()
        except InfeasibleError as error:
            raise (error if limit.over() else with_ways_out(search, error)) from None
    report = explain_search(result, problem, phases_s)
    restricted = restrict(request.overrides, problem.graph, allow=problem.allow)
    unheeded = without_effect(restricted, result.best.plan, result.best.assignments)
    report = replace(report, notes=(*report.notes, *unheeded))
    return SearchedPlan(
        plan=result.best.plan,
        report=replace(report, deferred=Answers(search=search, result=result)),
        prediction=result.best.evaluation.prediction,
        programs=search.programs,
    )
