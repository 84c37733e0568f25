"""The flow, in one function: trace, search (or take the plan), check, lower."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from costmodel.factors import FactorTable, analyse
from costmodel.graph import Graph
from costmodel.memory import optimizer_bytes
from costmodel.target import Target, target_named
from executor import launch
from executor.runtime import Runtime
from meshwright.model import ParallelModel
from planner.blocks import cut_blocks
from planner.check import check_plan, check_runs
from planner.evaluate import Prediction
from planner.evaluator import Evaluator
from planner.explain import explain_plan, explain_search
from planner.overrides import Overrides, check_overrides
from planner.plan import PRECISIONS, Plan, PlanError
from planner.report import Report
from planner.search import InfeasibleError, Search, SearchResult
from planner.trace import batch_rows, trace
from profiles.cluster import Cluster
from profiles.profile import Profile, load_profile

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
    target: str = "eager",
    profile: bool = True,
) -> ParallelModel:
    """Decide how to train `model` on `cluster`, say why, and (under torchrun) get ready to do it.

    `example_inputs` is a dict (keyword) or tuple (positional) of tensors for one sample batch,
    batch dim first, any batch size, real or meta. The model returns a loss (`.loss`, or a scalar),
    or `loss_fn(output, targets)` does, the targets being the dict's `targets` or the tuple's last
    element. The model may be on meta. `plan` (a Plan or a path) skips the search: it is checked
    and run. `target` ("eager", "compiled", "megatron") says what software the prices are for; only
    "eager" is what `train_step` runs. `profile` uses what `meshwright profile` measured on this
    kind of device, where it did.

    Raises ValueError (`TraceError`, `OverrideError`, `PlanError`, `InfeasibleError`): what, where,
    the legal values, the way out.
    """
    _check_types(model, cluster, overrides, plan)
    _check_numbers(global_batch_size, precision, optimizer)
    launch.start(cluster.backend)
    _check_world(cluster, launch.world_size() if launch.running() else None)
    traced = _Traced(model, example_inputs, loss_fn, precision)
    prices = _Prices(target_named(target), load_profile(cluster) if profile else None)
    chosen, report, prediction = launch.agree_on(
        lambda: (
            _searched(
                traced, cluster, global_batch_size, optimizer, overrides or Overrides(), prices
            )
            if plan is None
            else _given(traced, cluster, plan, global_batch_size, optimizer, prices)
        )
    )
    result = ParallelModel(
        chosen, report, prediction, lambda: traced.lower(chosen), _why_not(chosen, cluster)
    )
    if launch.running():
        assert result.runtime is not None  # groups are made now, by all ranks together
    return result


@dataclass(frozen=True, slots=True)
class _Prices:
    """What prices rest on beside the cluster."""

    target: Target
    profile: Profile | None


class _Traced:
    """The model traced at the sample batch, and at the plan's micro-batch when it is lowered."""

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
        check_runs(plan)
        same = plan.microbatch_rows == self.graph.batch_size
        graph, table = (self.graph, self.table) if same else self.at(plan.microbatch_rows)
        return Runtime(plan, graph, table, check_plan(plan, graph, table), self.model)


def _searched(
    traced: _Traced, cluster: Cluster, batch: int, optimizer: str, overrides: Overrides,
    prices: _Prices,
) -> Decision:  # fmt: skip
    check_overrides(
        overrides, num_devices=cluster.num_devices, global_batch_size=batch,
        num_blocks=len(traced.graph.blocks),
    )  # fmt: skip

    def search(restrictions: Overrides) -> SearchResult:
        return Search(
            traced.graph, traced.table, cluster, batch, traced.precision, optimizer, restrictions,
            target=prices.target, profile=prices.profile,
        ).run()  # fmt: skip

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


def _given(
    traced: _Traced, cluster: Cluster, given: Plan | str | Path, batch: int, optimizer: str,
    prices: _Prices,
) -> Decision:  # fmt: skip
    plan = given if isinstance(given, Plan) else Plan.load(given)
    for name, ours, theirs in (
        ("global_batch_size", batch, plan.global_batch_size),
        ("precision", traced.precision, plan.precision),
    ):
        if ours != theirs:
            raise PlanError(
                f"plan: made for {name}={theirs!r}, called with {ours!r}; pass {name}={theirs!r}, "
                "or plan again"
            )
    if plan.num_ranks != cluster.num_devices:
        raise PlanError(
            f"plan: made for {plan.num_ranks} ranks, but the cluster has {cluster.num_devices} "
            f"devices ({cluster.describe()}); use a cluster of {plan.num_ranks} devices, or plan "
            "again"
        )
    priced = Evaluator(
        graph=traced.graph, table=traced.table, cluster=cluster, optimizer=optimizer,
        target=prices.target, profile=prices.profile,
    ).price(plan)  # fmt: skip
    _check_memory(priced.prediction, cluster)
    report = explain_plan(priced, traced.graph, traced.table, cluster, traced.phases_s)
    return plan, report, priced.prediction


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


def _check_numbers(batch: int, precision: str, optimizer: str) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(
            f"global_batch_size={batch!r}; legal: an integer from 1, rows per optimizer step"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}; legal: {', '.join(PRECISIONS)}")
    optimizer_bytes(optimizer)
