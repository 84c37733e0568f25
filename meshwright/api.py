"""The flow, in one function: trace, search (or take the plan), check, lower."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.memory.states import optimizer_bytes
from meshwright.costmodel.operators.problem import Problem
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.costmodel.target import Target, target_named
from meshwright.costmodel.user_rules.add import verified
from meshwright.executor.lowering.compile import backend_of
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.model import ParallelModel
from meshwright.planner.batch import batch_rows
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.overrides.overrides import Overrides, check_overrides
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.plan import PRECISIONS, Plan, PlanError
from meshwright.planner.pricing.evaluate import Evaluator, Prediction
from meshwright.planner.pricing.programs import BlockPrograms
from meshwright.planner.report.deferred import Answers
from meshwright.planner.report.explain import explain_plan, explain_search
from meshwright.planner.report.report import Report
from meshwright.planner.search.errors import InfeasibleError
from meshwright.planner.search.search import Search
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.profile import Profile, load_profile

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
    target: str | None = None,
    compile: bool | str = False,
    tf32: bool = False,
    profile: bool = True,
    time_limit_s: float | None = None,
    executable: bool | None = None,
    expert_imbalance: float = 1.0,
) -> ParallelModel:
    """Decide how to train `model` on `cluster`, say why, and (under torchrun) get ready to do it.

    `example_inputs` is a dict (keyword) or tuple (positional) of tensors for one sample batch,
    batch dim first, any batch size, real or meta. The model returns a loss (`.loss`, or a scalar),
    or `loss_fn(output, targets)` does, the targets being the dict's `targets` or the tuple's last
    element. The model may be on meta. `plan` (a Plan or a path) skips the search: it is checked
    and run. `compile` runs the model's blocks through torch.compile, by its default backend or the
    one named. `tf32` lets fp32 products and convolutions on GPUs round their operands to TF32, in
    all of this process; prices know nothing of it. `target` ("eager", "compiled", "megatron") says
    what software the prices are for;
    None means what `train_step` runs: "compiled" with `compile`, else "eager". `profile` uses what
    `meshwright profile` measured on this kind of device, where it did. After `time_limit_s` the
    best plan found so far is returned, and the report says by how much it may miss the best.
    `executable` leaves the search only what `train_step` runs so far; None means: where ranks are
    running, for one device, and for CPU processes (gloo), and everything that can be planned
    elsewhere. `expert_imbalance` says how uneven a mixture of experts routes: tokens of the busiest
    of the ranks that share experts out, over the mean. It multiplies what such ranks compute,
    exchange and keep; 1.0 is balanced.

    Raises ValueError (`TraceError`, `OverrideError`, `PlanError`, `InfeasibleError`): what, where,
    the legal values, the way out.
    """
    _check_types(model, cluster, overrides, plan)
    _check_numbers(global_batch_size, precision, optimizer, time_limit_s)
    if tf32 and precision != "fp32":
        raise ValueError(f"tf32=True is about fp32 products, and precision={precision!r}; drop one")
    if target is None:
        target = "compiled" if backend_of(compile) else "eager"
    launch.start(cluster.backend)
    _check_world(cluster, launch.world_size() if launch.running() else None)
    planner = _Planner(
        traced=_Traced(model, example_inputs, loss_fn, precision),
        cluster=cluster,
        batch=global_batch_size,
        optimizer=optimizer,
        target=replace(target_named(target), expert_imbalance=expert_imbalance),
        profile=load_profile(cluster) if profile else None,
        compile=compile,
        tf32=tf32,
    )
    if plan is not None:
        return planner.ready(lambda: planner.given(plan))
    return planner.searched(overrides or Overrides(), time_limit_s, executable)


class _Traced:
    """The model traced at the sample batch, and at the plan's micro-batch when it is lowered.

    Once it is lowered its weights are the runtime's; the model itself is the user's to keep or to
    let go.
    """

    def __init__(
        self, model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None, precision: str
    ) -> None:
        self.example, self.loss_fn, self.precision = example, loss_fn, precision
        self.known = weakref.ref(model)
        self.kept: nn.Module | None = model
        self.phases_s: dict[str, float] = {}
        started = time.process_time()
        # at least two rows: a batch of one would look like no batch at all
        self.graph, self.table = self.at(model, max(2, batch_rows(example)), like=None)
        self.phases_s["trace"] = time.process_time() - started

    def at(self, model: nn.Module, rows: int, *, like: Graph | None) -> tuple[Graph, FactorTable]:
        graph = trace(
            model, self.example, loss_fn=self.loss_fn, batch_size=rows, precision=self.precision
        )
        graph = verified(graph)
        table = analyse(graph)
        return cut_blocks(graph, table, like), table

    def lower(
        self, plan: Plan, compile: bool | str, tf32: bool, device: torch.device | None
    ) -> Runtime:
        check_runs(plan)
        model = self.known()
        if model is None:
            raise ValueError(
                "replan: the model's weights were handed to the last plan, and the model was freed "
                "since; keep a reference to it, or save a checkpoint and plan anew"
            )
        graph, table = self.graph, self.table
        if plan.microbatch_rows != graph.batch_size:
            graph, table = self.at(model, plan.microbatch_rows, like=graph)
        assignments = check_plan(plan, graph, table)
        if tf32:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        runtime = Runtime(plan, graph, table, assignments, model, compile=compile, device=device)
        self.kept = None
        return runtime


@dataclass(slots=True, kw_only=True)
class _Planner:
    """A traced model on a cluster: what plans for it have in common, what the last search priced,
    and whether the user asked for plans that run."""

    traced: _Traced
    cluster: Cluster
    batch: int
    optimizer: str
    target: Target
    profile: Profile | None
    compile: bool | str
    tf32: bool
    programs: BlockPrograms | None = None
    executable: bool | None = None

    def ready(self, decide: Callable[[], Decision]) -> ParallelModel:
        """What one rank decides, ready to run on all."""
        plan, report, prediction = launch.agree_on(decide)
        device = torch.device("cpu") if self.cluster.backend == "gloo" else None
        result = ParallelModel(
            plan,
            report,
            prediction,
            start=lambda: self.traced.lower(plan, self.compile, self.tf32, device),
            replan=self.searched,
            why_not=_why_not(plan, self.cluster),
            example=self.traced.example,
        )
        if launch.running():
            assert result.runtime is not None  # groups are made now, by all ranks together
        return result

    def searched(
        self, overrides: Overrides, time_limit_s: float | None, executable: bool | None
    ) -> ParallelModel:
        """Search, on what was priced before, and report; what the report is asked later is
        answered by the rank that searched."""
        if executable is not None:
            self.executable = executable
        runnable = _runnable(self.cluster) if self.executable is None else self.executable
        if launch.running() and not runnable:
            raise ValueError(
                "executable=False: ranks are running, and wait for a plan that they can run; "
                "legal: True or None, or plan in a process of its own"
            )
        check_overrides(
            overrides,
            num_devices=self.cluster.num_devices,
            global_batch_size=self.batch,
            num_blocks=len(self.traced.graph.blocks),
            executable=runnable,
        )
        answers: list[Answers] = []

        def decide() -> Decision:
            search = Search(
                self.traced.graph,
                self.traced.table,
                self.cluster,
                self.batch,
                self.traced.precision,
                self.optimizer,
                overrides,
                target=self.target,
                profile=self.profile,
                executable=runnable,
                time_limit_s=time_limit_s,
                programs=self.programs,  # type: ignore[arg-type]
            )
            self.programs = search.programs
            result = search.run()
            answers.append(Answers(search=search, result=result))
            report = explain_search(
                result, self.traced.graph, self.traced.table, self.cluster, self.traced.phases_s
            )
            return result.best.plan, report, result.best.evaluation.prediction

        found = self.ready(decide)
        if answers:
            found.report = replace(found.report, later=answers[0])
        return found

    def given(self, given: Plan | str | Path) -> Decision:
        """A plan that was made before, checked and priced."""
        plan = given if isinstance(given, Plan) else Plan.load(given)
        for name, ours, theirs in (
            ("global_batch_size", self.batch, plan.global_batch_size),
            ("precision", self.traced.precision, plan.precision),
        ):
            if ours != theirs:
                raise PlanError(
                    f"plan: made for {name}={theirs!r}, called with {ours!r}; pass "
                    f"{name}={theirs!r}, or plan again"
                )
        if plan.num_ranks != self.cluster.num_devices:
            raise PlanError(
                f"plan: made for {plan.num_ranks} ranks, but the cluster has "
                f"{self.cluster.num_devices} devices ({self.cluster.describe()}); use a cluster of "
                f"{plan.num_ranks} devices, pass a plan file for {self.cluster.num_devices} ranks, "
                "or plan again (without plan=)"
            )
        graph, table = self.traced.graph, self.traced.table
        problem = Problem(
            graph=graph,
            factors=table,
            cluster=self.cluster,
            precision=self.traced.precision,
            optimizer=self.optimizer,
            target=self.target,
            profile=self.profile,
        )
        priced = Evaluator(problem).price(plan)
        _check_memory(priced.prediction, self.cluster)
        report = explain_plan(priced, graph, table, self.cluster, self.traced.phases_s)
        return plan, report, priced.prediction


def _runnable(cluster: Cluster) -> bool:
    """Whether plans for a cluster are meant to be run by this version, and now."""
    return launch.running() or cluster.num_devices == 1 or cluster.backend == "gloo"


def _check_memory(prediction: Prediction, cluster: Cluster) -> None:
    """A given plan must fit as a searched one does."""
    room = cluster.device.memory_bytes
    short = prediction.shortfall_bytes(cluster)
    if any(short):
        gib = ", ".join(f"stage {k}: {x / 2**30:.2f}" for k, x in enumerate(short) if x)
        raise InfeasibleError(
            f"plan: does not fit the {room / 2**30:.2f} GiB of {cluster.device.name}; shortfall in "
            f'GiB by stage: {gib}. Way out: recompute "full", zero 1, more micro-batches or '
            "stages in the plan, or plan again",
            short,
        )


def _why_not(plan: Plan, cluster: Cluster) -> str | None:
    """Why the plan can't run in this process, with the way out; None if it can."""
    try:
        check_runs(plan)
    except PlanError as error:
        return f"{error}; plan again with executable=True for one that runs"
    if launch.running() or plan.num_ranks == 1:
        return None
    return (
        f"the plan needs {plan.num_ranks} ranks and this is a single process; launch your script "
        f"with `{_torchrun(plan.num_ranks, cluster)} your_script.py`, a command with "
        f"`{_torchrun(plan.num_ranks, cluster)} -m meshwright.cli run ...`"
    )


