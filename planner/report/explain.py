"""The report of a priced plan: stage by stage, what was assumed, what is worth a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.memory import fused, optimizer_named
from meshwright.costmodel.operators import Problem, op_flops
from meshwright.costmodel.precisions import IN_BLOCK, NARROW, PRECISIONS, SCALED_BY
from meshwright.costmodel.recompute import parts_of
from meshwright.costmodel.rules import is_narrow, traits_of
from meshwright.costmodel.sharding import data_layout, row_use, written_once
from meshwright.costmodel.target import Target
from meshwright.planner.decisions import DECISIONS
from meshwright.planner.plan import (
    Plan,
    StagePlan,
    compress_names,
    compress_ranks,
    decision_words,
    describe,
    divisors,
    meeting_words,
    megatron_layout,
    mesh_words,
    seconds,
    shared_apart,
    sized,
    stage_layout,
)
from meshwright.planner.pricing import Evaluation, Prediction
from meshwright.planner.report.components import busiest, device_groups
from meshwright.planner.report.details import Details, Row
from meshwright.planner.report.report import Report
from meshwright.planner.report.tensor_axis import divided, divided_notes, excluded, ulysses_notes
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.timings import OF_HOST, at_once

MAX_EXCLUDED = 6  # products in the notes
MFU = (
    "MFU counts products and attention, causal attention as the whole square (PaLM, Megatron-LM), "
    "nothing twice, over the dense peak of each product's dtype"
)
PURE = (
    "weights, gradients and moments are in bf16 alone, rounded to nearest (precision='bf16_pure'): "
    "a change of a weight by less than a 512th of it may be lost"
)
FILES = (
    "states in files are read and written through mappings, which the step waits for; each rank's "
    "environment variable MESHWRIGHT_NVME names a folder on flash of its node"
)
HOST_STEP = (
    "the optimizer's step in host memory is one fused kernel on all cores of the host (torch's "
    "fused=True; without, it takes about five times as long), and only what is pinned moves at the "
    "link's bandwidth"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The part of a report that only a search can give: the solver's proofs, and the bound on all
    step times with the gap to it."""

    solver: Sequence[Row] = ()
    bound: Row


def explain_plan(evaluation: Evaluation, problem: Problem, phases_s: Mapping[str, float]) -> Report:
    """The report of a plan that was not searched."""
    notes = ("the plan was given: nothing was searched",)
    return explain(evaluation, problem, phases_s=phases_s, notes=notes)


def explain(
    evaluation: Evaluation,
    problem: Problem,
    *,
    phases_s: Mapping[str, float],
    notes: Sequence[str],
    searched: Searched | None = None,
) -> Report:
    """The report of a priced plan; `notes` come before those about the plan itself."""
    plan, prediction = evaluation.plan, evaluation.prediction
    graph, factors, cluster = problem.graph, problem.factors, problem.cluster
    shares = divided(evaluation.priced)
    degrees = {stage.tp for stage in plan.stages}
    refused = excluded(graph, factors, sorted(degrees.union(divisors(cluster.devices_per_node))))
    details = Details(evaluation=evaluation, problem=problem)
    layout: Row = {}
    if len(plan.devices) > 1:
        layout = {"layout": stage_layout(plan), "megatron_layout": megatron_layout(plan)}
    summary = {
        "parameters": graph.num_parameters(),
        "cluster": cluster.describe(),
        "chosen": describe(plan),
        "step_time_s": prediction.step_time_s,
        "step_interval_s": prediction.step_interval_s,
        **details.rates,
        "mfu": prediction.mfu,
        "bubble_fraction": prediction.bubble_fraction,
        **layout,
        **memory_summary(prediction, cluster),
        **_meeting_summary(evaluation),
        "rests_on": evaluation.rests_on(),
        **(searched.bound if searched else {}),
    }
    return Report(
        plan=plan,
        summary=summary,
        stages=[
            row | {"tp_flops": share.flops, "tp_parameters": share.parameters}
            for row, share in zip(_stage_rows(evaluation), shares, strict=True)
        ],
        device_groups=details.components,
        solver=searched.solver if searched else [],
        assumptions=(*cluster.assumptions, *_assumptions(evaluation, problem)),
        notes=(
            *notes,
            *graph.notes,
            *_limits(evaluation, problem),
            *divided_notes(shares, graph, factors, searched=searched is not None),
            *ulysses_notes(evaluation.priced),
            *map(str, refused[:MAX_EXCLUDED]),
        ),
        excluded=[products.as_dict() for products in refused],
        aside=[str(products) for products in refused if degrees.isdisjoint(products.degrees)],
        phases_s=phases_s,
        timeline=evaluation.timeline.chrome_trace(),
        details=details,
    )


