"""A plan that was made before, checked against the problem and priced; nothing is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshwright.costmodel.operators import Problem
from meshwright.decisions.decision import Decision, Request, made_now
from meshwright.executor.ranks import launch
from meshwright.planner.decisions import DECISIONS
from meshwright.planner.overrides import check_plan_for
from meshwright.planner.plan import (
    InfeasibleError,
    Plan,
    PlanError,
    kept_together,
    margin_beside,
    sized,
    why_unserved,
)
from meshwright.planner.pricing import Evaluator, Prediction, served_shortage
from meshwright.planner.report import explain_plan
from meshwright.profiles.cluster import Cluster


def take_plan(
    plan_or_file: Plan | str | Path,
    problem: Problem,
    request: Request,
    phases_s: Mapping[str, float],
    memory_margin: float,
) -> Decision:
    """The plan, checked and priced by one rank for all. Raises `PlanError` for a plan of another
    problem, `InfeasibleError` for one that does not fit, or leaves less than a `memory_margin` that
    was asked for."""

    def price() -> Decision:
        plan = plan_or_file if isinstance(plan_or_file, Plan) else Plan.load(plan_or_file)
        _check_made_for(plan, problem, request.global_batch_size)
        check_plan_for(plan, problem.target)
        priced = Evaluator(problem).price(plan)
        check_memory(priced.prediction, problem.cluster)
        _check_margin(priced.prediction, problem.cluster, memory_margin)
        report = explain_plan(priced, priced.priced[0].setting.problem, phases_s)
        report = replace(report, made=made_now(problem.graph))
        return Decision(plan=plan, report=report, prediction=priced.prediction)

    return launch.agree_on(price)


def _check_made_for(plan: Plan, problem: Problem, global_batch_size: int) -> None:
    for name, ours, theirs in (
        ("global_batch_size", global_batch_size, plan.global_batch_size),
        ("precision", problem.precision, plan.precision),
    ):
        if ours != theirs:
            raise PlanError(
                f"={theirs!r}, called with {ours!r}",
                place=f"plan: made for {name}",
                legal=f"{name}={theirs!r}",
                way_out=f"pass {name}={theirs!r}, or plan again",
            )
    for name, decision in DECISIONS.items():
        word = decision.word
        refused = decision.allowed == "numbers" and word not in problem.allow
        for k, holder in enumerate(plan.having(name) if refused else ()):
            if not decision.uses(value := getattr(holder, name)):
                continue
            of_stage = f"stage {k}: " * (decision.acts != "plan")
            raise PlanError(
                f"={value!r}: numbers change with it, and it is not allowed",
                place=f"plan: {of_stage}{name}",
                legal=decision.off,
                way_out=f'give allow=["{word}"] (--allow {word}), or another plan',
            )
    if plan.is_served and (why := why_unserved(problem)):
        raise PlanError(
            f": {why}",
            place="plan: parameter servers",
            legal="none",
            way_out="plan again (without plan=)",
        )
    if problem.stepped.matrices and (
        plan.stepping != "at_end" or any(stage.host.states for stage in plan.stages)
    ):
        raise PlanError(
            f": {problem.optimizer} steps each matrix whole, on one of the ranks that hold it",
            place="plan: states in host memory, or stepped before or after the end of a step",
            legal="states on the devices, stepped at the end of a step",
            way_out="plan with an optimizer of elements: optimizer='adamw', or plan again",
        )
    if plan.num_microbatches > 1 and problem.meetings:
        raise PlanError(
            f"={plan.num_microbatches}: {kept_together(problem.meetings)}",
            place="plan: num_microbatches",
            legal="1",
            way_out="or plan again (without plan=)",
        )
    cluster = problem.cluster
    if plan.num_ranks != cluster.num_devices:
        raise PlanError(
            f"made for {plan.num_ranks} ranks, but the cluster has {cluster.num_devices} devices "
            f"({cluster.describe()})",
            place="plan",
            legal=f"a cluster of {plan.num_ranks} devices",
            way_out=f"use a cluster of {plan.num_ranks} devices, pass a plan file for "
            f"{cluster.num_devices} ranks, or plan again (without plan=)",
        )


def check_memory(prediction: Prediction, cluster: Cluster) -> None:
    """Raise `InfeasibleError` for a given plan that does not fit, as a searched one does."""
    host = cluster.host
    rooms = (0, 0) if host is None else (host.room_bytes, host.flash_room_bytes)
    needs = prediction.host_memory_bytes, prediction.flash_bytes
    shortfalls = prediction.host_shortfall(cluster), prediction.flash_shortfall(cluster)
    kinds = ("host", "less"), ("flash", "less nvme")
    for room, needed, lacking, (kind, less) in zip(rooms, needs, shortfalls, kinds, strict=True):
        if lacking:
            raise InfeasibleError(
                f"plan: needs {sized(max(needed))} of the {sized(room)} that a node's {kind} has "
                f"for it, {sized(lacking)} more. Way out: {less} in the plan's offload, a higher "
                "zero, or plan again",
                [float(lacking)],
            )
    room = cluster.device.memory_bytes
    if prediction.server_bytes > room:
        most = prediction.fullest_bytes
        said = served_shortage(prediction.server_bytes, most, most - room, cluster)
        raise InfeasibleError(f"plan: {said}", [float(most - room)])
    short = prediction.shortfall_bytes(cluster)
    if any(short):
        by_stage = ", ".join(f"stage {k}: {sized(x)}" for k, x in enumerate(short) if x)
        raise InfeasibleError(
            f"plan: does not fit the {sized(room)} of {cluster.device.name}; shortfall by "
            f'stage: {by_stage}. Way out: recompute "full", a higher zero, more micro-batches or '
            "stages in the plan, or plan again",
            short,
        )


def _check_margin(prediction: Prediction, cluster: Cluster, memory_margin: float) -> None:
    """Raise `InfeasibleError` for a plan that leaves less than the margin that was asked for."""
    memory, peaks = cluster.device.memory_bytes, prediction.peak_memory_bytes
    room = memory * (1 - memory_margin)
    if max(peaks) > room:
        raise InfeasibleError(
            f"plan: takes {sized(max(peaks))} of the {sized(memory)} of "
            f"{cluster.device.name}; memory_margin={memory_margin:g} leaves it {sized(room)}. "
            f"Way out: memory_margin={margin_beside(max(peaks), memory):g} or "
            "none, or plan again (without plan=)",
            [max(0.0, peak - room) for peak in peaks],
        )
