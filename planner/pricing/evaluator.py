"""Evaluator: prices many plans of one traced model, remembering what they have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.kernels.measured import OpProfile
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.target import EAGER, Target
from meshwright.planner.plan.check import Known, check_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing.evaluate import Evaluation, evaluate
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles.cluster import Cluster


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """One model on one cluster under one target. `price` is a pure function of the plan."""

    graph: Graph
    table: FactorTable
    cluster: Cluster
    optimizer: str = "adamw"
    target: Target = EAGER
    profile: OpProfile | None = None
    _checked: Known = field(default_factory=dict)
    _costers: dict[str, StageCoster] = field(default_factory=dict)

    def price(self, plan: Plan) -> Evaluation:
        """Check a plan and price it; raises `PlanError` as `check_plan` does."""
        assignments = check_plan(plan, self.graph, self.table, self._checked)
        if plan.precision not in self._costers:
            self._costers[plan.precision] = StageCoster(
                self.graph,
                self.table,
                self.cluster,
                plan.precision,
                self.optimizer,
                target=self.target,
                profile=self.profile,
            )
        return evaluate(
            plan,
            self.graph,
            self.table,
            self.cluster,
            assignments,
            optimizer=self.optimizer,
            coster=self._costers[plan.precision],
        )