def memory_summary(prediction: Prediction, cluster: Cluster) -> Row:
    """Memory in the summary: bytes, whether the plan fits, and by what."""
    summary = {
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "memory_interval_bytes": prediction.memory_interval_bytes,
        "memory_bytes": cluster.device.memory_bytes,
        "memory_verdict": prediction.memory_verdict(cluster),
        "memory_probability": prediction.memory_probability(cluster),
        "memory_verdict_by": "price",
    }
    if (nbytes := prediction.host_memory_bytes) and (host := cluster.host) is not None:
        summary |= {"host_memory_bytes": list(nbytes), "host_room_bytes": host.room_bytes}
    if (nbytes := prediction.flash_bytes) and (host := cluster.host) is not None:
        summary |= {"flash_bytes": list(nbytes), "flash_room_bytes": host.flash_room_bytes}
    if (rehearsed := prediction.rehearsed) is None:
        return summary
    fullest = max(range(len(rehearsed.peak_bytes)), key=rehearsed.peak_bytes.__getitem__)
    return summary | {
        "memory_verdict_by": "rehearsal",
        "rehearsed_memory_bytes": rehearsed.peak_bytes,
        "rehearsed_tensor_bytes": rehearsed.tensor_bytes[fullest],
        "bytes_beside_tensors": rehearsed.beside_bytes[fullest],
    }


def _decisions(stage: StagePlan) -> dict[str, Any]:
    """Decisions of a stage; of its blocks, in words."""
    words = decision_words(stage)
    return {
        d.name: words[d.column] if d.acts == "block" else getattr(stage, d.name)
        for d in DECISIONS.values()
        if hasattr(stage, d.name)
    }


def _meeting_summary(evaluation: Evaluation) -> dict[str, Any]:
    """A rank's bytes and seconds of a meeting of replicas, where there are any."""
    if evaluation.meeting is None:
        return {}
    return {
        "meeting_sent_bytes": evaluation.meeting.sent_bytes,
        "meeting_s": evaluation.meeting_s,
        "sync_every": evaluation.plan.sync_every,
    }


def _stage_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The stage table as data: seconds per micro-batch, bytes per device."""
    plan, prediction = evaluation.plan, evaluation.prediction
    return [
        {
            "blocks": compress_names(stage.blocks),
            "ranks": compress_ranks(stage.ranks),
            **_decisions(stage),
            "mesh": mesh_words(stage),
            "decided": decision_words(stage),
            "host_bytes": float(costs.in_host_bytes(in_flight)),
            "flash_bytes": float(costs.flash_bytes),
            "forward_s": float(costs.forward_s),
            "backward_s": float(costs.backward_s),
            "communication_s": float(costs.forward_comm_s + costs.backward_comm_s),
            "gradient_reduction_s": float(costs.reduce_s),
            "optimizer_s": float(costs.optimizer_s),
            "memory_bytes": prediction.peak_memory_bytes[plan.devices.index(stage.ranks)],
            "microbatches_in_flight": in_flight,
        }
        for stage, costs, in_flight in zip(
            plan.stages, evaluation.stages, evaluation.in_flight, strict=True
        )
    ]


def _changed_numbers(plan: Plan) -> Iterator[str]:
    """Decisions of a plan by which a training's numbers change."""
    for name, decision in DECISIONS.items():
        holders = plan.having(name) if decision.allowed == "numbers" else ()
        values = {getattr(holder, name) for holder in holders}
        if used := sorted(filter(decision.uses, values)):
            said = ", ".join(map(str, used))
            yield (
                f"the training's numbers change with {name}={said}; how many more steps it takes "
                "is in no price"
            )


def _meetings(evaluation: Evaluation) -> Iterator[str]:
    """Volume and seconds of what replicas exchange."""
    meeting, every = evaluation.meeting, evaluation.plan.sync_every
    if meeting is not None:
        yield (
            f"over a meeting of the {meeting.replicas} replicas each rank sends "
            f"{sized(meeting.sent_bytes)} in {seconds(evaluation.meeting_s)}, beside nothing: "
            f"{sized(meeting.sent_bytes / (every or 1))} and {seconds(evaluation.meetings_s)} a "
            f"step; replicas are as fast as each other"
        )


