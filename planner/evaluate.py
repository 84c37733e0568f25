"""Prices any Plan: the search's, a user's, a file's. One code path from assignments to seconds and
bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodel.collectives import p2p_time
from costmodel.factors import FactorTable
from costmodel.graph import Graph
from costmodel.schedule import build_schedule, in_flight
from costmodel.simulate import StageTimes, Timeline, simulate
from costmodel.strategies import Placement, R
from planner.block_price import price_block
from planner.blocks import op_flops
from planner.layouts import Assignment, BlockLayouts
from planner.plan import Plan
from planner.stage_costs import StageCoster, translate
from planner.stage_sums import FIELDS, StageCosts, components, joined, parameter_sums, stage_costs
from profiles.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is expected to do: seconds per step, peak bytes per device and stage, share of
    the pipeline's time that stages wait, model FLOPs utilisation of the whole cluster."""

    step_time_s: float
    peak_memory_bytes: list[int]
    bubble_fraction: float
    mfu: float

    def shortfall_bytes(self, cluster: Cluster) -> list[int]:
        """Bytes by which each stage exceeds its devices' memory; 0 where it fits."""
        room = cluster.device.memory_bytes
        return [max(0, used - room) for used in self.peak_memory_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A priced plan: prediction, components per stage, the simulated step."""

    plan: Plan
    prediction: Prediction
    stages: tuple[StageCosts, ...]
    in_flight: tuple[int, ...]
    timeline: Timeline


def model_flops(graph: Graph, table: FactorTable, rows: float) -> float:
    """FLOPs of one step over `rows` rows: forward once, backward twice; recompute is no work (MFU
    convention)."""
    total = 0.0
    for op in graph.ops:
        made = table.ops[op.name]
        if made.flops:
            atoms = table.letters[op.name]
            batched = any(table.batch in atoms.get(f, ()) for f in made.flop_factors)
            scale = rows / graph.batch_size if batched else 1.0
            total += 3 * op_flops(table, op) * scale
    return total


def evaluate(
    plan: Plan,
    graph: Graph,
    table: FactorTable,
    cluster: Cluster,
    assignments: Sequence[Mapping[str, Assignment]],
    *,
    optimizer: str,
    coster: StageCoster | None = None,
) -> Evaluation:
    """Price a checked plan. `assignments` are what `check_plan` returns; `graph` may have any batch
    size."""
    coster = coster or StageCoster(graph, table, cluster, plan.precision, optimizer)
    stages = tuple(_stage(plan, k, coster, assignments[k]) for k in range(len(plan.stages)))
    p, m = len(plan.stages), plan.num_microbatches
    held = tuple(
        in_flight(plan.schedule, stage=k, num_stages=p, num_microbatches=m) for k in range(p)
    )
    timeline = _simulate(plan, graph, coster, stages)
    reserved = cluster.device.reserved_bytes
    memory = [
        math.ceil(s.static_bytes + n * s.activation_bytes + reserved)
        for s, n in zip(stages, held, strict=True)
    ]
    peak = cluster.device.flops(plan.precision) * plan.num_ranks
    flops = model_flops(graph, table, plan.global_batch_size)
    prediction = Prediction(
        step_time_s=timeline.step_time_s,
        peak_memory_bytes=memory,
        bubble_fraction=timeline.bubble_fraction,
        mfu=flops / (timeline.step_time_s * peak),
    )
    return Evaluation(
        plan=plan, prediction=prediction, stages=stages, in_flight=held, timeline=timeline
    )


def _stage(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> StageCosts:
    """Components of stage k; blocks of one class with equal decisions are priced once, and of a
    parameter that several blocks read alike one copy is held."""
    stage = plan.stages[k]
    graph = coster.graph
    setting = coster.setting(
        dp=stage.dp,
        tp=stage.tp,
        rows=plan.microbatch_rows / stage.dp,
        microbatches=plan.num_microbatches,
        zero=stage.zero,
    )
    pricer = coster.pricer(replace(setting, zero=0))  # what ZeRO saves is taken off the sums
    sums = np.zeros(len(FIELDS))
    stored: set[tuple[str, Placement]] = set()
    states: dict[str, object] = {}
    known: dict[str, list[tuple[object, Assignment, object, np.ndarray]]] = {}
    for block in graph.blocks:
        if block.name not in assignments:
            continue
        assignment = assignments[block.name]
        inputs = {name: states.get(name, R) for name in block.inputs}
        key = tuple(inputs.values())
        parts = None
        for seen, first, seen_key, found in known.get(block.class_id, []):
            if seen_key == key and translate(first, seen, block) == assignment:  # type: ignore[arg-type]
                parts = found
                break
        if parts is None:
            layouts = BlockLayouts(graph, coster.table, block, stage.tp)
            parts = components(price_block(pricer, layouts, assignment, inputs), block)  # type: ignore[arg-type]
            known.setdefault(block.class_id, []).append((block, assignment, key, parts))
        sums = joined(sums, parts)
        held = [(value, assignment.states[value]) for value in block.parameters]
        for value, state in stored.intersection(held):
            sums -= parameter_sums(pricer, value, state)
        stored.update(held)
        states |= {name: assignment.states[name] for name in block.outputs}
    return stage_costs(sums, setting, stage.recompute)


def stage_of(plan: Plan) -> dict[str, int]:
    return {name: k for k, stage in enumerate(plan.stages) for name in stage.blocks}


def crossings(plan: Plan, graph: Graph) -> dict[tuple[int, int], tuple[str, ...]]:
    """(source stage, target stage) -> the activations that travel between them."""
    owner = stage_of(plan)
    made = {value: owner[b.name] for b in graph.blocks for value in b.outputs}
    found: dict[tuple[int, int], dict[str, None]] = {}
    for block in graph.blocks:
        for value in block.inputs:
            edge = (made[value], owner[block.name])
            if edge[0] != edge[1]:
                found.setdefault(edge, {})[value] = None
    return {edge: tuple(values) for edge, values in sorted(found.items())}


def _simulate(
    plan: Plan, graph: Graph, coster: StageCoster, stages: Sequence[StageCosts]
) -> Timeline:
    edges = crossings(plan, graph)
    transfer = {edge: transfer_seconds(plan, coster, edge, v) for edge, v in edges.items()}
    times = [
        StageTimes(
            forward_s=float(s.forward_s),
            backward_s=float(s.backward_s),
            reduce_s=float(s.reduce_s),
            optimizer_s=float(s.optimizer_s),
        )
        for s in stages
    ]
    streams = build_schedule(
        plan.schedule,
        num_stages=len(stages),
        num_microbatches=plan.num_microbatches,
        edges=frozenset(edges),
    )
    return simulate(streams, times, transfer)


def transfer_seconds(
    plan: Plan, coster: StageCoster, edge: tuple[int, int], values: Sequence[str]
) -> float:
    """Seconds to move `values` of one micro-batch between two stages; the slower side's share
    counts."""
    cluster = coster.cluster
    ends = [plan.stages[k] for k in edge]
    rows = plan.microbatch_rows / min(stage.dp for stage in ends)
    setting = coster.setting(dp=1, tp=1, rows=rows, microbatches=plan.num_microbatches)
    nbytes = sum(coster.pricer(setting).nbytes(v) for v in values)
    nodes = [{r // cluster.devices_per_node for r in stage.ranks} for stage in ends]
    crosses = bool(nodes[0] ^ nodes[1])
    concurrent = min(max(len(stage.ranks) for stage in ends), cluster.devices_per_node)
    return float(p2p_time(nbytes, cluster, crosses_node=crosses, concurrent=concurrent))
