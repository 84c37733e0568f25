"""A plan's decisions at batches of other shapes: other sequence lengths, fewer rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.costmodel.operators import Problem
from meshwright.decisions.given_plan import check_memory
from meshwright.decisions.world import one_at_a_time
from meshwright.executor.ranks import launch
from meshwright.executor.stages import BatchShape, CheckedPlan
from meshwright.planner.batch import batch_rows, input_leaves
from meshwright.planner.plan import Plan, fingerprint
from meshwright.planner.pricing import Evaluator
from meshwright.profiles.inputs import MeshwrightError
from meshwright.traced import TracedModel


class OtherShapes:
    """Checks a plan at other shapes of batches."""

    def __init__(self, plan: Plan, problem: Problem, traced: TracedModel) -> None:
        self.plan = plan
        self.problem = problem
        self.traced = traced

    @one_at_a_time()
    def __call__(self, shape: BatchShape, batch: Any) -> CheckedPlan:
        """The plan at the shape of a batch. Raises ValueError where it can't be run there, and
        `InfeasibleError` where it would not fit the memory. Collective."""
        plan, traced = plan_of_rows(self.plan, shape.rows), self.traced
        planned = BatchShape.of(traced.graph, shape.rows, traced.graph.values)
        if shape != planned:  # a batch of as many rows as the example
            rows = torch.arange(batch_rows(traced.example))
            named, spec = input_leaves(batch)
            leaves = [x[rows % len(x)] if path in traced.batched else x for path, x in named]
            traced = traced.with_example(pytree.tree_unflatten(leaves, spec))
        graph, factors = traced.in_microbatches(plan.microbatch_rows, plan.global_batch_size)
        if fingerprint(graph) != plan.model:
            raise MeshwrightError(
                "at this shape the forward runs other operators (a branch on sizes, or a loop "
                "over them), of which the plan says nothing",
                place="batch",
                legal="shapes at which it runs those planned",
                way_out="pad to the planned shape",
            )
        pairs = zip(shape.sizes, planned.sizes, strict=False)
        if any(size > other for sizes in pairs for size, other in zip(*sizes, strict=True)):
            problem = replace(self.problem, graph=traced.graph, factors=traced.factors)
            prediction = launch.agree_on(lambda: Evaluator(problem).price(plan).prediction)
            check_memory(prediction, problem.cluster)
        return CheckedPlan.of(plan, graph, factors, traced.run_use)


def plan_of_rows(plan: Plan, rows: int) -> Plan:
    """The plan for global batches of so many rows, in as many of its micro-batches as may be.
    Raises ValueError where the rows can't be shared out."""
    if rows > plan.global_batch_size:
        raise MeshwrightError(
            "more rows than planned",
            place="batch",
            legal="up to the rows of global_batch_size",
            way_out="plan for this batch",
        )
    dp = plan.data_ranks
    if rows % dp:
        raise MeshwrightError(
            f": dp={dp} does not divide {rows} rows",
            place="batch",
            legal=f"a multiple of {dp} rows",
            way_out=f"give a multiple of {dp}, by padding or dropping rows (drop_last=True of a "
            "DataLoader)",
        )
    return replace(plan, global_batch_size=rows, num_microbatches=plan.microbatches_of(rows))
