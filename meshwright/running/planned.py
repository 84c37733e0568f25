"""A model with its plan, and this rank's running part of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators import Problem
from meshwright.decisions import Decision, Request, one_at_a_time, why_not_here
from meshwright.decisions.given_plan import check_memory
from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.ranks import ReplicaWorld, launch, progress, replica_world
from meshwright.executor.runtime import Meetings, RunOptions, Runtime, ServedRuntime
from meshwright.executor.stages import BatchShape, CheckedPlan
from meshwright.planner.batch import batch_rows, input_leaves, with_rows
from meshwright.planner.plan import Plan, fingerprint, graph_for, slices_at, tensor_multiple
from meshwright.planner.pricing import Evaluator, cluster_of_replica
from meshwright.profiles.inputs import MeshwrightError
from meshwright.running.data_parallel import DataParallel
from meshwright.traced import TracedModel

Method = TypeVar("Method", bound=Callable[..., Any])


def in_replica(method: Method) -> Method:
    """A method that runs in the world of this rank's replica, which begins as the others do. It
    meets nobody: it may come between a step's gradients and the optimizer (`after_meeting`)."""

    @wraps(method)
    def inside(self: PlannedModel, *args: Any, **kwargs: Any) -> Any:
        if self.plan.outer_loop is None or self._why_not or self._is_inside:
            return method(self, *args, **kwargs)
        self.meetings.begin()
        self._is_inside = True
        try:
            with self._inside():
                return method(self, *args, **kwargs)
        finally:
            self._is_inside = False

    return cast(Method, inside)


def after_meeting(method: Method) -> Method:
    """A method before which replicas meet if that is due: whoever calls it says that the
    optimizer has made its step."""

    @wraps(method)
    def met(self: PlannedModel, *args: Any, **kwargs: Any) -> Any:
        if self.plan.outer_loop is not None and not self._why_not and not self._is_inside:
            self.meetings.meet_if_due()
        return method(self, *args, **kwargs)

    return cast(Method, met)


