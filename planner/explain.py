"""From a search or a given plan to its report: reasons, alternatives, what is assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from costmodel.factors import FactorTable
from costmodel.graph import Graph
from costmodel.strategies import indivisible
from planner.alternatives import Alternative
from planner.check import check_runs
from planner.data_axis import data_layout
from planner.divisors import divisors
from planner.evaluate import Evaluation
from planner.plan import Plan, PlanError
from planner.report import (
    GIB,
    Report,
    Row,
    breakdown,
    describe,
    seconds,
    stage_rows,
    why_slower,
)
from planner.search import SearchResult
from profiles.cluster import Cluster

WORTH_SPLITTING = ("heads", "in", "out", "vocab")  # factors whose indivisibility costs a plan
MAX_EXCLUDED = 6


def explain_search(
    result: SearchResult,
    graph: Graph,
    table: FactorTable,
    cluster: Cluster,
    phases_s: Mapping[str, float],
) -> Report:
    """The report of a search."""
    best = result.best.evaluation
    chosen = breakdown(best)
    runners = [
        {
            "plan": describe(c.plan),
            "step_time_s": c.step_time_s,
            "slower": c.step_time_s / result.best.step_time_s - 1,
            "why": why_slower(chosen, breakdown(c.evaluation)),
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
    return _report(
        best, graph, table, cluster, runners=runners, solver=proofs,
        proof={"bound_s": result.bound_s, "gap": result.gap, "complete": result.complete},
        phases_s={**phases_s, **result.phases_s},
        notes=(*_runs(result.best.plan), *result.notes),
    )  # fmt: skip


def alternative_row(alternative: Alternative, best: Evaluation) -> dict[str, Any]:
    """An alternative as data, against the chosen plan; differences are its seconds less ours."""
    draft, chosen = alternative.draft, breakdown(best)
    row: dict[str, Any] = {"family": alternative.family, "plan": None}
    if alternative.bound_s is not None:
        row["bound_s"] = alternative.bound_s
    if draft is None and alternative.bound_s is not None:
        why = f"at least {seconds(alternative.bound_s)}; not explored in the time given"
        return {**row, "why": why}
    if draft is None:
        short = alternative.shortfall_bytes or 0.0
        lacks = f"the leanest lacks {short / GIB:.3g} GiB a device"
        why = f"no plan with equal stages was found to fit{': ' + lacks if short else ''}"
        return {**row, "shortfall_bytes": short, "why": why}
    parts = breakdown(draft.evaluation)
    ours, theirs = chosen.as_dict(), parts.as_dict()
    return {
        **row,
        "plan": describe(draft.plan),
        "step_time_s": draft.step_time_s,
        "slower": draft.step_time_s / best.prediction.step_time_s - 1,
        "components_s": {name: theirs[name] - ours[name] for name in ours},
        "why": why_slower(chosen, parts),
    }


def _runs(plan: Plan) -> list[str]:
    """What the executor can't run yet of a chosen plan."""
    try:
        check_runs(plan)
    except PlanError as error:
        return [f"{error}; executable=True asks for the best plan that it runs"]
    return []


def explain_plan(
    evaluation: Evaluation,
    graph: Graph,
    table: FactorTable,
    cluster: Cluster,
    phases_s: Mapping[str, float],
) -> Report:
    """The report of a plan that was given, not searched."""
    return _report(
        evaluation, graph, table, cluster, runners=[], solver=[], proof={},
        phases_s=phases_s,
        notes=("the plan was given: nothing was searched",),
    )  # fmt: skip


def _report(
    evaluation: Evaluation, graph: Graph, table: FactorTable, cluster: Cluster, *,
    runners: Sequence[Row], solver: Sequence[Row], proof: Row,
    phases_s: Mapping[str, float], notes: Sequence[str],
) -> Report:  # fmt: skip
    plan, prediction = evaluation.plan, evaluation.prediction
    summary = {
        "parameters": graph.num_parameters(),
        "cluster": cluster.describe(),
        "chosen": describe(plan),
        "step_time_s": prediction.step_time_s,
        "rows_per_s": plan.global_batch_size / prediction.step_time_s,
        "mfu": prediction.mfu,
        "bubble_fraction": prediction.bubble_fraction,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "memory_bytes": cluster.device.memory_bytes,
        "rests_on": evaluation.rests_on(),
        **proof,
    }
    return Report(
        plan=plan,
        summary=summary,
        stages=stage_rows(evaluation),
        components=breakdown(evaluation),
        runners_up=runners,
        solver=solver,
        assumptions=(*cluster.assumptions, *_assumptions(evaluation, graph)),
        notes=(*notes, *graph.notes, *_limits(evaluation, graph, table, cluster)),
        phases_s=phases_s,
        timeline=evaluation.timeline.chrome_trace(),
    )


def _assumptions(evaluation: Evaluation, graph: Graph) -> list[str]:
    shares, target = evaluation.rests_on(), evaluation.target
    lines = [
        f"of the operators' seconds {shares['measured']:.0%} were measured on this device, "
        f"{shares['interpolated']:.0%} interpolated, {shares['modelled']:.0%} modelled from the "
        "catalog's efficiency curves (`meshwright profile` measures)",
        f"target {target.name}: kernels fused: {target.fusion}; gradient reduction "
        f"{'overlapped' if target.overlap_gradients else 'not overlapped'} with the backward; "
        f"sends {'overlapped' if target.overlap_sends else 'not overlapped'}",
    ]
    ops = {op.short for op in graph.ops}
    if "batch_norm" in ops:
        lines.append(
            "batch norm statistics are per micro-batch, over all data-parallel ranks; its blocks "
            "are not recomputed"
        )
    if any(op.short == "dropout" for op in graph.ops):
        lines.append(
            "dropout masks come from a counter over global indices: the same under every plan"
        )
    return lines


def _limits(
    evaluation: Evaluation, graph: Graph, table: FactorTable, cluster: Cluster
) -> list[str]:
    """Operators without a rule, gathers on the data axis, sizes that a degree does not divide."""
    notes = []
    unknown = sorted({op.target for op in graph.ops if not table.ops[op.name].known})
    if unknown:
        notes.append(
            f"no sharding rule for {', '.join(unknown)}: run in full on every tensor-parallel rank"
        )
    dp = max(stage.dp for stage in evaluation.plan.stages)
    if dp > 1:
        gathered = data_layout(graph, table, graph.batch_size).gathered
        if gathered:
            notes.append(
                "the whole micro-batch is gathered on every data-parallel rank for "
                f"{', '.join(gathered[:5])}"
            )
    return notes + _excluded(graph, table, cluster)


def _excluded(graph: Graph, table: FactorTable, cluster: Cluster) -> list[str]:
    """Sizes that tensor-parallel degrees of a node do not divide, repeats said once."""
    node = cluster.devices_per_node
    sizes: dict[str, set[int]] = {}
    for degree in divisors(node)[1:]:
        for op in graph.ops:
            for factor, size in indivisible(table, op, degree).items():
                if factor in WORTH_SPLITTING:
                    name = re.sub(r"\.\d+(?=[.:])", ".*", op.key)
                    sizes.setdefault(f"{name} ({factor} = {size})", set()).add(degree)
    return [
        f"not split {' or '.join(map(str, sorted(degrees)))} ways: {where}; "
        "a padded size would divide"
        for where, degrees in list(sizes.items())[:MAX_EXCLUDED]
    ]
