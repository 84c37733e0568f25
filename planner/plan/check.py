"""The check of a plan against its model, the same for solved, loaded and hand-written plans."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain, product, zip_longest
from typing import Any

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.sharding import Assignment, FactorTable
from meshwright.costmodel.written_buffers import inseparable
from meshwright.planner.decisions import CONTRADICTIONS, DECISIONS, OUTER_LOOP, SHARING, divisors
from meshwright.planner.plan.assignments import Known, plan_assignments
from meshwright.planner.plan.context_parallel import check_context
from meshwright.planner.plan.expert_parallel import check_experts
from meshwright.planner.plan.flow import check_branches, check_copies, pipelines
from meshwright.planner.plan.loss_parts import check_parts
from meshwright.planner.plan.plan import OuterLoop, Plan, StagePlan
from meshwright.planner.plan.ranges import PlanError, compress_names, compress_ranks
from meshwright.planner.plan.ranks import check_ranks
from meshwright.planner.plan.servers import check_servers
from meshwright.planner.plan.slices import check_slices
from meshwright.profiles.inputs import shown


def fingerprint(graph: Graph) -> str:
    """Structural hash of a model, 16 hex digits, over parameters and operators: the same for any
    batch size and precision, and with its loss in parts."""
    graph = graph.whole or graph
    parameters = sorted(
        f"{fqn}{graph.values[value].shape}" for value, fqn in graph.parameters.items()
    )
    program = [op.key for op in graph.ops if not traits_of(op).casts]
    text = "\n".join([*parameters, *program])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_plan(
    plan: Plan, graph: Graph, factors: FactorTable, known: Known | None = None
) -> list[dict[str, Assignment]]:
    """Check a plan; returns for each stage the assignments of its blocks, by name.

    `graph` may be traced at any batch size. `known` remembers blocks of this graph for the next
    plan. Raises `PlanError` with the value, its place and the legal ones.
    """
    known = {} if known is None else known
    _check_model(plan, graph, known)
    if plan.outer_loop is not None:
        _check_outer_loop(plan, plan.outer_loop)
        return check_plan(plan.of_one_replica, graph, factors, known)
    _check_step(plan)
    for k, stage in enumerate(plan.stages):
        _check_stage(plan, stage, f"plan: stage {k}")
    _check_contradictions(plan)
    check_servers(plan, graph)
    check_copies(plan, graph)
    if not plan.record.flushes and (why := why_not_late(graph, plan.precision)):
        raise PlanError(
            f"={plan.schedule!r}: {why}",
            place="plan: schedule",
            legal="a schedule with a flush",
            way_out="take 1f1b",
        )
    if plan.optimizer_in_backward and (why := why_stepped_late(graph)):
        raise PlanError(
            f": {why}",
            place="plan: optimizer_in_backward=True",
            legal="false",
            way_out="step at the end",
        )
    for stages in pipelines(plan):
        _check_blocks([plan.stages[k] for k in stages], graph)
    check_branches(plan, graph)
    check_ranks(plan)
    check_context(plan, graph, factors)
    check_slices(plan, graph, factors)
    _check_parameters(plan, graph)
    _check_buffers(plan, graph)
    assignments = plan_assignments(plan, graph, factors, known)
    for k, stage in enumerate(plan.stages):
        check_experts(stage, graph, factors, assignments[k], f"plan: stage {k}")
    return assignments


def _check_outer_loop(plan: Plan, loop: OuterLoop) -> None:
    """Raise `PlanError` for replicas that don't share out the batch, or meet at no step."""
    for name in OUTER_LOOP:
        decision, value = DECISIONS[name], getattr(loop, name)
        if not decision.accepts(value) or (name == OUTER_LOOP[0] and value == 1):
            legal = "an integer from 2" if name == OUTER_LOOP[0] else decision.values
            raise PlanError.refused(f"plan: outer_loop: {name}", value, legal=legal)
    if not plan.stages or plan.global_batch_size % loop.replicas:
        raise PlanError(
            f"={loop.replicas} does not divide global_batch_size={plan.global_batch_size}",
            place=f"plan: outer_loop: {OUTER_LOOP[0]}",
            legal=[n for n in divisors(plan.global_batch_size) if n > 1],
            way_out="change one of the two",
        )
    _check_contradictions(plan)


def check_runs(plan: Plan) -> None:
    """Raise `PlanError` for a legal plan that the executor does not run yet."""
    _check_contradictions(plan, runs=True)
    for k, stage in enumerate(plan.stages):
        first = next(s for s in plan.stages if s.ranks == stage.ranks)
        ours, theirs = map(_of_group, (stage, first))
        for name, value in ours.items():
            if value != (other := theirs[name]):
                raise PlanError(
                    f"={value}, but another stage of ranks {compress_ranks(stage.ranks)} has "
                    f"{other}: stages of one device group share its mesh",
                    place=f"plan: stage {k}: {name}",
                    legal=other,
                    way_out="give them one",
                )
        if stage.holders % stage.ep and stage.ep % stage.tp:
            raise PlanError(
                f"={stage.ep} can be priced, but not run yet",
                place=f"plan: stage {k}: ep",
                legal=f"a divisor of dp·cp={stage.holders}, or a multiple of tp={stage.tp}",
            )