class PlannedModel:
    """A model and the plan for it; its `runtime` where the plan's ranks are running."""

    def __init__(
        self, decision: Decision, problem: Problem, request: Request, traced: TracedModel
    ) -> None:
        self.plan = decision.plan
        self.report = decision.report
        self.prediction = decision.prediction
        self._decision = decision
        self._problem = problem
        self._request = request
        self._traced = traced
        self._why_not = why_not_here(decision.plan, problem.cluster)
        self._runtime: Runtime | None = None
        self._meetings: Meetings | None = None
        self._is_inside = False

    def is_sample(self, item: Any) -> bool:
        """Whether this has the tensors of a batch, each without the dim of its rows."""
        graph = self._traced.graph
        planned = {path: len(graph.values[value].shape) for value, path in graph.inputs.items()}
        try:
            leaves = dict(input_leaves(item)[0])
        except MeshwrightError:
            return False
        dims = {path: x.ndim for path, x in leaves.items() if isinstance(x, torch.Tensor)}
        batched = [path for path in self._traced.batched if path in planned]
        return bool(batched) and all(dims.get(p) == planned[p] - 1 for p in batched)

    @one_at_a_time()
    def _checked(self) -> CheckedPlan:
        """The plan, that of a replica, or of a worker beside servers, checked on the graph of its
        micro-batch."""
        plan, traced = self._of_rank, self._traced
        graph, factors = traced.in_microbatches(plan.microbatch_rows, plan.global_batch_size)
        return CheckedPlan.of(plan, *graph_for(plan, graph, factors), traced.run_use)

    @property
    def _of_rank(self) -> Plan:
        """The plan that a rank runs: its replica's, or that of a worker beside servers."""
        return self.plan.of_worker if self.plan.is_served else self.plan.of_one_replica

    def without_servers(self, what: str) -> None:
        """Raise `StateError` for a call that plans with parameter servers don't have."""
        if self.plan.is_served:
            raise StateError(
                " needs ranks that meet, and workers of parameter servers don't",
                place=what,
                legal="plans without servers; with them train_step(..., optimizer=), eval_step, "
                "state dicts and checkpoints",
                way_out="plan without servers",
            )

    def _lowered(self) -> Runtime:
        """The plan's part of this rank."""
        plan, traced, checked = self._of_rank, self._traced, self._checked()
        if self._request.tf32:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        options = RunOptions(
            compile=self._request.compile,
            device=torch.device("cpu") if self._problem.cluster.backend == "gloo" else None,
            check_replicas=self._request.check_replicas,
            replica=self._world.number if self._world else 0,
        )
        shapes = OtherShapes(plan, self._problem_of_one, traced)
        if self.plan.is_served:
            return ServedRuntime(
                checked, traced.model, of_all=self.plan, options=options, at_shape=shapes
            )
        return Runtime(checked, traced.model, options=options, at_shape=shapes)

    @property
    def _problem_of_one(self) -> Problem:
        """The problem of one replica: on its part of the cluster."""
        count, cluster = self.plan.replicas, self._problem.cluster
        if count == 1:
            return self._problem
        return replace(self._problem, cluster=cluster_of_replica(cluster, count, "plan"))

    # --- replicas ---

    @cached_property
    def _world(self) -> ReplicaWorld | None:
        """The world of this rank's replica, where there are several. Collective among all ranks the
        first time."""
        return replica_world(self.plan.replicas) if self.plan.outer_loop is not None else None

    def _inside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._world is None else self._world.inside()

    @property
    def meetings(self) -> Meetings:
        """The meetings of replicas that train apart: `lr` and `momentum` of the outer step (0.7 and
        0.9, as in DiLoCo; 1 and 0 average the weights), which may be set on all ranks alike.
        StateError for a plan without an outer loop."""
        runtime, loop = self.runtime, self.plan.outer_loop
        if loop is None or self._world is None:
            raise StateError(
                ": the plan has no replicas that train apart",
                place="meetings",
                legal="a plan with replicas",
                way_out="plan with Overrides(replicas=...)",
            )
        if self._meetings is None:
            compare = self._request.check_replicas
            self._meetings = Meetings(runtime, loop, self._world, compare=compare)
        return self._meetings

    def meet(self) -> None:
        """Have replicas that train apart meet now, after as many steps on all of them, whatever
        `sync_every` says: the weights are the outer ones then. Does nothing where they have made no
        step since, or with one replica. Call it after the optimizer's step, and before what reads
        the weights of the last meeting (`full_state_dict`) should have the latest. Collective."""
        if self.plan.outer_loop is not None:
            self.meetings.meet()

    def _rows_here(self, batch: Any) -> Any:
        """The rows of a global batch that are this replica's."""
        if self._world is None or batch is None:
            return batch
        count, rows = self._world.count, batch_rows(batch)
        if rows % count:
            raise BatchError(
                f" has {rows} rows, which {count} replicas can't share out",
                place="batch",
                legal=f"a multiple of {count} rows",
                way_out="pad or drop rows (drop_last=True of a DataLoader)",
            )
        share = rows // count
        here = slice(self._world.number * share, (self._world.number + 1) * share)
        return with_rows(batch, self._traced.batched, here)

    @property
    def runtime(self) -> Runtime:
        """This rank's running part, no step of which is to be validated yet; RuntimeError, with
        what to launch, where none can run."""
        runtime = self._going_on
        runtime.validation.settle()
        return runtime

    @property
    def _going_on(self) -> Runtime:
        """`runtime`, whose last step may be to be validated yet."""
        if self._runtime is None:
            if self._why_not:
                raise StateError(self._why_not)
            if self._world is None:
                progress.replica = ""
            with self._inside():
                self._runtime = self._lowered()
                here = launch.rank()
            group = self.plan.group_of(here)
            progress.predicted_peak_bytes = self.prediction.peak_memory_bytes[group]
        return self._runtime

    @property
    def data_parallel(self) -> DataParallel:
        """Rows of a global batch that this rank feeds."""
        return DataParallel.of(self._going_on, self._world)

    def _global_rows(self, batch: Any) -> int:
        """The rows of a global batch of which a rank's own are given, as far as it knows."""
        share = self.data_parallel
        row_count = len(share.rows) if batch is None else batch_rows(batch)
        return (
            self.plan.global_batch_size if row_count == len(share.rows) else row_count * share.size
        )


# --- other shapes ---------------------------------------------------------------------------------

# A plan's decisions at batches of other shapes: other sequence lengths, fewer rows.


MANY = 8


