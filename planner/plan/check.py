"""The check of a plan against its model, the same for solved, loaded and hand-written plans."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from meshwright.costmodel.blocks import RECOMPUTE
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.quantized import QUANTIZED
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.sharding import Assignment, FactorTable
from meshwright.costmodel.written_buffers import inseparable
from meshwright.planner.plan.assignments import Known, stage_assignments
from meshwright.planner.plan.context_parallel import check_context
from meshwright.planner.plan.expert_parallel import check_experts, runs_experts
from meshwright.planner.plan.flow import check_copies, pipelines
from meshwright.planner.plan.offload import check_offload, check_there
from meshwright.planner.plan.plan import PRECISIONS, RUNS, ZERO, Plan, StagePlan
from meshwright.planner.plan.ranges import PlanError, compress_names, compress_ranks
from meshwright.planner.plan.ranks import check_ranks, divisors


def fingerprint(graph: Graph) -> str:
    """Structural hash of a model, 16 hex digits, over parameters and operators: the same for any
    batch size and precision."""
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
    _check_model(plan, graph, known)
    _check_step(plan)
    for k, stage in enumerate(plan.stages):
        _check_stage(plan, stage, f"plan: stage {k}")
    _check_validation(plan)
    check_copies(plan, graph)
    for stages in pipelines(plan):
        _check_blocks([plan.stages[k] for k in stages], graph)
    check_ranks(plan)
    check_context(plan, graph, factors)
    _check_parameters(plan, graph)
    _check_buffers(plan, graph)
    assignments = [
        stage_assignments(plan, k, graph, factors, known) for k in range(len(plan.stages))
    ]
    for k, stage in enumerate(plan.stages):
        check_experts(stage, graph, factors, assignments[k], f"plan: stage {k}")
    return assignments


def check_runs(plan: Plan) -> None:
    """Raise `PlanError` for a legal plan that the executor does not run yet."""
    _check_split(plan)
    for k, stage in enumerate(plan.stages):
        for policy in dict.fromkeys(stage.policies):
            if policy not in RUNS["recompute"]:
                raise PlanError(
                    f"={policy!r} can be priced, but not run yet",
                    place=f"plan: stage {k}: recompute",
                    legal=RUNS["recompute"],
                )
        first = next(s for s in plan.stages if s.ranks == stage.ranks)
        for name, value, other in (
            ("dp_shard", stage.shards, first.shards),
            ("hpz", stage.hpz, first.hpz),
            ("quantized", stage.quantized, first.quantized),
            ("ep", stage.ep, first.ep),
        ):
            if value != other:
                raise PlanError(
                    f"={value}, but another stage of ranks {compress_ranks(stage.ranks)} has "
                    f"{other}: stages of one device group share its mesh",
                    place=f"plan: stage {k}: {name}",
                    legal=other,
                    way_out="give them one",
                )
        if not runs_experts(dp=stage.holders, tp=stage.tp, ep=stage.ep):
            raise PlanError(
                f"={stage.ep} can be priced, but not run yet",
                place=f"plan: stage {k}: ep",
                legal=f"a divisor of dp·cp={stage.holders}, or a multiple of tp={stage.tp}",
            )


def _check_split(plan: Plan) -> None:
    """Raise `PlanError` for ZeRO-3 with a split backward: `fully_shard` would scatter gradients
    after its first part."""
    if not SCHEDULES[plan.schedule].splits_backward:
        return
    whole = ", ".join(name for name, s in SCHEDULES.items() if not s.splits_backward)
    for k, stage in enumerate(plan.stages):
        if stage.zero == 3:
            raise PlanError(
                f"={plan.schedule!r} can be priced, but not run: torch loses gradients where the "
                "backward is split in two",
                place=f"plan: stage {k}: zero=3 with schedule",
                legal=f"zero 0, 1 or 2, or a schedule with a whole backward: {whole}",
            )


def _check_buffers(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` where a buffer's writer and readers are not in one stage."""
    owner = {name: k for k, stage in enumerate(plan.stages) for name in stage.blocks}
    for first, last in inseparable(graph):
        one, other = (graph.blocks[k].name for k in (first, last))
        if owner[one] != owner[other]:
            raise PlanError(
                f"stages {owner[one]} and {owner[other]}: a buffer that the forward writes is "
                f"read or written in both {one} and {other}",
                place="plan",
                legal="both in one stage",
                way_out=f"put the blocks from {one} to {other} into one stage",
            )