def _of_group(stage: StagePlan) -> dict[str, Any]:
    """Decisions that stages of one device group share; None for ranks stands for all of them."""
    shared: dict[str, Any] = {"ep": stage.ep}
    for decision in SHARING:
        if decision.name != "zero":
            part_of = None if decision.proper else decision.part_of
            ranks = part_of(stage, stage.holders) if part_of else None
            shared[decision.name] = getattr(stage, decision.name) or ranks
    return shared


def _check_buffers(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` where a buffer's writer and readers are not in one stage."""
    owner = {name: k for k, stage in enumerate(plan.stages) for name in stage.blocks}
    for positions in inseparable(graph):
        first, last = (graph.blocks[k].name for k in positions)
        if owner[first] != owner[last]:
            raise PlanError(
                f"stages {owner[first]} and {owner[last]}: a buffer that the forward writes is "
                f"read or written in both {first} and {last}",
                place="plan",
                legal="both in one stage",
                way_out=f"put the blocks from {first} to {last} into one stage",
            )


def _check_parameters(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` for a stage without a trained parameter, or ranks without where branches
    lie apart."""
    blocks = {block.name: block for block in graph.blocks}
    for k, stage in enumerate(plan.stages):
        here = [s for s in plan.stages if s is stage or (plan.branches and s.ranks == stage.ranks)]
        values = [v for s in here for name in s.blocks for v in blocks[name].parameters]
        if not any(graph.values[v].requires_grad for v in values):
            raise PlanError(
                f"blocks {compress_names(stage.blocks)} hold no trained parameter, so its ranks "
                "would have nothing to optimize",
                place=f"plan: stage {k}",
                legal="blocks with a trained parameter",
                way_out="move them to the stage before or after",
            )


def _check_model(plan: Plan, graph: Graph, known: Known) -> None:
    if "fingerprint" not in known:
        known["fingerprint"] = fingerprint(graph)
    if plan.model != (actual := known["fingerprint"]):
        raise PlanError(
            f"={plan.model}, but this model is {actual} (other layers, sizes or operators)",
            place="plan: made for model",
            legal=actual,
            way_out="plan again, or use the model it was made for",
        )
    check_parts(plan, graph)


def _check_step(plan: Plan) -> None:
    for name, value, legal in (
        ("schedule", plan.schedule, tuple(SCHEDULES)),
        ("precision", plan.precision, PRECISIONS),
    ):
        if value not in legal:
            raise PlanError.refused(f"plan: {name}", value, legal=legal)
    for name in ("global_batch_size", "num_microbatches"):
        count = getattr(plan, name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PlanError.refused(f"plan: {name}", count, legal="an integer from 1")
    if plan.global_batch_size % plan.num_microbatches:
        raise PlanError(
            f"={plan.num_microbatches} does not divide global_batch_size={plan.global_batch_size}",
            place="plan: num_microbatches",
            legal=divisors(plan.global_batch_size),
        )
    late = plan.staleness
    in_pipeline = plan.stages and not plan.is_served
    if in_pipeline and late != plan.record.staleness(plan.num_microbatches, len(plan.devices)):
        raise PlanError(
            f"={late}, which schedule={plan.schedule!r} does not make of it",
            place="plan: staleness",
            legal=plan.pipeline.staleness,
            way_out="write that, or take another schedule",
        )
    if not plan.stages:
        raise PlanError(
            "no stages", place="plan", legal="each block in a stage", way_out="plan again"
        )


def _check_contradictions(plan: Plan, *, runs: bool = False) -> None:
    """Raise `PlanError` for decisions that rule each other out; with `runs`, those that can be
    priced alone."""

    def of(stage: StagePlan, name: str) -> Any:
        if name == "pp":
            return len(plan.devices)
        if name == "virtual_stages":
            return len(plan.stages) // len(plan.devices)
        return getattr(stage if hasattr(stage, name) else plan, name)

    for row, (k, stage) in product(CONTRADICTIONS, enumerate(plan.stages)):
        a, b = of(stage, row.a), of(stage, row.b)
        if row.priced is not runs and row.holds(partial(of, stage)) and row.clash(a, b):
            of_stage = hasattr(stage, row.a) or hasattr(stage, row.b)
            raise PlanError(
                f"={shown(a)} with {row.b}={shown(b)}{' can be priced, but not run' * runs}: "
                f"{row.why}",
                place="plan: " + f"stage {k}: " * of_stage + row.a,
                legal=row.legal,
                way_out=f"change {row.a} or {row.b}",
            )


def why_stepped_late(graph: Graph) -> str:
    """Why an optimizer can't step parameters in the backward of a model; empty where it can. A leaf
    may give no gradient, which is known when all ranks are done; and a parameter that is also read
    without a gradient may be read after its step, as a block runs again."""
    trained = {v: {v} for v in graph.parameters if graph.values[v].requires_grad}
    of_batch = set(graph.inputs)
    for op in graph.ops:
        values = [v for v in op.operands if graph.values[v].requires_grad]
        if traits_of(op).leaf and values:
            return f"the leaf {op.module} may give no gradient, which is known after the backward"
        read = set().union(*(trained.get(v, ()) for v in values))
        if read and not any(graph.values[v].requires_grad for v in op.results):
            names = ", ".join(sorted(graph.parameters[v] for v in read))
            where = op.source or op.module
            return f"{names} is also read without a gradient ({where}), perhaps after its step"
        if of_batch.isdisjoint(op.operands):  # views, casts and products of parameters
            trained |= {v: read for v in op.results}
        else:
            of_batch.update(op.results)
    return ""


def why_not_late(graph: Graph, precision: str) -> str:
    """Why gradients of a model can't come late, from a pipeline without a flush; empty where they
    can."""
    if precision == "fp16":
        return "fp16 would scale gradients with the loss of another step"
    if graph.weight_writes:
        write = graph.weight_writes[0]
        return f"the forward writes weights ({write.source or write.module}) that others still read"
    for op in graph.ops:
        if traits_of(op).leaf and any(graph.values[v].requires_grad for v in op.operands):
            return f"the leaf {op.module} may give no gradient, which is known after the backward"
    readers = Counter(v for block in graph.blocks for v in block.parameters)
    trained = (v for v, n in readers.items() if n > 1 and graph.values[v].requires_grad)
    if (tied := next(trained, None)) is not None:
        return (
            f"several blocks read {graph.parameters[tied]}, whose gradients would meet at a common "
            "end of the step"
        )
    return ""


def _check_stage(plan: Plan, stage: StagePlan, place: str) -> None:
    for name, decision in DECISIONS.items():
        if not hasattr(stage, name):
            continue
        if decision.parts:
            decision.check_parts(getattr(stage, name), f"{place}: {name}", PlanError)
            continue
        for value in stage.by_policy if decision.acts == "block" else [getattr(stage, name)]:
            if isinstance(value, bool) or (value != decision.off and not decision.accepts(value)):
                raise PlanError.refused(f"{place}: {name}", value, legal=decision.values)
        if decision.acts == "block":
            _check_named(stage, name, place)
    _check_shards(stage, place)
    if plan.microbatch_rows % stage.dp:
        raise PlanError(
            f"={stage.dp} does not divide a micro-batch of {plan.microbatch_rows} rows "
            f"(global_batch_size={plan.global_batch_size} / "
            f"num_microbatches={plan.num_microbatches})",
            place=f"{place}: dp",
            legal=[*divisors(plan.microbatch_rows), "or fewer micro-batches"],
        )


def _check_named(stage: StagePlan, decision: str, place: str) -> None:
    """Raise `PlanError` unless the blocks that policies name are the stage's, each once."""
    legal, counts = ", ".join(compress_names(stage.blocks)), Counter(stage.blocks)
    for name, times in Counter(chain(*stage.by_policy.values())).items():
        if name not in counts:
            raise PlanError(f"{decision}: {name!r} is no block of it", place=place, legal=legal)
        if times > counts[name]:
            raise PlanError(
                f"{decision}: block {name!r} has {times} policies", place=place, legal="one"
            )


def _check_shards(stage: StagePlan, place: str) -> None:
    """Raise `PlanError` for a number of ranks that is no part of those that it divides."""
    for decision in SHARING:
        value, legal = getattr(stage, decision.name), decision.parts_of(stage, stage.holders)
        if legal is not None and value is not None and value not in legal:
            ranks = f"{stage.holders} ranks of the data axis (dp·cp)"
            if decision.proper:
                ranks = f"{stage.shards} ranks that ZeRO divides among"
            raise PlanError(
                f"={value} is no part of the {ranks}",
                place=f"{place}: {decision.name}",
                legal=legal or "none",
                way_out=f"take one of these, or drop {decision.name}",
            )


def _check_blocks(stages: Sequence[StagePlan], graph: Graph) -> None:
    names = [block.name for block in graph.blocks]
    planned = [name for stage in stages for name in stage.blocks]
    legal, in_model = ", ".join(compress_names(names)), set(names)
    for name in planned:
        if name not in in_model:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
            raise PlanError(
                f"block {name!r} is not in the model; nearest: {', '.join(near) or 'none'}",
                place="plan",
                legal=legal,
            )
    for k, stage in enumerate(stages):
        if not stage.blocks:
            raise PlanError(
                f"stage {k}: no blocks; every stage needs one", place="plan", legal=legal
            )
    for position, (name, expected) in enumerate(zip_longest(planned, names)):
        if name != expected:
            raise PlanError(
                f"position {position} is {name or 'missing'!r}, expected {expected or 'nothing'!r}",
                place="plan: stages must cover the blocks once, in order",
                legal=f"in the order {legal}",
                way_out="sort them so",
            )
