"""What the stages of a plan hold in the course of a step, from the prices of its blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from meshwright.costmodel import memory
from meshwright.costmodel.operators import DTYPE_BYTES, Pricer, Setting
from meshwright.costmodel.recompute import REGATHER, parts_of
from meshwright.costmodel.schedules import Action
from meshwright.costmodel.sharding import Placement
from meshwright.costmodel.stages import (
    BlockBytes,
    Peak,
    StageBytes,
    Walked,
    communicator_bytes,
    walked,
)
from meshwright.planner.plan import Plan, StagePlan, crossings, off_device
from meshwright.planner.pricing.away import entering_bytes, sending
from meshwright.planner.pricing.segments import in_segments, spans_of
from meshwright.planner.pricing.stage_costs import Entered, StageBlocks, StageCoster


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A frozen parameter: local elements, those among which ZeRO-3 divides it (1 where it is
    whole), its block as in `Trained`, and bytes on the device."""

    numel: float
    shards: int
    block: int
    nbytes: float


def walked_stages(plan: Plan, coster: StageCoster, stages: Sequence[StageBlocks]) -> list[Walked]:
    """The memory of each stage, from its blocks."""
    edges = crossings(plan, coster.graph)
    ranks = [stage.ranks for stage in plan.stages]  # stages of the same hand over what they hold
    sent = {edge: values for edge, values in edges.items() if ranks[edge[0]] != ranks[edge[1]]}
    held: set[tuple[tuple[int, ...], str]] = set()
    each, split = plan.passes, plan.record.splits_backward
    found = []
    for k, own in enumerate(stages):
        alike = (*_alike(plan, k, own, sent, held), each, split)
        if alike not in coster.walks:
            coster.walks[alike] = walked(_stage(plan, k, own, sent, held), each, split=split)
        held |= {
            (own.stage.ranks, value) for block in own.blocks for value in block.block.parameters
        }
        found.append(coster.walks[alike])
    return found


def _alike(
    plan: Plan,
    k: int,
    own: StageBlocks,
    edges: Mapping[tuple[int, int], Sequence[str]],
    held: Collection[tuple[tuple[int, ...], str]],
) -> tuple[Any, ...]:
    """What `_stage` depends on, values by the order in which the stage's blocks name them."""
    stage, graph, numbers = own.stage, own.pricer.graph, dict[str, int]()
    away = off_device(stage, graph).weights if stage.host else ()

    def number(value: str) -> int:
        return numbers.setdefault(value, len(numbers))

    blocks = tuple(
        (
            each.block.class_id,
            each.assignment.choices,
            tuple((number(value), state) for value, state in each.inputs.items()),
            tuple(
                (number(value), state, value in away, (stage.ranks, value) in held)
                for value, state in each.parameters
            ),
            tuple(map(number, each.block.outputs)),
        )
        for each in own.blocks
    )
    sent = tuple(tuple(map(number, values)) for (i, _), values in edges.items() if i == k)
    return own.setting.parts, stage.policies, tuple(spans_of(own)), blocks, sent


def placed(peak: Peak, walk: Walked) -> Peak:
    """A peak with the block of its stage in which it comes, and the gradients that there are."""
    if peak.action is None:
        return peak
    block, gradients = walk.at(peak.action, first=peak.first, last=peak.last)
    if peak.action is Action.BACKWARD_WEIGHT:
        gradients -= walk.memory["begun_bytes" if peak.first else "gradient_bytes"]
    parts = {**peak.parts, "gradients": peak.parts["gradients"] + gradients}
    return replace(peak, block=block, parts=parts)