class OtherShapes:
    """Checks a plan at other shapes of batches."""

    def __init__(self, plan: Plan, problem: Problem, traced: TracedModel) -> None:
        self.plan = plan
        self.problem = problem
        self.traced = traced
        self.asking = 0  # batches that were traced for their values

    def _count(self, graph: Graph) -> None:
        """Warn where batch after batch is traced for the values that the forward asks for."""
        self.asking += bool(graph.known)
        if self.asking == MANY:
            warnings.warn(
                f"{MANY} batches were traced anew, as the forward asks for values of the batch "
                f"that differed (at {', '.join(graph.asked_at)}): each takes seconds. Way out: "
                "compute with the tensor there (tensor operations in place of .item() and "
                ".tolist(), masks in place of x[mask])",
                stacklevel=2,
            )

    @one_at_a_time()
    def __call__(self, shape: BatchShape, batch: Any) -> CheckedPlan:
        """The plan at the shape of a batch. Raises ValueError where it can't be run there, and
        `InfeasibleError` where it would not fit the memory. Collective."""
        plan, traced = plan_of_rows(self.plan, shape.rows), self.traced
        planned = BatchShape.of(traced.graph, shape.rows, traced.graph.values)
        known, sizes = bool(traced.graph.known), (plan.microbatch_rows, plan.global_batch_size)
        if shape != planned or known:  # of as many rows as the example, where values don't matter
            rows = torch.arange(shape.rows if known else batch_rows(traced.example))
            named, spec = input_leaves(batch)
            leaves = [x[rows % len(x)] if path in traced.batched else x for path, x in named]
            example = in_order_of(traced.example, pytree.tree_unflatten(leaves, spec))
            traced = self.traced.with_example(example)
        graph, factors = traced.in_microbatches(*sizes)
        if plan.slices:
            tokens = factors.length
            plan = replace(plan, slices=slices_at(plan, tokens))
            if tokens and not plan.slices:
                warnings.warn(
                    f"sequences of {tokens} tokens run whole: the tensor axis does not divide them "
                    "into slices, which take less memory. Way out: pad to a multiple of "
                    f"{tensor_multiple(stage.tp for stage in plan.stages)}",
                    stacklevel=2,
                )
        if fingerprint(graph) != plan.model and known:  # of masks some may have taken all
            traced = self.traced.with_example(example, by_index=True)
            graph, factors = traced.in_microbatches(*sizes)
        self._count(graph)
        if fingerprint(graph) != plan.model:
            raise BatchError(
                "for it the forward runs other operators (a branch on sizes or values, or a loop "
                "over them), of which the plan says nothing",
                place="batch",
                legal="shapes and values with which it runs those planned",
                way_out="pad to the planned shape, or plan for this batch",
            )
        pairs = zip(shape.sizes, planned.sizes, strict=False)
        if any(size > other for sizes in pairs for size, other in zip(*sizes, strict=True)):
            problem = replace(self.problem, graph=traced.graph, factors=traced.factors)
            prediction = launch.agree_on(lambda: Evaluator(problem).price(plan).prediction)
            check_memory(prediction, problem.cluster)
        return CheckedPlan.of(plan, *graph_for(plan, graph, factors), traced.run_use)


def in_order_of(example: Any, batch: Any) -> Any:
    """A batch with its entries in the order of the example's, by which its inputs are named."""
    if not isinstance(example, Mapping) or not isinstance(batch, Mapping):
        return batch
    first = {name: batch[name] for name in example if name in batch}
    return first | {name: x for name, x in batch.items() if name not in first}


def plan_of_rows(plan: Plan, rows: int) -> Plan:
    """The plan for global batches of so many rows, in as many of its micro-batches as may be.
    Raises ValueError where the rows can't be shared out."""
    if rows > plan.global_batch_size:
        raise BatchError(
            "more rows than planned",
            place="batch",
            legal="up to the rows of global_batch_size",
            way_out="plan for this batch",
        )
    dp = plan.data_ranks
    if rows % dp:
        raise BatchError(
            f": dp={dp} does not divide {rows} rows",
            place="batch",
            legal=f"a multiple of {dp} rows",
            way_out=f"give a multiple of {dp}, by padding or dropping rows (drop_last=True of a "
            "DataLoader)",
        )
    return replace(plan, global_batch_size=rows, num_microbatches=plan.microbatches_of(rows))
