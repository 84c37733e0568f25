"""Peak memory of a plan in the course of a step, from the prices of its blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from meshwright.costmodel.blocks import REGATHER, Moment, PassPrice, parts_of
from meshwright.costmodel.memory import (
    Reduction,
    Trained,
    fixed_bytes,
    optimizer_temporary_bytes,
    undo_bytes,
)
from meshwright.costmodel.operators import DTYPE_BYTES, Pricer, Setting
from meshwright.costmodel.quantized import buffer_bytes
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.sharding import Placement
from meshwright.costmodel.stages import (
    BlockBytes,
    Peak,
    Recompute,
    StageBytes,
    Sums,
    communicator_bytes,
    course_peaks,
    secondary_bytes,
)
from meshwright.planner.plan import (
    Plan,
    StagePlan,
    check_plan,
    crossings,
    offloaded_parameters,
    offloaded_weights,
)
from meshwright.planner.pricing.away import entering_bytes, sending
from meshwright.planner.pricing.priced_stage import PricedStage, priced_stage
from meshwright.planner.pricing.segments import in_segments
from meshwright.planner.pricing.stage_costs import StageCoster, stage_setting


def plan_peaks(plan: Plan, coster: StageCoster, priced: Sequence[PricedStage]) -> list[Peak]:
    """The highest point of a step on a device of each device group, reserved bytes included."""
    edges = crossings(plan, coster.graph)
    ranks = [stage.ranks for stage in plan.stages]  # stages of the same hand over what they hold
    sent = {edge: values for edge, values in edges.items() if ranks[edge[0]] != ranks[edge[1]]}
    held: set[tuple[tuple[int, ...], str]] = set()
    stages = [_stage(plan, k, own, sent, held) for k, own in enumerate(priced)]
    peaks = course_peaks(
        stages,
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        num_devices=len(plan.devices),
        edges=frozenset(edges),
    )
    device = coster.cluster.device
    more = max(communicator_bytes(each.setting) for each in priced)
    beside = device.reserved_bytes + more + _batch_bytes(plan, coster)
    return [replace(peak, nbytes=math.ceil(peak.nbytes + beside)) for peak in peaks]


def _batch_bytes(plan: Plan, coster: StageCoster) -> float:
    """Bytes of the global batch that the caller holds: on a CPU they lie where the tensors do."""
    graph = coster.graph
    if coster.cluster.device.kind != "cpu":
        return 0.0
    total, factors = 0.0, coster.problem.factors
    for value in graph.inputs:
        meta = graph.values[value]
        rows = plan.global_batch_size / graph.batch_size if factors.has_batch(value) else 1.0
        total += rows * math.prod(meta.shape) * meta.dtype.itemsize
    return total


def _stage(
    plan: Plan,
    k: int,
    priced: PricedStage,
    edges: Mapping[tuple[int, int], Sequence[str]],
    held: set[tuple[tuple[int, ...], str]],
) -> StageBytes:
    """What stage k holds, block by block; `edges` are what stages send to each other, `held` the
    ranks and parameters of earlier stages, to which this one's are added."""
    stage, setting, pricer = priced.stage, priced.setting, priced.pricer
    entered, states = priced.blocks, dict[str, Placement]()
    read: set[tuple[str, Placement]] = set()
    shared: set[tuple[str, Placement]] = set()  # parameters that several blocks read
    # of each parameter the last block that reads it, and its number there
    readers: dict[tuple[str, Placement], tuple[int, int]] = {}
    for at, each in enumerate(entered):
        read |= each.inputs.items()
        for number, parameter in enumerate(each.parameters):
            if parameter in readers:
                shared.add(parameter)
            if (stage.ranks, parameter[0]) not in held:
                readers[parameter] = at, number
        states |= {value: each.assignment.states[value] for value in each.block.outputs}
    targets = {j: values for (i, j), values in edges.items() if i == k}
    sent, there = {*chain(*targets.values())}, offloaded_parameters(stage, pricer.graph)
    trained, numbers, frozen = _parameters(readers, pricer, stage, there)
    held |= {(stage.ranks, value) for value, _ in readers}
    owned = [p.numel / (p.shards if stage.zero else 1) for p in trained if not p.host]
    among = {numbers[readers[parameter]] for parameter in shared if readers[parameter] in numbers}
    gathered = _gathered(trained, among, len(entered), setting)
    entering = entering_bytes(entered, pricer)
    blocks, split = [], SCHEDULES[plan.schedule].splits_backward
    for at, (each, policy) in enumerate(zip(entered, stage.policies, strict=True)):
        course = [
            (moment, tuple(numbers[at, k] for k in moment.parameters if (at, k) in numbers))
            for moment in each.passes.course
        ]
        again, late = each.sums.recompute(policy), split and _reads_late(each.passes)
        found = _block(again, each.sums, entering[at], gathered[at], course)
        if parts_of(policy)[1]:
            found = _gathering(found, again, alone=policy == REGATHER, late=late)
        blocks.append(found)
    blocks = in_segments(blocks, entering, stage, entered, pricer)
    return StageBytes(
        fixed=frozen + _fixed_bytes(trained, setting),
        optimizer=optimizer_temporary_bytes(
            owned, optimizer=setting.optimizer, device=setting.cluster.device.kind
        ),
        blocks=sending(blocks, stage, entered, pricer),
        leaving=sum(pricer.nbytes(v, states[v]) for v in sent - {value for value, _ in read}),
        sent={j: sum(pricer.nbytes(v, states[v]) for v in to) for j, to in targets.items()},
        received={j: sum(map(pricer.nbytes, values)) for (j, i), values in edges.items() if i == k},
        trained=trained,
        reduction=_reduction(setting),
    )


