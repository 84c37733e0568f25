"""The flow, in one function: trace, search (or take the plan), check, lower."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.arguments import (
    check_search,
    check_types,
    check_values,
    default_precision,
    margin_of,
    unwrapped,
)
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.targets import target_named
from meshwright.decisions import (
    Request,
    check_products,
    check_units,
    check_world,
    in_tf32,
    one_at_a_time,
    take_plan,
)
from meshwright.executor.lowering import backend_of
from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from meshwright.planner.overrides import Overrides, check_allow
from meshwright.planner.plan import Plan
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs.limits import checked_booleans
from meshwright.profiles.profile import load_profile
from meshwright.profiles.steps import RunKind
from meshwright.traced import TracedModel


@checked_booleans
@one_at_a_time()
def auto_parallelize(
    model: nn.Module,
    cluster: Cluster,
    *,
    example_inputs: Any,
    global_batch_size: int,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    overrides: Overrides | None = None,
    plan: Plan | str | Path | None = None,
    target: str | None = None,
    objective: str = "robust",
    memory_margin: float | None = None,
    compile: bool | str = False,
    tf32: bool = False,
    profile: bool = True,
    time_limit_s: float | None = None,
    expert_imbalance: float = 1.0,
    rows_meet: str = "exact",
    allow: Collection[str] = (),
    check_replicas: bool = False,
) -> ParallelModel:
    """Decide how to train `model` on `cluster`, say why, and (under torchrun) get ready to do it.

    `example_inputs` is a dict (keyword) or tuple (positional) of tensors for one sample batch,
    batch dim first, any batch size, real or meta. The model returns a loss (`.loss`, or a scalar),
    or `loss_fn(output, targets)` does, the targets being the dict's `targets` or the tuple's last
    element; a loss_fn may also return (sum, count), whose quotient over the whole batch is the
    loss. Numbers in the batch may differ from step to step. Where rows of a batch meet (a
    contrastive loss, statistics by hand) only plans of one micro-batch are exact;
    `rows_meet="per_microbatch"` consents to others, in which rows meet within each.

    The model may be on meta; it is taken out of DistributedDataParallel and torch.compile. It stays
    yours: where every rank holds it whole, its parameters (fp32 from here on, or bf16 if pure) are
    what trains; elsewhere they are replaced by the DTensors that do. Where ranks are running, rank
    0's weights and buffers are broadcast when the plan is lowered; `check_replicas` compares them
    instead, and raises.

    `precision` is "fp32", "bf16" or "fp16" (parameters are kept in fp32, products cast as
    torch.autocast does), "bf16_pure" (parameters, gradients and moments are in bf16, too, rounded
    to nearest), "fp8", "fp8_rowwise" or "mxfp8": bf16 with the layers' products in 8-bit floats,
    scaled by tensor, by row or by blocks of 32 (emulated), or "nvfp4": in 4-bit floats, scaled by
    blocks of 16 (emulated); None means fp32 on CPUs, else bf16.
    `tf32` lets fp32 products and convolutions on GPUs round their operands to TF32, in all of this
    process, and prices them so; it is off as torch's own flag is. `compile` runs the model's blocks
    through torch.compile, by its default backend or the one named.

    `plan` (a Plan or a path) skips the search: it is checked and run. `target`, a name of
    `costmodel/targets.py` ("megatron", "fsdp", "torchtitan", ...), says what software is planned
    for: its prices, and only what it can run; None means what `train_step` runs: "compiled" with
    `compile`, else "eager". `profile` uses what `meshwright profile` measured on this kind of
    device, where it did, and what `recalibrate` kept of steps that ran on it. `objective="robust"`
    chooses, of the plans that prices can't tell from the best, the simplest; "fastest" the one of
    the least predicted step. `memory_margin` is the part of a device's memory that the plan leaves
    free, for what prices of memory miss: by default 5 %. After `time_limit_s`, wall seconds counted
    from the end of the trace, which can't be interrupted, the best plan found so far is returned,
    and the report says by how much it may miss the best; where none was found by then, a first one
    is still looked for on few meshes. Answers that the report finds when it is read have as much
    time again. `expert_imbalance` says how uneven a mixture of experts routes: tokens of the
    busiest of the ranks that share experts out, over the mean. It multiplies what such ranks
    compute, exchange and keep; 1.0 is balanced. `allow` names what may change a training's numbers
    and is left out else: "quantized", ZeRO-3's collectives in blocks of 8 and 4 bits (ZeRO++);
    "compressed", sums of gradients by PowerSGD or their largest elements; "stale", gradients that
    come some steps late, of a pipeline that is never flushed (PipeDream) or to parameter servers.

    Threads may call it at once: they take turns, and are refused (RuntimeError) where ranks are
    running. Raises ValueError (`TraceError`, `OverrideError`, `PlanError`, `InfeasibleError`):
    what, where, the legal values, the way out.
    """
    check_types(model=model, cluster=cluster, overrides=overrides, plan=plan)
    arguments = Arguments(
        example_inputs=example_inputs,
        global_batch_size=global_batch_size,
        loss_fn=loss_fn,
        optimizer=optimizer,
        precision=precision,
        overrides=overrides,
        target=target,
        objective=objective,
        memory_margin=memory_margin,
        compile=compile,
        tf32=tf32,
        profile=profile,
        time_limit_s=time_limit_s,
        expert_imbalance=expert_imbalance,
        rows_meet=rows_meet,
        allow=allow,
        check_replicas=check_replicas,
    )
    return decided(asked(model, cluster, arguments), plan, memory_margin or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The keyword arguments of `auto_parallelize` but for the plan."""

    example_inputs: Any
    global_batch_size: int
    loss_fn: Callable[..., Any] | None = None
    optimizer: str = "adamw"
    precision: str | None = None
    overrides: Overrides | None = None
    target: str | None = None
    objective: str = "robust"
    memory_margin: float | None = None
    compile: bool | str = False
    tf32: bool = False
    profile: bool = True
    time_limit_s: float | None = None
    expert_imbalance: float = 1.0
    rows_meet: str = "exact"
    allow: Collection[str] = ()
    check_replicas: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question of planning: the traced model, the problem, and the arguments."""

    traced: TracedModel
    problem: Problem
    request: Request


def decided(
    question: Asked, plan: Plan | str | Path | None = None, memory_margin: float = 0.0
) -> ParallelModel:
    """The model under the plan that is given, which leaves a part of the memory free, or else under
    the one that is found. Raises as `auto_parallelize` does."""
    problem, request, phases_s = question.problem, question.request, question.traced.phases_s
    if plan is not None:
        decision = take_plan(plan, problem, request, phases_s, memory_margin)
    else:
        from meshwright.plan_search import search_plan  # a rank with a plan file loads no search

        decision = search_plan(problem, request, phases_s)
    return ParallelModel(decision, problem, request, question.traced).started()


def asked(model: nn.Module, cluster: Cluster, arguments: Arguments) -> Asked:
    """The question of `auto_parallelize`: its arguments checked, the model traced."""
    precision = arguments.precision or default_precision(cluster)
    check_values(
        arguments.global_batch_size,
        precision,
        arguments.optimizer,
        arguments.time_limit_s,
        arguments.tf32,
    )
    check_units(precision, cluster)
    check_search(arguments.objective, arguments.memory_margin, arguments.rows_meet, cluster)
    target = arguments.target
    if target is None:
        target = "compiled" if backend_of(arguments.compile) else "eager"
    launch.start(cluster.backend)
    check_world(cluster, launch.world_size() if launch.running() else None)
    traced = TracedModel(unwrapped(model), arguments.example_inputs, arguments.loss_fn, precision)
    run = RunKind(precision=precision, target=target)
    problem = Problem(
        graph=traced.graph,
        factors=traced.factors,
        cluster=cluster,
        precision=precision,
        optimizer=arguments.optimizer,
        target=replace(target_named(target), expert_imbalance=arguments.expert_imbalance),
        profile=load_profile(cluster, run=run) if arguments.profile else None,
        meetings=traced.use.meetings if arguments.rows_meet == "exact" else (),
    )
    problem = replace(check_products(problem), allow=check_allow(arguments.allow))
    request = Request(
        global_batch_size=arguments.global_batch_size,
        overrides=arguments.overrides or Overrides(),
        objective=arguments.objective,
        memory_margin=margin_of(arguments.memory_margin),
        time_limit_s=arguments.time_limit_s,
        compile=arguments.compile,
        tf32=arguments.tf32,
        check_replicas=arguments.check_replicas,
    )
    problem = in_tf32(problem) if arguments.tf32 else problem
    return Asked(traced=traced, problem=problem, request=request)
