"""Plans of stage drafts: ranks, recompute per block, shardings as globs, the price by simulation.

A draft is priced from its stages' sums at once. The chosen one is written out as a plan and priced
again from the plan alone, as a plan from a file would be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any, TypeAlias

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.recompute import segment_policy
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.sharding import Assignment, Entry, Placement
from meshwright.costmodel.stages import fits
from meshwright.planner.drafts.combinations import StageDraft
from meshwright.planner.plan import (
    Plan,
    StagePlan,
    arriving_states,
    away_blocks,
    crossings,
    express_shardings,
    sent_in_parts,
    stage_on,
    tensor_multiple,
)
from meshwright.planner.pricing import (
    Evaluation,
    StageCoster,
    attention_part,
    evaluate,
    even_work,
    price_blocks,
    stage_blocks,
)
from meshwright.planner.stages import choose_policies, freed_bytes
from meshwright.profiles.cluster import Cluster

MOST_TRIES = 3  # to fit what is written out

# tp, class of a block, its choices and input states: entries by the number of their name
Known: TypeAlias = dict[tuple[Any, ...], list[tuple[int, Entry]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan with its price, and whether it fits."""

    evaluation: Evaluation
    fits: bool

    @property
    def plan(self) -> Plan:
        return self.evaluation.plan

    @property
    def step_time_s(self) -> float:
        return self.evaluation.prediction.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDraft(Priced):
    """A plan priced from its stages' sums, without shardings. Its fullest device lacks
    `lacks_bytes`, negative where it fits; written out, a device may fill `room_bytes`."""

    stages: tuple[StageDraft, ...]
    lacks_bytes: float
    room_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Priced):
    """A plan the search considered, priced from the plan alone."""

    assignments: list[dict[str, Assignment]]


def make_draft(
    coster: StageCoster,
    stages: Sequence[StageDraft],
    pipeline: Pipeline,
    global_batch_size: int,
    memory_bytes: float,
    free_bytes: float = 0.0,
    slices: Sequence[int] = (),
) -> PlanDraft:
    """Stages priced by simulation, memory from their blocks; devices leave `free_bytes` free.
    Where the pipeline takes slices without given sizes, they are those of even work."""
    placed = zip(stages, _ranks(stages, pipeline, coster.cluster), strict=True)
    plan = Plan(
        model=coster.fingerprint,
        global_batch_size=global_batch_size,
        num_microbatches=pipeline.num_microbatches // pipeline.slices,
        slices=tuple(slices) or _slices(coster, stages, pipeline),
        branches=pipeline.depths,
        schedule=pipeline.schedule,
        precision=coster.problem.precision,
        staleness=pipeline.staleness,
        stages=tuple(_stage_plan(coster, draft, here) for draft, here in placed),
        chunked_loss=coster.graph.loss_parts,
    )
    stepping = stages[0].setup.stepping
    if stepping != "validated" or len(plan.devices) > 1:
        plan = plan.stepped(stepping)
    assignments = _assignments(stages, plan, coster.graph)
    arriving = arriving_states(plan, coster.graph, assignments)
    blocks = (
        stage_blocks(plan, k, coster, *of_stage)
        for k, of_stage in enumerate(zip(assignments, arriving, strict=True))
    )
    priced = price_blocks(plan, coster, [d.costs for d in stages], blocks, arriving)
    fullest = priced.prediction.fullest_bytes
    return PlanDraft(
        stages=tuple(stages),
        evaluation=priced,
        fits=priced_fits(priced, coster.cluster, memory_bytes),
        lacks_bytes=fullest - memory_bytes,
        room_bytes=min(memory_bytes, max(memory_bytes - free_bytes, fullest)),
    )


def _slices(
    coster: StageCoster, stages: Sequence[StageDraft], pipeline: Pipeline
) -> tuple[int, ...]:
    """Sizes of a pipeline's slices, of even work on the stage that takes longest; none where it
    takes whole micro-batches."""
    if pipeline.slices == 1:
        return ()
    slowest = max(stages, key=lambda d: d.costs.forward_s + d.costs.backward_s)
    blocks = coster.graph.blocks[slowest.start : slowest.stop]
    attention = attention_part(coster.pricer(slowest.setup.setting), blocks, slowest.costs)
    multiple = tensor_multiple(d.setup.mesh.tp for d in stages)
    return even_work(coster.problem.factors.length, pipeline.slices, attention, multiple)


