"""From a search or a given plan to its report: reasons, alternatives, what is assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules.traits import traits_of
from meshwright.costmodel.sharding.data_axis import DataLayout, data_layout
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Assignment
from meshwright.costmodel.sharding.strategies import transition
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.divisors import divisors
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.words import GIB, describe, seconds
from meshwright.planner.pricing.evaluate import Evaluation
from meshwright.planner.report.alternatives import Alternative
from meshwright.planner.report.indivisible import divided, divided_notes, excluded
from meshwright.planner.report.report import Report, Row, breakdown, stage_rows, why_slower
from meshwright.planner.search.search import SearchResult
from meshwright.profiles.cluster import Cluster

MAX_EXCLUDED = 6  # that are named in the notes


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
        best,
        graph,
        table,
        cluster,
        result.best.assignments,
        runners=runners,
        solver=proofs,
        proof={"bound_s": result.bound_s, "gap": result.gap, "complete": result.complete},
        phases_s={**phases_s, **result.phases_s},
        notes=(*_runs(result.best.plan), *result.notes),
    )


def alternative_row(alternative: Alternative, best: Evaluation) -> dict[str, Any]:
    """An alternative as data, against the chosen plan; differences are its seconds less ours."""
    draft, chosen = alternative.draft, breakdown(best)
    row: dict[str, Any] = {"family": alternative.family, "plan": None}
    if alternative.excluded:
        row["excluded"] = list(map(str, alternative.excluded))
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
        evaluation,
        graph,
        table,
        cluster,
        check_plan(evaluation.plan, graph, table),
        runners=[],
        solver=[],
        proof={},
        phases_s=phases_s,
        notes=("the plan was given: nothing was searched",),
    )


def _report(
    evaluation: Evaluation,
    graph: Graph,
    table: FactorTable,
    cluster: Cluster,
    assignments: Sequence[Mapping[str, Assignment]],
    *,
    runners: Sequence[Row],
    solver: Sequence[Row],
    proof: Row,
    phases_s: Mapping[str, float],
    notes: Sequence[str],
) -> Report:
    plan, prediction = evaluation.plan, evaluation.prediction
    shares = divided(plan, graph, table, assignments)
    refused = excluded(graph, table, _degrees(plan, cluster))
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
        stages=[
            row | {"tp_flops": share.flops, "tp_parameters": share.parameters}
            for row, share in zip(stage_rows(evaluation), shares, strict=True)
        ],
        components=breakdown(evaluation),
        runners_up=runners,
        solver=solver,
        assumptions=(*cluster.assumptions, *_assumptions(evaluation, graph)),
        notes=(
            *notes,
            *graph.notes,
            *_limits(evaluation, graph, table),
            *divided_notes(shares, graph, table, searched=bool(proof)),
            *map(str, refused[:MAX_EXCLUDED]),
        ),
        excluded=[each.as_dict() for each in refused],
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
    traits = [traits_of(op) for op in graph.ops]
    if any(each.batch_statistics for each in traits):
        lines.append(
            "batch norm statistics are per micro-batch, over all data-parallel ranks; its blocks "
            "are not recomputed"
        )
    if any(each.experts == "dispatch" for each in traits):
        lines.append(
            "the busiest of the ranks that share experts out gets "
            f"{target.expert_imbalance:g} times the mean of tokens (expert_imbalance)"
        )
    if any(each.draw and each.draw.kind == "dropout" for each in traits):
        lines.append(
            "dropout masks come from a counter over global indices: the same under every plan"
        )
    return lines


def _limits(evaluation: Evaluation, graph: Graph, table: FactorTable) -> list[str]:
    """Operators without a rule, gathers on the data axis, rows that meet."""
    notes = []
    unknown = sorted({op.target for op in graph.ops if not table.ops[op.name].known})
    if unknown:
        notes.append(
            f"no sharding rule for {', '.join(unknown)}: run in full on every tensor-parallel rank"
        )
    layout = data_layout(graph, table, graph.batch_size)
    if max(stage.dp for stage in evaluation.plan.stages) > 1 and layout.gathered:
        notes.append(
            "the whole micro-batch is gathered on every data-parallel rank for "
            f"{_several(layout.gathered)}"
        )
    mixing = [op.key for op in graph.ops if _mixes_rows(op, layout)]
    count = evaluation.plan.num_microbatches
    if count > 1 and mixing:
        notes.append(
            f"rows meet in {_several(mixing)}: each of {count} micro-batches by itself, which is "
            "another loss than the whole batch's if that depends on it; num_microbatches=1 keeps "
            "them together"
        )
    return notes


def _mixes_rows(op: Op, layout: DataLayout) -> bool:
    """Whether an operator needs something from other rows: what the data axis would have to
    communicate in the forward."""
    moves = (
        transition(layout.states[v], wanted)
        for v, wanted in zip(op.operands, layout.strategies[op.name].operands, strict=True)
    )
    return any(move is not None and move[0] for move in moves)


def _several(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _degrees(plan: Plan, cluster: Cluster) -> list[int]:
    """Tensor-parallel degrees that are worth a word: those of a node, and the plan's own."""
    return sorted({*divisors(cluster.devices_per_node), *(stage.tp for stage in plan.stages)})
