"""A plan with the graph that it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.rules import draws, takes_batch_statistics, traits_of, updates_statistics
from meshwright.costmodel.sharding import Assignment, FactorTable, RowUse, row_use
from meshwright.executor.errors import StateError
from meshwright.planner.plan import Plan, check_plan, check_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """A plan that the executor runs, checked against a graph of its micro-batch; the strategies and
    states of each stage's blocks, and what the loss makes of rows. `workers` run it, each on rows
    of its own, whose mean loss is that of all rows."""

    plan: Plan
    graph: Graph
    factors: FactorTable
    assignments: Sequence[Mapping[str, Assignment]]
    use: RowUse
    workers: int = 1

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

    @property
    def whole(self) -> CheckedPlan:
        """The plan with micro-batches that are not sliced, for forwards alone."""
        return replace(self, plan=replace(self.plan, slices=())) if self.plan.slices else self

    def keeping(self, values: Collection[str]) -> CheckedPlan:
        """The plan on the same graph, whose blocks hand on these values, too."""
        blocks = []
        for block in self.graph.blocks:
            more = (r for op in block.ops for r in op.results if r in values)
            blocks.append(replace(block, outputs=tuple(dict.fromkeys([*block.outputs, *more]))))
        return replace(self, graph=replace(self.graph, blocks=tuple(blocks)))


# --- evaluation -----------------------------------------------------------------------------------


def why_not_evaluable(graph: Graph, num_microbatches: int = 1) -> str:
    """An operator that would compute in evaluation as it does in training, or of another part of
    the batch than the model itself, and the way out; empty where there is none.

    The graph was traced for training. Dropout, attention's dropout and leaves follow the mode in
    which they run, and norms read their running statistics in evaluation; other random draws do
    not follow it, and a norm without running statistics takes those of each micro-batch.
    """
    for op in graph.ops:
        draw = traits_of(op).draw
        if draws(op) and not (draw and draw.training):
            return (
                f"eval_step: the model was planned for training, where {op.key} ({op.target}) "
                "draws random numbers; load full_state_dict() into the model, call .eval(), and "
                "evaluate that"
            )
        running = updates_statistics(op) or not takes_batch_statistics(op)
        if num_microbatches > 1 and not running:
            return (
                f"eval_step: {op.key} ({op.target}) has no running statistics, so that it takes "
                "those of the batch in evaluation, too, and the plan cuts batches into "
                f"{num_microbatches} micro-batches, each with its own; plan with "
                "overrides=Overrides(num_microbatches=1), or load full_state_dict() into the "
                "model, call .eval(), and evaluate that"
            )
    return ""


def check_evaluable(graph: Graph, num_microbatches: int = 1) -> None:
    """Raise ValueError with `why_not_evaluable`, where there is a reason."""
    if why := why_not_evaluable(graph, num_microbatches):
        raise StateError(why)