def _stage(
    plan: Plan,
    k: int,
    own: StageBlocks,
    edges: Mapping[tuple[int, int], Sequence[str]],
    held: Collection[tuple[tuple[int, ...], str]],
) -> StageBytes:
    """What stage k holds, block by block; `edges` are what stages send to each other, `held` the
    ranks and parameters of earlier stages."""
    stage, setting, pricer = own.stage, own.setting, own.pricer
    entered, made = own.blocks, dict[str, Placement]()
    for each in entered:
        made |= {value: each.assignment.states[value] for value in each.block.outputs}
    targets = {j: values for (i, j), values in edges.items() if i == k}
    trained, numbers, others = _parameters(entered, held, pricer, stage)
    owned = [p.numel / stage.parts(p.shards) for p in trained if not p.host]
    gathered = _gathered([*trained, *others], len(entered), setting)
    entering = entering_bytes(own)
    blocks, split = [], plan.record.splits_backward
    for at, (each, policy) in enumerate(zip(entered, stage.policies, strict=True)):
        again, (_, gathers), passes = each.repeats(policy), parts_of(policy), each.passes
        # what is gathered alone is made again by the second half of a backward that reads it
        alone = policy == REGATHER
        late = alone and split and any(moment.regathered for moment in passes.course)
        blocks.append(
            BlockBytes(
                kept=passes.saved_bytes - again + entering[at],
                gathered=gathered[at][0],
                passing=gathered[at][1] + again * (not late),
                late=again * late,
                releases=alone or not again,
                course=[
                    (moment, tuple(numbers[at, k] for k in moment.parameters if (at, k) in numbers))
                    for moment in (passes.parts if gathers else passes.course)
                ],
            )
        )
    blocks = in_segments(own, blocks, entering)
    weights, states = _fixed_bytes(trained, others, setting)
    return StageBytes(
        fixed=weights + states,
        weights=weights,
        optimizer=memory.optimizer_temporary_bytes(
            owned, optimizer=setting.optimizer, device=setting.cluster.device.kind
        ),
        blocks=sending(own, blocks),
        seeds=sum(pricer.nbytes(v, made[v]) for to in targets.values() for v in to),
        trained=trained,
        reduction=_reduction(setting),
    )


def bytes_beside_tensors(plan: Plan, priced: Sequence[StageBlocks]) -> list[int]:
    """Of a device of each device group, the part of its peak that no tensor of a rehearsed step
    has: what the device reserves, buffers of communicators, and what steps that are validated
    afterwards keep from the one before, to be undone."""
    kept, settings = dict.fromkeys(plan.devices, 0.0), dict[tuple[int, ...], Setting]()
    held: set[tuple[tuple[int, ...], str]] = set()
    for own in priced:
        ranks, pricer = own.stage.ranks, own.pricer
        settings.setdefault(ranks, own.setting)
        for value, state in (each for block in own.blocks for each in block.parameters):
            if (ranks, value) not in held and pricer.graph.values[value].requires_grad:
                parts = own.stage.parts(pricer.parameters.shard_count(value, state))
                kept[ranks] += own.setting.validated * memory.undo_bytes(
                    pricer.numel(value, state) / parts, own.setting.optimizer
                )
            held.add((ranks, value))
    return [
        settings[ranks].cluster.device.reserved_bytes
        + communicator_bytes(settings[ranks])
        + math.ceil(nbytes)
        for ranks, nbytes in kept.items()
    ]


def _fixed_bytes(
    trained: Sequence[memory.Trained], others: Sequence[Frozen], setting: Setting
) -> tuple[float, float]:
    """Bytes of weights, with the secondary shards that a backward begins with; and of optimizer
    states, with what a step that is validated afterwards may have to undo."""
    away: dict[int, float] = defaultdict(float)  # elements by block
    for p in trained:
        away[p.block] += p.numel * p.away
    there = sorted(away)  # of these blocks one and the next have weights
    here = max((away[a] + away[b] for a, b in pairwise([*there, -1])), default=0.0)
    weights = DTYPE_BYTES[setting.precision] * (here - sum(away.values()))
    again = sum(p.numel for group in (trained, others) for p in group if p.shards > 1)
    weights += setting.secondary_bytes * again + sum(p.nbytes for p in others)
    sharing, optimizer = setting.sharing, setting.optimizer
    states = setting.validated * sum(
        memory.undo_bytes(p.numel / sharing.parts(p.shards), optimizer) for p in trained
    )
    for p in trained:
        own, kept = memory.fixed_bytes(
            p.numel,
            p.shards,
            precision=setting.precision,
            sharing=sharing,
            optimizer=optimizer,
            host=p.host,
        )
        weights, states = weights + own, states + kept
    return weights, states


