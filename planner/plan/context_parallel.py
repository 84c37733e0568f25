"""Checks of context parallelism: its legal degrees and kinds of attention."""

from __future__ import annotations

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.mesh import ULYSSES
from meshwright.costmodel.rules import takes_batch_statistics, traits_of
from meshwright.costmodel.sharding import FactorTable, head_counts
from meshwright.planner.decisions import divisors
from meshwright.planner.plan.plan import Plan, StagePlan
from meshwright.planner.plan.ranges import PlanError


def check_context(plan: Plan, graph: Graph, factors: FactorTable) -> None:
    """Raise `PlanError` unless cp divides the model's one sequence dim, all stages agree on it, and
    the kind of attention can be had."""
    if all(stage.cp == 1 for stage in plan.stages):
        return
    degrees = {(stage.cp, stage.cp_kind) for stage in plan.stages}
    if len(degrees) > 1:
        raise PlanError(
            f"={', '.join(f'{cp} ({kind})' for cp, kind in sorted(degrees))}: tokens lie on all "
            "stages in one order",
            place="plan: cp",
            legal="one cp, of one kind, for all stages",
        )
    stage = plan.stages[0]
    if factors.sequence is None:
        raise PlanError(
            f"={stage.cp} can't split the model's sequences: {factors.tokens.why}",
            place="plan: stage 0: cp",
            legal="1",
        )
    length = factors.length
    if length % stage.cp:
        raise PlanError(
            f"={stage.cp} does not divide sequences of {length}",
            place="plan: stage 0: cp",
            legal=divisors(length),
        )
    _check_operators(plan, stage, graph)


def _check_operators(plan: Plan, stage: StagePlan, graph: Graph) -> None:
    by_heads = stage.cp_kind == ULYSSES
    degrees = ulysses_degrees(graph, max(s.tp for s in plan.stages)) if by_heads else []
    for op in graph.ops:
        if takes_batch_statistics(op):
            raise PlanError(
                f"={stage.cp}, and {op.key} ({op.target}) takes statistics of all tokens",
                place="plan: stage 0: cp",
                legal="1",
            )
        if by_heads and traits_of(op).kernel == "attention" and stage.cp not in degrees:
            heads, shared = head_counts(graph, op)
            raise PlanError(
                f"={ULYSSES}: {op.key} has {heads} heads, of which {shared} have keys of their "
                f"own; cp={stage.cp} beside tp={stage.tp} can't divide those",
                place="plan: stage 0: cp_kind",
                legal=f"cp={', '.join(map(str, degrees))} with it, or another kind",
            )


def ulysses_degrees(graph: Graph, tp: int) -> list[int]:
    """Degrees that can share out the heads of all attention, beside a tensor axis that takes what
    it divides."""
    attention = [op for op in graph.ops if traits_of(op).kernel == "attention"]
    keys = [head_counts(graph, op)[1] for op in attention]
    degrees = (set(divisors(n // tp if n % tp == 0 else n)) for n in keys)
    return sorted(set.intersection(*degrees)) if keys else [1]