def _assignments(
    stages: Sequence[StageDraft], plan: Plan, graph: Graph
) -> list[dict[str, Assignment]]:
    """The assignments of each stage's blocks, by name; what goes to a stage on another mesh, or to
    another one than the next, is whole."""
    meshes = [d.setup.mesh for d in stages]
    alike = [False, *((a.tp, a.dp, a.cp) == (b.tp, b.dp, b.cp) for a, b in pairwise(meshes)), False]
    if plan.branches:
        sends = crossings(plan, graph)
        targets = [{b for a, b in sends if a == k} for k in range(len(stages))]
        sources = [{a for a, b in sends if b == k} for k in range(len(stages))]
        for k in range(1, len(stages)):
            alike[k] &= targets[k - 1] == {k} and sources[k] == {k - 1}
    return [
        d.setup.chain.assignments(d.start, d.stop, whole=(not before, not after))
        for d, before, after in zip(stages, alike, alike[1:], strict=False)
    ]


def make_candidate(coster: StageCoster, draft: PlanDraft) -> Candidate:
    """The plan of a draft, written out and priced from what is written. Where some blocks are
    recomputed, it is the faster one of two: a stage's highest point may be in its last block's
    backward or not."""
    assignments = _assignments(draft.stages, draft.plan, coster.graph)
    plan = _with_shardings(coster, draft, assignments)
    candidate = _candidate(coster, draft, plan, assignments, ends=True)
    if all(set(stage.policies) == {"none"} for stage in candidate.plan.stages):
        return candidate
    other = _candidate(coster, draft, plan, assignments, ends=False)
    return min(candidate, other, key=lambda c: (not c.fits, c.step_time_s))


def _candidate(
    coster: StageCoster,
    draft: PlanDraft,
    plan: Plan,
    assignments: list[dict[str, Assignment]],
    *,
    ends: bool,
) -> Candidate:
    """The plan of a draft, whose shardings are written, with the recompute that fits if each stage
    `ends` with its highest point, or not. Where whole blocks don't fit as parts of them did, more
    are recomputed; where they leave room, fewer, once."""
    memory_bytes = draft.room_bytes
    room = memory_bytes - coster.cluster.device.reserved_bytes
    groups = [
        [k for k, stage in enumerate(draft.plan.stages) if stage.ranks == ranks]
        for ranks in draft.plan.devices
    ]
    keep = [_room_to_keep([draft.stages[k] for k in here], room) for here in groups]
    fitting: list[Candidate] = []
    policies = None
    for tried in range(MOST_TRIES):
        last, policies = policies, _policies(coster, draft, groups, keep, tried, ends=ends)
        if fitting and policies == last:
            break
        repeated = zip(plan.stages, policies, strict=True)
        stages = tuple(stage.repeating(*blocks) for stage, blocks in repeated)
        written = dataclasses.replace(plan, stages=stages)
        candidate = price_candidate(written, assignments, coster, memory_bytes)
        again, fits = bool(fitting), candidate.fits
        fitting += [candidate] * fits
        if again or (fits and all(set(names) == {"none"} for names, _ in policies)):
            break
        peaks = candidate.evaluation.prediction.peak_memory_bytes
        for g, (here, peak) in enumerate(zip(groups, peaks, strict=True)):
            spare = (memory_bytes - peak) / max(_in_flight([draft.stages[k] for k in here]), 1.0)
            saved = sum(
                _kept_bytes(draft.stages[k], policies[k][0], plan.stages[k], ends=ends)
                for k in here
            )
            keep[g] = (saved if fits else min(keep[g], saved)) + spare
    return min(fitting or [candidate], key=lambda c: c.step_time_s)


def price_candidate(
    plan: Plan, assignments: list[dict[str, Assignment]], coster: StageCoster, memory_bytes: float
) -> Candidate:
    """The candidate of a plan, each device of which may fill `memory_bytes`."""
    priced = evaluate(plan, coster.problem, assignments, coster)
    fits = priced_fits(priced, coster.cluster, memory_bytes)
    return Candidate(evaluation=priced, assignments=assignments, fits=fits)


