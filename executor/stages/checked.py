"""A plan with the graph that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import Assignment, FactorTable, RowUse, row_use
from meshwright.planner.plan import Plan, check_plan, check_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """A plan that the executor runs, checked against a graph of its micro-batch; the strategies and
    states of each stage's blocks, and what the loss makes of rows."""

    plan: Plan
    graph: Graph
    factors: FactorTable
    assignments: Sequence[Mapping[str, Assignment]]
    use: RowUse

    @staticmethod
    def of(
        plan: Plan, graph: Graph, factors: FactorTable, use: RowUse | None = None
    ) -> CheckedPlan:
        """`use` is read from the graph if it is None. Raises `PlanError`."""
        check_runs(plan)
        return CheckedPlan(
            plan=plan,
            graph=graph,
            factors=factors,
            assignments=check_plan(plan, graph, factors),
            use=row_use(graph, factors) if use is None else use,
        )