def _check_parameters(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` for a stage without a trained parameter."""
    blocks = {block.name: block for block in graph.blocks}
    for k, stage in enumerate(plan.stages):
        values = [v for name in stage.blocks for v in blocks[name].parameters]
        if not any(graph.values[v].requires_grad for v in values):
            raise PlanError(
                f"blocks {compress_names(stage.blocks)} hold no trained parameter, so its ranks "
                "would have nothing to optimize",
                place=f"plan: stage {k}",
                legal="blocks with a trained parameter",
                way_out="move them to the stage before or after",
            )


def _check_model(plan: Plan, graph: Graph, known: Known | None) -> None:
    known = {} if known is None else known
    actual = known.setdefault("fingerprint", None) or fingerprint(graph)
    known["fingerprint"] = actual
    if plan.model != actual:
        raise PlanError(
            f"={plan.model}, but this model is {actual} (other layers, sizes or operators)",
            place="plan: made for model",
            legal=actual,
            way_out="plan again, or use the model it was made for",
        )


def _check_step(plan: Plan) -> None:
    for name, value, legal in (
        ("schedule", plan.schedule, tuple(SCHEDULES)),
        ("precision", plan.precision, PRECISIONS),
    ):
        if value not in legal:
            raise PlanError(f"={value!r}", place=f"plan: {name}", legal=legal)
    for name in ("global_batch_size", "num_microbatches"):
        _check_whole(getattr(plan, name), f"plan: {name}")
    if plan.global_batch_size % plan.num_microbatches:
        raise PlanError(
            f"={plan.num_microbatches} does not divide global_batch_size={plan.global_batch_size}",
            place="plan: num_microbatches",
            legal=divisors(plan.global_batch_size),
        )
    if not plan.stages:
        raise PlanError(
            "no stages", place="plan", legal="each block in a stage", way_out="plan again"
        )


def _check_validation(plan: Plan) -> None:
    """Raise `PlanError` for steps that are validated afterwards where nothing is gained, or what
    they change is not this rank's alone to undo."""
    if not plan.post_validation:
        return
    why = "there is one device group, which waits for no other" * (len(plan.devices) == 1)
    for k, stage in enumerate(plan.stages):
        if stage.zero == 3:
            why = why or f"stage {k} has zero=3, whose gathered weights would be the wrong ones"
        if any(stage.offload.values()):
            why = why or f"stage {k} has parts in host memory"
    if why:
        raise PlanError(
            f"=true: {why}",
            place="plan: post_validation",
            legal="false, or a pipeline with zero 0 to 2 and all states on devices",
            way_out="drop post_validation",
        )


def _check_stage(plan: Plan, stage: StagePlan, place: str) -> None:
    named = [stage.recompute] if isinstance(stage.recompute, str) else list(stage.recompute)
    for name, value, legal in (
        ("zero", stage.zero, ZERO),
        ("quantized", stage.quantized, QUANTIZED),
        *(("recompute", policy, RECOMPUTE) for policy in named),
    ):
        if isinstance(value, bool) or value not in legal:
            raise PlanError(f"={value!r}", place=f"{place}: {name}", legal=legal)
    for name in ("dp", "cp", "tp", "ep", "segments"):
        _check_whole(getattr(stage, name), f"{place}: {name}")
    _check_recompute(stage, place)
    if stage.segments > 1 and SCHEDULES[plan.schedule].splits_backward:
        raise PlanError(
            f"={stage.segments} with schedule={plan.schedule!r}: what the first part of a backward "
            "makes again, the second would have to keep",
            place=f"{place}: segments",
            legal=1,
            way_out="give segments=1, or a schedule that doesn't split the backward",
        )
    check_offload(stage.offload, f"{place}: offload")
    check_there(stage, place)
    if stage.offload.get("optimizer") and (stage.hpz or stage.quantized != "none"):
        raise PlanError(
            f"={dict(stage.offload)!r} with hpz={stage.hpz}, quantized={stage.quantized!r}: what "
            "comes from the host is neither kept twice nor sent in blocks",
            place=f"{place}: offload",
            legal="without these two",
            way_out="drop one of them",
        )
    _check_shards(stage, place)
    _check_secondary(stage, place)
    _check_quantized(plan, stage, place)
    if plan.microbatch_rows % stage.dp:
        raise PlanError(
            f"={stage.dp} does not divide a micro-batch of {plan.microbatch_rows} rows "
            f"(global_batch_size={plan.global_batch_size} / "
            f"num_microbatches={plan.num_microbatches})",
            place=f"{place}: dp",
            legal=[*divisors(plan.microbatch_rows), "or fewer micro-batches"],
        )


def _check_recompute(stage: StagePlan, place: str) -> None:
    """Raise `PlanError` unless the blocks that policies name are the stage's, each once."""
    if isinstance(stage.recompute, str):
        return
    count = Counter(name for names in stage.recompute.values() for name in names)
    legal = ", ".join(compress_names(stage.blocks))
    for name, times in count.items():
        if name not in stage.blocks:
            raise PlanError(f"recompute: {name!r} is no block of it", place=place, legal=legal)
        if times > 1:
            raise PlanError(
                f"recompute: block {name!r} has {times} policies", place=place, legal="one"
            )


def _check_shards(stage: StagePlan, place: str) -> None:
    if stage.dp_shard is None:
        return
    _check_whole(stage.dp_shard, f"{place}: dp_shard")
    ranks = stage.dp * stage.cp
    if ranks % stage.dp_shard:
        raise PlanError(
            f"={stage.dp_shard} does not divide the {ranks} ranks of the data axis (dp·cp)",
            place=f"{place}: dp_shard",
            legal=divisors(ranks),
        )
    if not stage.zero:
        raise PlanError(
            f"={stage.dp_shard} with zero=0: nothing is divided",
            place=f"{place}: dp_shard",
            legal="a dp_shard with zero 1, 2 or 3",
            way_out="choose zero 1, 2 or 3, or drop dp_shard",
        )


def _check_secondary(stage: StagePlan, place: str) -> None:
    """Raise `PlanError` for a secondary shard that is no part of what ZeRO-3 divides."""
    if stage.hpz is None:
        return
    _check_whole(stage.hpz, f"{place}: hpz")
    if stage.zero != 3 or stage.ep > 1:
        asked = f"zero={stage.zero}" if stage.zero != 3 else f"ep={stage.ep}"
        raise PlanError(
            f"={stage.hpz} with {asked}: it is what a backward gathers again under ZeRO-3",
            place=f"{place}: hpz",
            legal="an hpz with zero=3 and ep=1",
            way_out="choose zero 3, or drop hpz",
        )
    if not 1 < stage.hpz < stage.shards or stage.shards % stage.hpz:
        parts = [n for n in divisors(stage.shards) if 1 < n < stage.shards]
        raise PlanError(
            f"={stage.hpz} is no part of the {stage.shards} ranks that ZeRO divides among",
            place=f"{place}: hpz",
            legal=parts or "none",
            way_out="take one of these, or drop hpz",
        )


def _check_quantized(plan: Plan, stage: StagePlan, place: str) -> None:
    """Raise `PlanError` for quantised collectives that have nothing to send, or lose too much."""
    if stage.quantized == "none":
        return
    if plan.precision == "fp16":
        raise PlanError(
            f"={stage.quantized!r} with precision='fp16': its scaled loss looks for the largest "
            "gradients that are finite, which the blocks' scales would hide and rounding lose",
            place=f"{place}: quantized",
            legal="none, or precision bf16 or fp32",
            way_out="train in bf16, or drop quantized",
        )
    if stage.zero != 3 or stage.ep > 1:
        asked = f"zero={stage.zero}" if stage.zero != 3 else f"ep={stage.ep}"
        raise PlanError(
            f"={stage.quantized!r} with {asked}: they are the collectives of ZeRO-3",
            place=f"{place}: quantized",
            legal="none, or zero=3 and ep=1",
            way_out="choose zero 3, or drop quantized",
        )


def _check_whole(value: Any, place: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"={value!r}", place=place, legal="an integer from 1")


def _check_blocks(stages: Sequence[StagePlan], graph: Graph) -> None:
    names = [block.name for block in graph.blocks]
    planned = [name for stage in stages for name in stage.blocks]
    legal = ", ".join(compress_names(names))
    legal_names = set(names)
    for name in planned:
        if name not in legal_names:
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
