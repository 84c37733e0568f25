"""Where a stage may share its experts out: over ranks that have tokens of their own.

The expert axis is laid over the others: ep neighbours of the stage's dp × cp × tp ranks hold 1/ep
of the experts each. The tensor axis counts where it splits the tokens (sequence parallelism) and
not the experts' matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

from costmodel.factors import FactorTable
from costmodel.graph import Graph
from costmodel.moe_rules import DISPATCH, EXPERT_FACTOR, GROUPED
from planner.layouts import Assignment
from planner.plan import PlanError, StagePlan


def has_experts(graph: Graph) -> bool:
    """Whether any operator has weights of several experts."""
    return any(op.short == GROUPED for op in graph.ops)


def fewest_experts(graph: Graph, table: FactorTable) -> int:
    """The fewest experts that any operator has weights of; 1 without such operators."""
    ops = [op for op in graph.ops if op.short == GROUPED]
    return min((table.ops[op.name].sizes[EXPERT_FACTOR] for op in ops), default=1)


def check_experts(
    stage: StagePlan,
    graph: Graph,
    table: FactorTable,
    assignments: Mapping[str, Assignment],
    place: str,
) -> None:
    """Raise `PlanError` unless ep divides the experts and the ranks that they are shared over."""
    if stage.ep == 1:
        return
    if not has_experts(graph):
        raise PlanError(f"{place}: ep={stage.ep}: the model has no experts; legal: 1")
    ops = [op for block in graph.blocks if block.name in assignments for op in block.ops]
    strategies = {
        name: strategy
        for assignment in assignments.values()
        for name, strategy in assignment.strategies.items()
    }
    for op in ops:
        if op.short == GROUPED:
            count = table.ops[op.name].sizes[EXPERT_FACTOR]
            if count % stage.ep:
                raise PlanError(
                    f"{place}: ep={stage.ep} does not divide the {count} experts of {op.module}"
                )
            split = strategies[op.name].operands[1].sharded
            if split and (stage.dp * stage.cp) % stage.ep:
                raise PlanError(
                    f"{place}: ep={stage.ep} does not divide dp={stage.dp} × cp={stage.cp}, and "
                    f"the tp={stage.tp} ranks split the matrices of {op.module}; legal: a divisor "
                    "of it, or whole matrices"
                )
        if op.short == DISPATCH:
            own = stage.tp if strategies[op.name].results[0].sharded else 1
            ranks = stage.dp * stage.cp * own
            if ranks % stage.ep:
                raise PlanError(
                    f"{place}: ep={stage.ep} does not divide the {ranks} ranks that have tokens of "
                    f"their own at {op.key} (dp={stage.dp} × cp={stage.cp} × {own} of "
                    f"tp={stage.tp}); legal: a divisor of it, or split the sequence over tp"
                )
    if (stage.dp * stage.cp * stage.tp) % stage.ep:
        raise PlanError(
            f"{place}: ep={stage.ep} does not divide its dp={stage.dp} × cp={stage.cp} × "
            f"tp={stage.tp} ranks"
        )