def _parameters(
    entered: Sequence[Entered],
    held: Collection[tuple[tuple[int, ...], str]],
    pricer: Pricer,
    stage: StagePlan,
) -> tuple[list[memory.Trained], dict[tuple[int, int], int], list[Frozen]]:
    """The trained parameters that are not `held` already, in the order of the forward, the number
    of each by block and number there, and the frozen ones."""
    off = off_device(stage, pricer.graph)
    readers = defaultdict[tuple[str, Placement], list[tuple[int, int]]](list)
    for at, each in enumerate(entered):
        for number, parameter in enumerate(each.parameters):
            if (stage.ranks, parameter[0]) not in held:
                readers[parameter].append((at, number))
    reached = {
        (at, number)
        for at, each in enumerate(entered)
        for moment in each.passes.course
        for number in moment.parameters
    }
    found, frozen = [], []
    for (value, state), own in readers.items():
        numel, shards = pricer.numel(value, state), pricer.parameters.shard_count(value, state)
        block = -1 if stage.gathers and len(own) > 1 else own[0][0]
        if not pricer.graph.values[value].requires_grad:
            divided = stage.gathers and shards > 1
            nbytes = pricer.parameters.frozen_bytes(value, state)[divided]
            here = nbytes * (value not in off.states)
            shards = shards if divided else 1
            frozen.append(Frozen(numel=numel, shards=shards, block=block, nbytes=here))
            continue
        p = memory.Trained(
            numel=numel,
            holders=pricer.parameters.holders(value, state),
            shards=shards,
            block=block,
            readers=len(reached.intersection(own)),
            host=value in off.states,
            away=value in off.weights,
        )
        found.append((p, own))
    found.sort(key=lambda each: (each[0].block, each[1]))
    numbers = {at: number for number, (_, own) in enumerate(found) for at in own}
    return [p for p, _ in found], numbers, frozen


def _gathered(
    parameters: Sequence[memory.Trained | Frozen], blocks: int, setting: Setting
) -> list[tuple[tuple[float, float], float]]:
    """Bytes of weights that `fully_shard` holds under ZeRO-3 in each block's forward: its own, also
    as they were gathered, and as it begins those of the block before as they were; and in its
    backward: its own, and those of the block before it as they come, without the secondary shards
    of what is whole again. All that time those that several blocks read."""
    numels, always = [0.0] * blocks, 0.0
    for p in parameters:
        if setting.sharing.gathers and p.shards > 1:
            if p.block < 0:
                always += p.numel
            else:
                numels[p.block] += p.numel
    before = [0.0, *numels[:-1]]
    behind = [*accumulate(reversed(numels), initial=always)][:0:-1]
    weight_bytes, secondary = DTYPE_BYTES[setting.precision], setting.secondary_bytes
    return [
        (
            (weight_bytes * (always + 2 * a) + setting.sharing.buffer_bytes(a), weight_bytes * b),
            weight_bytes * (always + a + b)
            - secondary * again
            + setting.sharing.buffer_bytes(max(a, b)),
        )
        for a, b, again in zip(numels, before, behind, strict=True)
    ]


def _reduction(setting: Setting) -> memory.Reduction:
    target = setting.target
    return memory.Reduction(
        sharing=setting.sharing,
        weight_bytes=DTYPE_BYTES[setting.precision],
        bucket_bytes=target.bucket_bytes,
        alone_bytes=target.alone_bytes,
        received=setting.cluster.device.kind == "cpu",
        replicated=setting.shards < setting.mesh.holders,
    )