def undone_bytes(plan: Plan, priced: Sequence[PricedStage]) -> list[float]:
    """Bytes of a device of each device group that a step which is validated afterwards keeps to be
    undone."""
    found = dict.fromkeys(plan.devices, 0.0)
    held: set[tuple[tuple[int, ...], str]] = set()
    for own in priced:
        ranks, pricer = own.stage.ranks, own.pricer
        for value, state in (each for block in own.blocks for each in block.parameters):
            if (ranks, value) not in held and pricer.graph.values[value].requires_grad:
                found[ranks] += own.setting.validated * undo_bytes(
                    pricer.numel(value, state),
                    pricer.parameters.shard_count(value, state),
                    zero=own.setting.sharing.zero,
                    optimizer=own.setting.optimizer,
                )
            held.add((ranks, value))
    return list(found.values())


def bytes_beside_tensors(plan: Plan, coster: StageCoster) -> list[int]:
    """Of a device of each device group, the part of its peak that no tensor of a rehearsed step
    has: what the device reserves, buffers of communicators, and what steps that are validated
    afterwards keep from the one before."""
    found = []
    undone = [0.0] * len(plan.devices)
    if plan.post_validation:
        assignments = check_plan(plan, coster.graph, coster.problem.factors)
        priced = [priced_stage(plan, k, coster, own) for k, own in enumerate(assignments)]
        undone = undone_bytes(plan, priced)
    for ranks, kept in zip(plan.devices, undone, strict=True):
        stage = next(stage for stage in plan.stages if stage.ranks == ranks)
        setting = stage_setting(plan, plan.stages.index(stage), coster)
        more = communicator_bytes(setting) + math.ceil(kept)
        found.append(coster.cluster.device.reserved_bytes + more)
    return found


def _reads_late(of: PassPrice) -> bool:
    """Whether weights' gradients that are put off read what is gathered again."""
    return any(moment.regathered for moment in of.course)


def _gathering(block: BlockBytes, again: Recompute, *, alone: bool, late: bool) -> BlockBytes:
    """A block that gathers again. Where that is `alone` what it makes `again`, it lets go of the
    rest on the way, and makes it in the second half of its backward if it is read `late`."""
    block = replace(block, course=[(moment.with_parts(), own) for moment, own in block.course])
    if alone and late:
        whole = float(again.largest_bytes)
        return replace(block, passing=block.passing - whole, late=whole, releases=True)
    return replace(block, releases=block.releases or alone)