def _torchrun(ranks: int, cluster: Cluster) -> str:
    per_node = min(ranks, cluster.devices_per_node)
    nodes = -(-ranks // per_node)
    more = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    return f"torchrun --nproc-per-node {per_node}{more}"


def _check_world(cluster: Cluster, world: int | None) -> None:
    """The ranks that are running (None: no process group) must be the cluster's devices."""
    if world is not None and world != cluster.num_devices:
        raise ValueError(
            f"cluster {cluster.name!r} has {cluster.num_devices} devices, but {world} ranks are "
            f"running; launch with `{_torchrun(cluster.num_devices, cluster)} ...`, or describe "
            f"what is running: Cluster.detect(), or a cluster of {world} devices"
        )


def check_time_limit(time_limit_s: Any) -> None:
    number = isinstance(time_limit_s, int | float) and not isinstance(time_limit_s, bool)
    if not number or not 0 <= time_limit_s < math.inf:
        raise ValueError(
            f"time_limit_s={time_limit_s!r}; legal: seconds, 0 or more, or None for no limit"
        )


def _check_types(model: Any, cluster: Any, overrides: Any, plan: Any) -> None:
    for name, value, wanted, legal in (
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("cluster", cluster, Cluster, "a Cluster, e.g. Cluster.from_catalog('h100-sxm')"),
        ("overrides", overrides, (Overrides, type(None)), "Overrides(tp=..., ...) or None"),
        ("plan", plan, (Plan, str, Path, type(None)), "a Plan, a path or None"),
    ):
        if not isinstance(value, wanted):
            raise ValueError(f"{name}={value!r:.60} is a {type(value).__name__}; legal: {legal}")
    if plan is not None and overrides is not None and overrides.given():
        raise ValueError(
            f"plan= and overrides={overrides.given()} were both given: a given plan leaves nothing "
            "to search; drop one, or edit the plan"
        )


def _check_numbers(batch: int, precision: str, optimizer: str, time_limit_s: float | None) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(
            f"global_batch_size={batch!r}; legal: an integer from 1, rows per optimizer step"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}; legal: {', '.join(PRECISIONS)}")
    optimizer_bytes(optimizer)
    if time_limit_s is not None:
        check_time_limit(time_limit_s)