def _with_shardings(
    coster: StageCoster, draft: PlanDraft, assignments: Sequence[Mapping[str, Assignment]]
) -> Plan:
    """The plan of a draft with the shardings of its stages."""
    known: Known = {}
    stages, in_parts = [], sent_in_parts(draft.plan, coster.graph)
    arriving = arriving_states(draft.plan, coster.graph, assignments)
    of_stages = zip(draft.stages, draft.plan.stages, assignments, arriving, strict=True)
    for d, stage, choices, arrives in of_stages:
        blocks = coster.graph.blocks[d.start : d.stop]
        shardings = _shardings(coster, blocks, choices, stage.tp, known, arrives, in_parts)
        stages.append(dataclasses.replace(stage, shardings=shardings))
    return dataclasses.replace(draft.plan, stages=tuple(stages))


def priced_fits(priced: Evaluation, cluster: Cluster, memory_bytes: float) -> bool:
    """Whether a plan fits its devices' `memory_bytes`, and its nodes' host memory and flash."""
    step = priced.prediction
    lacks = step.host_shortfall(cluster) or step.flash_shortfall(cluster)
    return fits(step.fullest_bytes, memory_bytes) and not lacks


def _stage_plan(coster: StageCoster, draft: StageDraft, ranks: tuple[int, ...]) -> StagePlan:
    names = tuple(b.name for b in coster.graph.blocks[draft.start : draft.stop])
    setting = draft.setup.setting
    stage = stage_on(setting.mesh, names, ranks, setting.sharing).with_host(draft.host)
    return stage.repeating(*draft.repeated)


# --- recompute -----------------------------------------------------------------------------------


def _policies(
    coster: StageCoster,
    draft: PlanDraft,
    groups: Sequence[Sequence[int]],
    keep: Sequence[float],
    tried: int,
    *,
    ends: bool,
) -> list[tuple[tuple[str, ...], int]]:
    """The policy of each block of each stage, and the blocks in its segments: the least recompute
    with which the stages of a device group `keep` no more of a micro-batch together; a draft
    without any keeps to that unless it was `tried`, one in segments goes on to its next ones then;
    one that can't fit at all keeps what it has at first, then as little as there is."""
    repeated = [d.repeated for d in draft.stages]
    for here, room_bytes in zip(groups, keep, strict=True):
        stages = {k: draft.stages[k] for k in here}
        if any(repeated[k][1] > 1 for k in here):
            for k, d in stages.items():
                repeated[k] = d.harder(tried)
            continue
        if not tried and all(set(repeated[k][0]) == {"none"} for k in here):
            continue
        sent = {k: away_blocks(draft.plan.stages[k]) for k in here}
        blocks = [d.setup.chain.block_sums(d.start, d.stop)[sent[k] :] for k, d in stages.items()]
        ends_at = accumulate(map(len, blocks))
        legal = [p for p in draft.stages[here[0]].levels.policies if segment_policy(p)[1] == 1]
        chosen = choose_policies(
            [*chain.from_iterable(blocks)],
            legal,
            room_bytes=room_bytes,
            device=coster.cluster.device.kind,
            last=[end - 1 for end, sums in zip(ends_at, blocks, strict=True) if ends and sums],
        )
        if chosen is None and tried:  # what holds least is closest
            chosen = (legal[-1],) * sum(map(len, blocks))
        if chosen:
            names = iter(chosen)
            for k, d in stages.items():
                policies, size = repeated[k]
                here_again = islice(names, d.stop - d.start - sent[k])
                repeated[k] = d.overridden([*policies[: sent[k]], *here_again]), size
    return repeated


def _room_to_keep(stages: Sequence[StageDraft], room: float) -> float:
    """Bytes that the stages of a device group may keep of one micro-batch each, together."""
    costs, flights = [d.costs for d in stages], [d.in_flight for d in stages]
    split = any(flight.split for flight in flights)
    passing = max(c.half_bytes + c.communicator_bytes if split else c.passing_bytes for c in costs)
    put_off = sum(
        float(flight.put_off) * c.put_off_bytes for flight, c in zip(flights, costs, strict=True)
    )
    late = sum(float(f.late_bytes(c)) for f, c in zip(flights, costs, strict=True))
    room -= late
    begun = max(c.first_bytes + c.communicator_bytes for c in costs)
    spare = (
        (room - passing - put_off - sum(c.kept_bytes for c in costs), [f.active for f in flights]),
        (room - begun - sum(c.fixed_bytes for c in costs), [f.first for f in flights]),
    )
    rooms = [
        nbytes * len(stages) / count
        for nbytes, in_flight in spare
        if (count := sum(map(float, in_flight)))
    ]
    return min(rooms, default=math.inf)