def _assumptions(evaluation: Evaluation, problem: Problem) -> list[str]:
    """Sources of the prices, and assumptions about the software."""
    shares, target = evaluation.rests_on(), evaluation.target
    here = problem.cluster.measured
    of = "rates that were measured here" if here else "the catalog's efficiency curves"
    lines = [
        f"of the operators' seconds {shares['measured']:.0%} were timed on this device, "
        f"{shares['interpolated']:.0%} interpolated, {shares['modelled']:.0%} follow from {of} "
        "(`meshwright profile` times operators)",
        _software(target, hides=problem.cluster.device.kind != "cpu"),
        MFU,
    ]
    lines += [*_parallel(evaluation), *_idle_recompute(evaluation)]
    lines += _kernel_by_kernel(evaluation, problem)
    if problem.tf32:
        lines.append(
            "fp32 products, attention's too, are at TF32's rate (tf32=True); what was measured of "
            "operators is of fp32, and not used"
        )
    lines += [evaluation.served.words(evaluation.plan)] if evaluation.served else []
    lines += _changed_numbers(evaluation.plan)
    lines += _meetings(evaluation)
    if PRECISIONS[evaluation.plan.precision].kept != "fp32":
        lines.append(PURE)
    if PRECISIONS[evaluation.plan.precision].narrow:
        lines.append(_in_few_bits(problem, evaluation.plan.precision))
    if problem.profile is not None:
        lines += [f"corrected by steps that ran: {by}" for by in problem.profile.corrected_by()]
    hosted = any(stage.host for stage in evaluation.plan.stages)
    if hosted and problem.cluster.host is not None:
        lines += [*problem.cluster.host.assumed(_measured_of_host(problem)), HOST_STEP]
    lines += [FILES] * bool(evaluation.prediction.flash_bytes)
    ops = {op.short for op in problem.graph.ops}
    if "batch_norm" in ops:
        lines.append(
            "batch norm statistics are per micro-batch, over all data-parallel ranks; its blocks "
            "are not recomputed"
        )
    lines += _written_buffers(problem.graph)
    if "dispatch" in ops:
        lines.append(
            "the busiest of the ranks that share experts out gets "
            f"{target.expert_imbalance:g} times the mean of tokens (expert_imbalance)"
        )
    if "dropout" in ops:
        lines.append(
            "dropout masks come from a counter over global indices: the same under every plan"
        )
    return lines


def _parallel(evaluation: Evaluation) -> list[str]:
    """Layout of activations between tensor-parallel blocks."""
    sent = [
        entered.assignment.states[value].sharded
        for stage in evaluation.priced
        if stage.setting.mesh.tp > 1
        for entered in stage.blocks
        for value in entered.block.outputs
    ]
    if not any(sent):
        return []
    return [
        f"{sum(sent)} of {len(sent)} activations between tensor-parallel blocks are split over the "
        "tensor axis, too (sequence parallelism, Megatron's --sequence-parallel)"
    ]


def _idle_recompute(evaluation: Evaluation) -> list[str]:
    """Recompute policies of blocks that make nothing again by them."""
    freed: dict[str, float] = {}
    for stage in evaluation.priced:
        for entered, policy in zip(stage.blocks, stage.stage.policies, strict=True):
            gathers = parts_of(policy)[1]
            freed[policy] = freed.get(policy, 0.0) + entered.repeats(policy) + gathers
    fused = {"selective": ": attention that is fused keeps no scores"}
    return [
        f"the policy {policy!r} makes nothing again here{fused.get(policy, '')}"
        for policy, nbytes in freed.items()
        if policy != "none" and not nbytes
    ]


def _written_buffers(graph: Graph) -> list[str]:
    """When the forward's writes to buffers are made."""
    once = written_once(graph)
    by_rows = [graph.buffers[buffer] for buffer in graph.updates if buffer not in once]
    said = {
        "are written once a step": [graph.buffers[buffer] for buffer in sorted(once)],
        "are written in each micro-batch, by its rows": by_rows,
    }
    named = {when: ", ".join(compress_names(names)) for when, names in said.items() if names}
    return [f"buffers {names} {when}" for when, names in named.items()]


def _kernel_by_kernel(evaluation: Evaluation, problem: Problem) -> list[str]:
    """Seconds and bytes of an optimizer that steps kernel by kernel, beside its fused kernel's."""
    stepped, faster = problem.optimizer, fused(problem.optimizer)
    slow, fast = problem.stepped, optimizer_named(faster, problem.stepped.kept_bytes)
    if slow == fast:
        return []
    stages = evaluation.plan.stages
    held = problem.cluster.device.kind == "cuda" and evaluation.target.gradients_come
    if held and all(stage.host.states == 1 for stage in stages):
        return [
            f"{stepped} makes {slow.temporary} bytes a parameter beside its states in a step, "
            f"where these lie on a device; more may fit with fused=True (planned as {faster!r})"
        ]
    step_s = busiest(device_groups(evaluation)).optimizer_s
    beside = max(
        slow.temporary * costs.parameters / stage.parts(stage.shards) * (1 - stage.host.states)
        for stage, costs in zip(stages, evaluation.stages, strict=True)
    )
    binds = held and any(peak.action is None for peak in evaluation.prediction.peaks)
    return [
        f"{stepped} steps kernel by kernel, torch's default, in {seconds(step_s)}"
        + f" and {sized(beside)} beside its states" * held
        + ", where the memory of this plan is highest" * binds
        + f"; with fused=True (planned as {faster!r}) in "
        f"{seconds(step_s * fast.moved / slow.moved)}" + " and nothing" * held
    ]


