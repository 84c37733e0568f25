"""A plan with the graph that it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

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

    def keeping(self, values: Collection[str]) -> CheckedPlan:
        """The plan on the same graph, whose blocks hand on these values, too."""
        blocks = []
        for block in self.graph.blocks:
            more = (r for op in block.ops for r in op.results if r in values)
            blocks.append(replace(block, outputs=tuple(dict.fromkeys([*block.outputs, *more]))))
        return replace(self, graph=replace(self.graph, blocks=tuple(blocks)))
