"""The flow, in one function: trace, search (or take the plan), check, lower."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from costmodel.factors import FactorTable, analyse
from costmodel.graph import Graph
from costmodel.memory import optimizer_bytes
from executor import launch
from executor.runtime import Runtime
from meshwright.model import ParallelModel
from planner.blocks import cut_blocks
from planner.evaluate import Prediction, evaluate
from planner.explain import explain_plan, explain_search
from planner.overrides import Overrides
from planner.plan import PRECISIONS, Plan, check_plan
from planner.report import Report
from planner.search import InfeasibleError, Search, SearchResult
from planner.trace import batch_rows, trace
from profiles.cluster import Cluster

Decision = tuple[Plan, Report, Prediction]


def auto_parallelize(
    model: nn.Module,
    cluster: Cluster,
    *,
    example_inputs: Any,
    global_batch_size: int,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: str = "bf16",
    overrides: Overrides | None = None,
    plan: Plan | str | Path | None = None,
) -> ParallelModel:
    """Decide how to train `model` on `cluster`, say why, and (under torchrun) get ready to do it.

    `example_inputs` is a dict (keyword) or tuple (positional) of tensors for one sample batch, batch dim first, any
    batch size, real or meta. The model returns a loss (`.loss`, or a scalar), or `loss_fn(output, targets)`
    does, the targets being the dict's `targets` or the tuple's last element. The model may be on meta.
    `plan` (a Plan or a path) skips the search: it is checked and run.

    Raises ValueError (`TraceError`, `OverrideError`, `PlanError`, `InfeasibleError`): what, where, legal values, way out.
    """
    _check_arguments(global_batch_size, precision, optimizer)
    launch.start(cluster.backend)
    traced = _Traced(model, example_inputs, loss_fn, precision)
    if plan is None:
        decision = launch.agree_on(
            lambda: _searched(
                traced, cluster, global_batch_size, optimizer, overrides or Overrides()
            )
        )
    else:
        loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
        decision = launch.agree_on(
            lambda: _given(traced, cluster, loaded, global_batch_size, optimizer)
        )
    chosen, report, prediction = decision
    result = ParallelModel(
        chosen, report, prediction, lambda: traced.lower(chosen), _why_not(chosen, cluster)
    )
    if launch.running():
        assert result.runtime is not None  # groups are made now, by all ranks together
    return result


class _Traced:
    """The model traced at the sample batch, and again at the plan's micro-batch when it is lowered."""

    def __init__(
        self, model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None, precision: str
    ) -> None:
        self.model, self.example, self.loss_fn, self.precision = model, example, loss_fn, precision
        self.phases_s: dict[str, float] = {}
        started = time.perf_counter()
        # at least two rows: a batch of one would look like no batch at all
        self.graph, self.table = self.at(max(2, batch_rows(example)))
        self.phases_s["trace"] = time.perf_counter() - started

    def at(self, rows: int) -> tuple[Graph, FactorTable]:
        graph = trace(
            self.model,
            self.example,
            loss_fn=self.loss_fn,
            batch_size=rows,
            precision=self.precision,
        )
        table = analyse(graph)
        return cut_blocks(graph, table), table

    def lower(self, plan: Plan) -> Runtime:
        same = plan.microbatch_rows == self.graph.batch_size
        graph, table = (self.graph, self.table) if same else self.at(plan.microbatch_rows)
        return Runtime(plan, graph, table, check_plan(plan, graph, table), self.model)


def _searched(
    traced: _Traced, cluster: Cluster, batch: int, optimizer: str, overrides: Overrides
) -> Decision:
    def search(restrictions: Overrides) -> SearchResult:
        return Search(
            traced.graph, traced.table, cluster, batch, traced.precision, optimizer, restrictions
        ).run()

    result = search(overrides)
    free = None
    if overrides.given():
        try:
            free = search(Overrides())
        except InfeasibleError:
            free = None
    report = explain_search(
        result, traced.graph, traced.table, cluster, overrides, free, traced.phases_s
    )
    return result.best.plan, report, result.best.evaluation.prediction


def _given(traced: _Traced, cluster: Cluster, plan: Plan, batch: int, optimizer: str) -> Decision:
    from planner.plan import PlanError

    for name, ours, theirs in (
        ("global_batch_size", batch, plan.global_batch_size),
        ("precision", traced.precision, plan.precision),
    ):
        if ours != theirs:
            raise PlanError(
                f"plan: made for {name}={theirs!r}, called with {ours!r}; pass {name}={theirs!r}, or plan again"
            )
    if plan.num_ranks != cluster.num_devices:
        raise PlanError(
            f"plan: made for {plan.num_ranks} ranks, but {cluster.describe()} has {cluster.num_devices} devices; "
            f"use a cluster of {plan.num_ranks} devices, or plan again"
        )
    assignments = check_plan(plan, traced.graph, traced.table)
    priced = evaluate(plan, traced.graph, traced.table, cluster, assignments, optimizer=optimizer)
    report = explain_plan(priced, traced.graph, traced.table, cluster, traced.phases_s)
    return plan, report, priced.prediction


def _why_not(plan: Plan, cluster: Cluster) -> str | None:
    """Why the plan can't run in this process, with the way out; None if it can."""
    if launch.running() or plan.num_ranks == 1:
        return None
    per_node = min(plan.num_ranks, cluster.devices_per_node)
    nodes = -(-plan.num_ranks // per_node)
    more = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    return (
        f"the plan needs {plan.num_ranks} ranks and this is a single process; launch your script with "
        f"`torchrun --nproc-per-node {per_node}{more} your_script.py`"
    )


def _check_arguments(batch: int, precision: str, optimizer: str) -> None:
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(
            f"global_batch_size={batch!r}: legal: an integer from 1, rows per optimizer step"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: legal: {', '.join(PRECISIONS)}")
    optimizer_bytes(optimizer)