def _block(
    repeated: Recompute,
    own: Sums,
    entering: float,
    gathered: float,
    course: Sequence[tuple[Moment, tuple[int, ...]]],
) -> BlockBytes:
    """A block: what it keeps of what enters and what it makes, and in its backward besides."""
    again = float(repeated.largest_bytes)
    return BlockBytes(
        kept=float(own.saved_bytes - repeated.freed_bytes) + entering,
        passing=again + gathered,
        releases=not again,
        course=course,
    )


def _fixed_bytes(trained: Sequence[Trained], setting: Setting) -> float:
    """Bytes of weights, optimizer states, of the secondary shards that a backward begins with, and
    of what a step that is validated afterwards may have to undo."""
    secondary = secondary_bytes(setting) * sum(p.numel for p in trained if p.shards > 1)
    undone = setting.validated * sum(
        undo_bytes(p.numel, p.shards, zero=setting.sharing.zero, optimizer=setting.optimizer)
        for p in trained
    )
    weight_bytes = DTYPE_BYTES[setting.precision]
    away: dict[int, float] = defaultdict(float)  # elements by block
    for p in trained:
        away[p.block] += p.numel * p.away
    there = sorted(away)  # of these blocks one and the next have weights
    here = max((away[a] + away[b] for a, b in pairwise([*there, -1])), default=0.0)
    return (
        secondary
        + undone
        + weight_bytes * (here - sum(away.values()))
        + sum(
            fixed_bytes(
                p.numel,
                p.shards,
                precision=setting.precision,
                zero=setting.sharing.zero,
                optimizer=setting.optimizer,
                host=p.host,
            )
            for p in trained
        )
    )


def _parameters(
    readers: Mapping[tuple[str, Placement], tuple[int, int]],
    pricer: Pricer,
    stage: StagePlan,
    there: Collection[str],
) -> tuple[list[Trained], dict[tuple[int, int], int], float]:
    """The trained parameters in the order of the forward, those of host memory being `there`, the
    number of each by block and number there, and bytes of the others."""
    away = offloaded_weights(stage, pricer.graph)
    trained: list[Trained] = []
    numbers: dict[tuple[int, int], int] = {}
    frozen = 0.0
    for (value, state), at in sorted(readers.items(), key=lambda item: item[1]):
        if pricer.graph.values[value].requires_grad:
            shards, numbers[at] = pricer.parameters.shard_count(value, state), len(trained)
            numel, host = pricer.numel(value, state), value in there
            own = Trained(numel=numel, shards=shards, block=at[0], host=host, away=value in away)
            trained.append(own)
        else:
            frozen += pricer.nbytes(value, state)
    return trained, numbers, frozen


def _gathered(
    trained: Sequence[Trained], shared: Collection[int], blocks: int, setting: Setting
) -> list[float]:
    """Bytes of weights that `fully_shard` holds in each block's backward under ZeRO-3: its own, and
    those of the block before it as they come; of the last block, which has its own from the
    forward, what they came in; and all that time those that several blocks read (`shared`, by
    number)."""
    numels, always = [0.0] * blocks, 0.0
    for number, p in enumerate(trained):
        if setting.sharing.zero == 3 and p.shards > 1:
            if number in shared:
                always += p.numel
            else:
                numels[p.block] += p.numel
    before = [0.0, *numels[:-2], numels[-1]] if blocks > 1 else numels
    weight_bytes = DTYPE_BYTES[setting.precision]
    return [
        weight_bytes * (always + a + b) + buffer_bytes(max(a, b), setting.sharing.quantized)
        for a, b in zip(numels, before, strict=True)
    ]


def _reduction(setting: Setting) -> Reduction:
    target = setting.target
    return Reduction(
        zero=setting.sharing.zero,
        weight_bytes=DTYPE_BYTES[setting.precision],
        summed=setting.mesh.holders > 1,
        bucket_bytes=target.bucket_bytes,
        alone_bytes=target.alone_bytes,
        received=setting.cluster.device.kind == "cpu",
        replicated=setting.shards < setting.mesh.holders,
    )
