"""A plan that is searched: checked overrides, the search on one rank, its report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.apart import best_apart
from meshwright.costmodel.operators import Problem
from meshwright.decisions import Decision, Request, check_units, in_tf32, made_now
from meshwright.executor.ranks import launch
from meshwright.planner.alternatives import (
    CHUNKS,
    Answers,
    explain_search,
    logits_bind,
    with_ways_out,
)
from meshwright.planner.overrides import (
    OverrideError,
    allowed_without_effect,
    check_overrides,
    restrict,
    without_effect,
)
from meshwright.planner.plan import (
    InfeasibleError,
    Plan,
    PlanError,
    problem_in,
    seconds,
    with_loss_in,
)
from meshwright.planner.search import Search, SearchResult, some_plan_fits
from meshwright.planner.stages import BlockPrograms
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.profile import load_profile
from meshwright.profiles.steps import RunKind
from meshwright.served_search import best_served, workers_of

FASTER = 0.99  # times the step with a loss as traced: parts are taken for less


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
    return launch.agree_on(lambda: _of_any_replicas(problem, request, phases_s, programs))


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
    return launch.agree_on(lambda: _of_any_replicas(there, request, {}, None).plan)


def _of_any_replicas(
    problem: Problem,
    request: Request,
    phases_s: Mapping[str, float],
    programs: BlockPrograms | None,
) -> Decision:
    """The best plan, of one replica or of several that train apart."""

    def search(of: Problem, asked: Request) -> Decision:
        if of is not problem:
            _check(of, asked)
        return _searched(of, asked, phases_s, programs if of is problem else None)

    return best_apart(problem, request, search)


def _check(problem: Problem, request: Request) -> None:
    if (request.overrides.replicas or 1) > 1:  # of each replica, when it is searched
        return
    check_overrides(
        request.overrides,
        num_devices=workers_of(problem, request),
        global_batch_size=request.global_batch_size,
        num_blocks=len(problem.graph.blocks),
        sequences=problem.factors.sequence is not None,
    )


def search_of(problem: Problem, request: Request, programs: BlockPrograms | None = None) -> Search:
    """The search for a plan, with its loss in the parts that are asked for, which has not begun,
    with `programs` if they are of such a graph."""
    parts = request.overrides.everywhere("chunked_loss")
    if parts is not None:
        try:
            problem = problem_in(problem, parts)
        except PlanError as error:
            raise OverrideError.of(error, "override") from None
    if programs is not None and programs.graph.loss_parts != problem.graph.loss_parts:
        programs = None
    return Search(
        problem,
        request.global_batch_size,
        request.overrides,
        memory_margin=request.memory_margin,
        objective=request.objective,
        time_limit_s=request.time_limit_s,
        programs=programs,
    )


def with_a_plan(search: Search) -> Search:
    """The search, or that with the loss in `CHUNKS` where this one alone has a plan and nothing is
    said of parts."""
    if search.overrides.everywhere("chunked_loss") is not None or some_plan_fits(search):
        return search
    parted = with_loss_in(search.problem, CHUNKS)
    try:  # shardings may name what is gone
        other = None if parted is None else search.like(problem=parted)
    except (OverrideError, PlanError):
        return search
    return other if other is not None and some_plan_fits(other) else search


def _searched(
    problem: Problem,
    request: Request,
    phases_s: Mapping[str, float],
    programs: BlockPrograms | None,
) -> Decision:
    def unserved() -> SearchedPlan:
        return _unserved(problem, request, phases_s, programs)

    return best_served(problem, request, phases_s, unserved)


def _unserved(
    problem: Problem,
    request: Request,
    phases_s: Mapping[str, float],
    programs: BlockPrograms | None,
) -> SearchedPlan:
    search, result, whole = _best(problem, request, programs)
    report = explain_search(result, search.problem, phases_s)
    restricted = restrict(request.overrides, search.problem.graph, allow=problem.allow)
    unheeded = without_effect(restricted, result.best.plan, result.best.assignments)
    made, answers = made_now(problem.graph), Answers(search=search, result=result)
    unheeded += allowed_without_effect(problem.allow, problem.precision)
    plan, notes = replace(report.plan, made=made), (*report.notes, *unheeded, *whole)
    return SearchedPlan(
        plan=plan,
        report=replace(report, plan=plan, notes=notes, made=made, deferred=answers),
        prediction=result.best.evaluation.prediction,
        programs=search.programs,
    )


def _best(
    problem: Problem, request: Request, programs: BlockPrograms | None
) -> tuple[Search, SearchResult, list[str]]:
    """The search with the best plan: with the loss in as many parts as is asked for; else as
    traced, and where nothing fits then or its logits take too much, in `CHUNKS`; then what there is
    without, in words."""
    parts, began = request.overrides.everywhere("chunked_loss"), time.monotonic()
    search = search_of(problem, request, programs)
    limit = search.programs.time

    def parted() -> tuple[Search, SearchResult] | None:
        return None if parts else _in_chunks(problem, request, programs, began)

    with limit.until(limit.after(request.time_limit_s)):
        try:
            result = search.run()
        except InfeasibleError as error:
            if (found := parted()) is not None:
                return *_after(search, *found), ["no plan fits with the loss in one part"]
            raise (error if limit.over() else with_ways_out(search, error)) from None
        binding = not parts and not limit.over() and logits_bind(search, result)
    found, whole_s = parted() if binding else None, result.best.step_time_s
    if found is None:
        return search, result, []
    if found[1].best.step_time_s < FASTER * whole_s:
        note = f"with the loss in one part the best plan takes {seconds(whole_s)}"
        return *_after(search, *found), [note]
    return *_after(found[0], search, result), []


def _after(before: Search, search: Search, result: SearchResult) -> tuple[Search, SearchResult]:
    """A search and its result, whose seconds are those of one before, too."""
    spent = Counter(before.phases_s)
    spent.update(result.phases_s)
    return search, replace(result, phases_s=dict(spent))


def _in_chunks(
    problem: Problem, request: Request, programs: BlockPrograms | None, began: float
) -> tuple[Search, SearchResult] | None:
    """The search with the loss in `CHUNKS`, in the time that is left; None where there is none, no
    such loss, or no plan."""
    parted, left_s = with_loss_in(problem, CHUNKS), request.time_limit_s
    if left_s is not None:
        left_s -= time.monotonic() - began
    if parted is None or (left_s is not None and left_s <= 0):
        return None
    try:  # shardings may name what is gone
        search = search_of(parted, replace(request, time_limit_s=left_s), programs)
        result = search.run()
    except (InfeasibleError, OverrideError, PlanError):
        return None
    search.time_limit_s = request.time_limit_s  # of answers that are asked for later
    return search, result