def _in_flight(stages: Sequence[StageDraft]) -> float:
    """Micro-batches in flight of a stage of a device group, on average."""
    most = [max(float(d.in_flight.active), float(d.in_flight.first)) for d in stages]
    return sum(most) / len(most)


def _kept_bytes(
    draft: StageDraft, policies: Sequence[str], stage: StagePlan, *, ends: bool
) -> float:
    """Bytes that a stage keeps of a micro-batch on its devices under these policies."""
    blocks = draft.setup.chain.block_sums(draft.start, draft.stop)
    end = len(policies) - 1 if ends else -1
    return sum(
        float(sums.saved_bytes + sums.input_bytes) - freed_bytes(sums, policy, last=k == end)
        for k, (sums, policy) in enumerate(zip(blocks, policies, strict=True))
        if k >= away_blocks(stage)
    )


# --- shardings -----------------------------------------------------------------------------------


def _shardings(
    coster: StageCoster,
    blocks: Sequence[Block],
    assignments: Mapping[str, Assignment],
    tp: int,
    known: Known,
    arriving: Mapping[str, Placement],
    in_parts: Collection[str],
) -> dict[str, str]:
    """Decisions that do not follow, as globs; `known` are those of equal blocks, `arriving` the
    states of what stages before send `in_parts`."""
    if tp == 1:
        return {}
    entries: dict[str, Entry] = {}
    states = dict(arriving)
    for block in blocks:
        inputs = {n: states[n] for n in block.inputs if n in states}
        names = [*(op.name for op in block.ops), *block.parameters]
        seen = tuple(states.get(name) for name in block.inputs)
        assignment = assignments[block.name]
        key = tp, block.class_id, assignment.choices, seen
        if key not in known:
            layouts = coster.layouts(block, tp).compress(assignment, inputs)
            known[key] = [(k, layouts[name]) for k, name in enumerate(names) if name in layouts]
        entries |= {names[k]: entry for k, entry in known[key]}
        states |= {n: assignment.states[n] for n in block.outputs}
    _like_repeats(blocks, entries, in_parts)
    return express_shardings(coster.graph, blocks, entries)


def _like_repeats(
    blocks: Sequence[Block], entries: dict[str, Entry], in_parts: Collection[str]
) -> None:
    """Give each output of the stage that is sent whole, whatever its entry says, the entry of its
    repeats, so that one glob serves all."""
    last = blocks[-1]
    peer = next((b for b in blocks[:-1] if b.class_id == last.class_id), None)
    for op, other in zip(last.ops, peer.ops if peer else (), strict=False):
        alike = entries.get(other.name)
        whole = op.results[0] in last.outputs and op.results[0] not in in_parts
        if whole and alike and alike.state:
            entry = entries.get(op.name, Entry())
            entries[op.name] = dataclasses.replace(entry, state=alike.state)


# --- ranks ---------------------------------------------------------------------------------------


def _ranks(
    stages: Sequence[StageDraft], pipeline: Pipeline, cluster: Cluster
) -> list[tuple[int, ...]]:
    meshes = [d.setup.mesh for d in stages]
    if pipeline.groups:
        sizes = [meshes[of_device[0]].devices for of_device in pipeline.placed]
        placed = place_stages(sizes, cluster)
        return [placed[device] for device in pipeline.groups]
    if pipeline.each > 1 or meshes[0].spread > 1:
        return [mesh.ranks_of(k) for mesh, k in zip(meshes, pipeline.device_of, strict=True)]
    return place_stages([mesh.devices for mesh in meshes], cluster)


def place_stages(sizes: Sequence[int], cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks of every stage in pipeline order, moved so that no part of a node straddles two."""
    node = cluster.devices_per_node
    free = set(range(cluster.num_devices))
    placed: dict[int, tuple[int, ...]] = {}
    for k in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        starts = range(0, cluster.num_devices - sizes[k] + 1, min(sizes[k], node))
        start = next((s for s in starts if free.issuperset(range(s, s + sizes[k]))), None)
        if start is None:  # sizes that don't nest: one after the other
            return [tuple(range(sum(sizes[:k]), sum(sizes[: k + 1]))) for k in range(len(sizes))]
        placed[k] = tuple(range(start, start + sizes[k]))
        free.difference_update(placed[k])
    return [placed[k] for k in range(len(sizes))]