def _measured_of_host(problem: Problem) -> list[str]:
    """Kinds of a host's work that were measured, by the ranks of a node at once."""
    profile, per_node = problem.profile, problem.cluster.devices_per_node
    if profile is None:
        return []
    return [kind for kind in OF_HOST if profile.host_bandwidth(kind, at_once(kind, per_node))]


def _software(target: Target, *, hides: bool) -> str:
    """Features that a target is taken to have, and those that it lacks."""
    overlaps = {
        "gradient reduction": target.overlap_gradients and hides,
        "ZeRO's gathers": target.overlap_parameters and hides,
        "sends": target.overlap_sends,
    }
    words = [f"{name} {'' if hidden else 'not '}overlapped" for name, hidden in overlaps.items()]
    without = f"; can't run {', '.join(target.excludes)}" if target.excludes else ""
    return f"target {target.name}: kernels fused: {target.fusion}; {', '.join(words)}{without}"


def _in_few_bits(problem: Problem, precision: str) -> str:
    """Products in 8 or 4 bits, and their scales."""
    graph, table = problem.graph, problem.factors
    total = sum(op_flops(table, op) for op in graph.ops if table.ops[op.name].flops)
    part = sum(op_flops(table, op) for op in graph.ops if is_narrow(graph, op)) / total
    narrow, scaled = PRECISIONS[precision].narrow, SCALED_BY[precision]
    blocks = IN_BLOCK.get(scaled)
    by = f"blocks of {blocks}" if blocks else scaled
    where = "" if narrow in problem.cluster.device.peak_flops else ", emulated on this device"
    experts = any(is_narrow(graph, op) and traits_of(op).experts for op in graph.ops)
    if not where and problem.target.gradients_come and (experts or blocks):
        what = "products" if blocks else "experts' products"
        where = f", priced at the units' rate, although train_step emulates {what}"
    return (
        f"layers' products, {part:.0%} of the FLOPs, are in {NARROW[narrow]}-bit floats scaled by "
        f"{by}{where}; attention, embedding, head and all else in bf16; MFU is of the peak of each"
    )


def _limits(evaluation: Evaluation, problem: Problem) -> list[str]:
    """Notes on whatever slows the plan down, or changes its loss."""
    graph, factors, notes = problem.graph, problem.factors, []
    precision, device = PRECISIONS[evaluation.plan.precision].wide, problem.cluster.device
    faster = device.fastest
    if precision not in device.peak_flops and device.flops(faster) > device.flops(precision):
        times = device.flops(faster) / device.flops(precision)
        notes.append(
            f"{device.name} has no units for {precision}: products are priced at fp32's rate; "
            f"precision={faster!r} has {times:.2g} times it"
        )
    unknown = sorted({op.target for op in graph.ops if not factors.ops[op.name].known})
    if unknown:
        notes.append(
            f"no sharding rule for {', '.join(unknown)}: run in full on every tensor-parallel rank"
        )
    layout = data_layout(graph, factors, graph.batch_size)
    if max(stage.dp for stage in evaluation.plan.stages) > 1 and layout.gathered:
        notes.append(
            "the whole micro-batch is gathered on every data-parallel rank for "
            f"{_several(layout.gathered)}"
        )
    if evaluation.priced[0].setting.validated and (apart := shared_apart(evaluation.plan, graph)):
        notes.append(
            f"stages on different ranks share {_several(apart)}: its gradients meet before the "
            "optimizer's step, so that validating it afterwards gains nothing"
        )
    use, count = row_use(graph, factors), evaluation.plan.num_microbatches
    if use.meetings:
        how = (
            f"each of {count} micro-batches by itself, which is another loss than the whole batch's"
            if count > 1
            else "the batch is one micro-batch, and its loss exact"
        )
        notes.append(f"rows meet in {meeting_words(use.meetings)}: {how}")
    if use.finite and count > 1:
        notes.append(
            f"each of {count} micro-batches looks by itself for numbers that are not finite, "
            f"which is exact while there are none: {meeting_words(use.finite)}"
        )
    return notes


def _several(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
