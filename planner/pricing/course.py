"""Memory of a plan's stages in the course of a step, from the prices of its blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

from meshwright.costmodel import memory, operators
from meshwright.costmodel.operators import Setting
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
from meshwright.planner.pricing.segment_costs import in_segments
from meshwright.planner.pricing.stage_costs import StageBlocks, StageCoster

Edges = Mapping[tuple[int, int], Sequence[str]]  # (source stage, target stage) -> values sent
Held = Collection[tuple[tuple[int, ...], str]]  # ranks and parameters of earlier stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A frozen parameter: local elements, the ranks among which ZeRO-3 divides it (1 for none), its
    block as in `Trained`, and bytes on the device."""

    numel: float
    shards: int
    block: int
    nbytes: float


def walked_stages(plan: Plan, coster: StageCoster, stages: Sequence[StageBlocks]) -> list[Walked]:
    """The memory of each stage, from its blocks."""
    edges = crossings(plan, coster.graph)
    ranks = [stage.ranks for stage in plan.stages]  # stages of the same hand over what they hold
    sent = {(a, b): values for (a, b), values in edges.items() if ranks[a] != ranks[b]}
    held: set[tuple[tuple[int, ...], str]] = set()
    passes, split = plan.passes, plan.record.splits_backward
    walks = []
    for k, priced in enumerate(stages):
        late = plan.pipeline.versions(k), plan.pipeline.waiting_gradients(k)
        key = (*_key(k, priced, sent, held), passes, split, late)
        if key not in coster.walks:
            stage = _stage_bytes(k, priced, sent, held, split=split, kept_back=late)
            coster.walks[key] = walked(stage, passes, split=split)
        walks.append(coster.walks[key])
        values = (value for entered in priced.blocks for value in entered.block.parameters)
        held |= {(priced.stage.ranks, value) for value in values}
    return walks


def _key(k: int, priced: StageBlocks, edges: Edges, held: Held) -> tuple[Any, ...]:
    """All that `_stage_bytes` depends on, values by the order in which the stage's blocks name
    them."""
    stage, graph, numbers = priced.stage, priced.pricer.graph, dict[str, int]()
    away = off_device(stage, graph).weights if stage.host else ()

    def number(value: str) -> int:
        return numbers.setdefault(value, len(numbers))

    blocks = tuple(
        (
            entered.block.class_id,
            entered.assignment.choices,
            tuple((number(value), state) for value, state in entered.inputs.items()),
            tuple(
                (number(value), state, value in away, (stage.ranks, value) in held)
                for value, state in entered.parameters
            ),
            tuple(map(number, entered.block.outputs)),
        )
        for entered in priced.blocks
    )
    sent = tuple(tuple(map(number, values)) for (i, _), values in edges.items() if i == k)
    return priced.setting.parts, stage.policies, tuple(priced.spans), blocks, sent


def placed(peak: Peak, walk: Walked) -> Peak:
    """A peak with the block of its stage in which it comes, and the gradients at that time."""
    if peak.action is None:
        return peak
    block, gradients = walk.at(peak.action, first=peak.first, last=peak.last)
    if peak.action is Action.BACKWARD_WEIGHT:
        gradients -= walk.memory["begun_bytes" if peak.first else "gradient_bytes"]
    parts = {**peak.parts, "gradients": peak.parts["gradients"] + gradients}
    return replace(peak, block=block, parts=parts)


def _stage_bytes(
    k: int,
    priced: StageBlocks,
    edges: Edges,
    held: Held,
    *,
    split: bool,
    kept_back: tuple[int, int],
) -> StageBytes:
    """Bytes of stage k, block by block; a backward may be `split` in two. `kept_back` are the
    versions of weights that forwards under way have read, and the steps whose gradients wait."""
    stage, setting, pricer = priced.stage, priced.setting, priced.pricer
    outputs = dict[str, Placement]()
    for entered in priced.blocks:
        outputs |= {value: entered.assignment.states[value] for value in entered.block.outputs}
    trained, numbers, frozen = _parameters(priced, held)
    gathered = _gathered([*trained, *frozen], len(priced.blocks), setting)
    entering = entering_bytes(priced)
    blocks = []
    for at, (entered, policy) in enumerate(zip(priced.blocks, stage.policies, strict=True)):
        again, (_, gathers), passes = entered.repeats(policy), parts_of(policy), entered.passes
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
    blocks = in_segments(priced, blocks, entering)
    weights, states = _fixed_bytes(trained, frozen, setting, *kept_back)
    sent = [value for (source, _), values in edges.items() if source == k for value in values]
    target = setting.target
    temporary = partial(setting.optimizer.temporary_bytes, device=setting.cluster.device.kind)
    return StageBytes(
        fixed=weights + states,
        weights=weights,
        optimizer=0.0 if setting.in_backward else _step_bytes(trained, stage, setting),
        blocks=sending(priced, blocks),
        seeds=sum(pricer.nbytes(value, outputs[value]) for value in sent),
        trained=trained,
        reduction=memory.Reduction(
            sharing=setting.sharing,
            weight_bytes=setting.weight_bytes,
            kept_bytes=setting.kept_bytes,
            bucket_bytes=target.bucket_bytes,
            alone_bytes=target.alone_bytes,
            received=setting.cluster.device.kind == "cpu",
            replicated=setting.shards < setting.mesh.holders,
            stepping=(lambda numel: temporary([numel])) if setting.in_backward else None,
        ),
    )


def _late_bytes(
    trained: Sequence[memory.Trained], setting: Setting, versions: int, waiting: int
) -> float:
    """Bytes of further versions of a stage's weights, and of gradients that wait."""
    parts = [setting.sharing.parts(p.shards) for p in trained]
    return math.fsum(
        memory.late_bytes(
            p.numel,
            p.numel / n,
            weight_bytes=setting.weight_bytes,
            kept=setting.kept_bytes,
            whole=n == 1,
            versions=versions,
            waiting=waiting,
        )
        for p, n in zip(trained, parts, strict=True)
    )


def _step_bytes(trained: Sequence[memory.Trained], stage: StagePlan, setting: Setting) -> float:
    """Bytes that the optimizer makes in a step: of what a rank steps in place; of whole matrices,
    each at its owner with its gradient, and one that is gathered, with what is made for it."""
    kind, optimizer = setting.cluster.device.kind, setting.optimizer
    own = [p.numel / stage.parts(p.shards) for p in trained if not (p.host or p.owned)]
    if optimizer.matrices is None:
        return optimizer.temporary_bytes(own, kind)
    owned, both = [p.owned for p in trained if p.owned], 2 * setting.kept_bytes
    largest = max(owned, default=0.0)
    held = both * operators.fullest(owned, operators.owners_of(owned, setting.mesh.devices))
    made = max(optimizer.matrices.made * largest, optimizer.temporary_bytes(own, kind))
    return held + max(both * largest, made)


def bytes_beside_tensors(plan: Plan, priced: Sequence[StageBlocks]) -> list[int]:
    """The part of a device's peak, for each device group, that no tensor of a rehearsed step has:
    reserved bytes, buffers of communicators, and what steps that are validated afterwards keep from
    the one before, to be undone."""
    undo, settings = dict.fromkeys(plan.devices, 0.0), dict[tuple[int, ...], Setting]()
    held: set[tuple[tuple[int, ...], str]] = set()
    for walk in priced:
        ranks, pricer = walk.stage.ranks, walk.pricer
        settings.setdefault(ranks, walk.setting)
        for value, state in chain(*(block.parameters for block in walk.blocks)):
            if (ranks, value) not in held and pricer.graph.values[value].requires_grad:
                parts = walk.stage.parts(pricer.parameters.shard_count(value, state))
                undone = walk.setting.validated * walk.setting.optimizer.state_bytes
                undo[ranks] += undone * pricer.numel(value, state) / parts
            held.add((ranks, value))
    return [
        settings[ranks].cluster.device.reserved_bytes
        + communicator_bytes(settings[ranks])
        + math.ceil(nbytes)
        for ranks, nbytes in undo.items()
    ]


def _fixed_bytes(
    trained: Sequence[memory.Trained],
    frozen: Sequence[Frozen],
    setting: Setting,
    versions: int,
    waiting: int,
) -> tuple[float, float]:
    """Bytes of weights, with the secondary shards that a backward begins with; and of optimizer
    states, with what a step that is validated afterwards may have to undo. There are so many
    `versions` of the weights, and gradients of so many steps `waiting` beside those that are made.
    """
    away: dict[int, float] = defaultdict(float)  # elements by block
    for p in trained:
        away[p.block] += p.numel * p.away
    # of these blocks one and the next have weights on the device
    here = max((away[a] + away[b] for a, b in pairwise([*sorted(away), -1])), default=0.0)
    weights = setting.weight_bytes * (here - sum(away.values()))
    again = sum(p.numel for group in (trained, frozen) for p in group if p.shards > 1)
    weights += setting.secondary_bytes * again + sum(p.nbytes for p in frozen)
    sharing, optimizer = setting.sharing, setting.optimizer
    undone = setting.validated * optimizer.state_bytes
    states = undone * sum(p.numel / sharing.parts(p.shards) for p in trained)
    weights += _late_bytes(trained, setting, versions, 0)
    states += _late_bytes(trained, setting, 1, waiting)
    for p in trained:
        weight_bytes, state_bytes = memory.fixed_bytes(
            p.numel,
            p.shards,
            weight_bytes=setting.weight_bytes,
            sharing=sharing,
            kept=setting.kept_bytes,
            moments=p.moments,
            host=p.host,
        )
        weights, states = weights + weight_bytes, states + state_bytes
    if owned := [p for p in trained if p.owned]:  # the fullest owner has more than the mean
        whole = [p.moments[0] * setting.mesh.devices for p in owned]
        owners = operators.owners_of([p.owned for p in owned], setting.mesh.devices)
        states += operators.fullest(whole, owners) - sum(p.moments[0] for p in owned)
    return weights, states


def _parameters(
    priced: StageBlocks, held: Held
) -> tuple[list[memory.Trained], dict[tuple[int, int], int], list[Frozen]]:
    """The trained parameters that are not `held` already, in the order of the forward, the number
    of each by block and number there, and the frozen ones."""
    stage, pricer = priced.stage, priced.pricer
    off = off_device(stage, pricer.graph)
    readers = defaultdict[tuple[str, Placement], list[tuple[int, int]]](list)
    for at, entered in enumerate(priced.blocks):
        for number, parameter in enumerate(entered.parameters):
            if (stage.ranks, parameter[0]) not in held:
                readers[parameter].append((at, number))
    reached = {
        (at, number)
        for at, entered in enumerate(priced.blocks)
        for moment in entered.passes.course
        for number in moment.parameters
    }
    trained, frozen = [], []
    for (value, state), places in readers.items():
        numel, shards = pricer.numel(value, state), pricer.parameters.shard_count(value, state)
        block = -1 if stage.gathers and len(places) > 1 else places[0][0]
        if not pricer.graph.values[value].requires_grad:
            shards = shards if stage.gathers else 1
            nbytes = pricer.parameters.frozen_bytes(value, state)[shards > 1]
            nbytes *= value not in off.states
            frozen.append(Frozen(numel=numel, shards=shards, block=block, nbytes=nbytes))
            continue
        p = memory.Trained(
            numel=numel,
            holders=pricer.parameters.holders(value, state),
            shards=shards,
            block=block,
            readers=len(reached.intersection(places)),
            host=value in off.states,
            away=value in off.weights,
            moments=pricer.parameters.moment_bytes(value, state),
            compressing=pricer.parameters.compressing_bytes(value, state),
            owned=pricer.parameters.owned_numel(value, state, divided=stage.parts(shards) > 1),
        )
        trained.append((p, places))
    trained.sort(key=lambda pair: (pair[0].block, pair[1]))
    numbers = {place: number for number, (_, places) in enumerate(trained) for place in places}
    return [p for p, _ in trained], numbers, frozen


def _gathered(
    parameters: Sequence[memory.Trained | Frozen], blocks: int, setting: Setting
) -> list[tuple[tuple[float, float], float]]:
    """Bytes of weights that `fully_shard` holds under ZeRO-3 in each block's forward: its own, also
    as they were gathered, and as it begins those of the block before as they were; and in its
    backward: its own, and those of the block before it as they come, without the secondary shards
    of what is whole again. All that time those that several blocks read."""
    numels = [0.0] * (blocks + 1)  # the last of those that several blocks read, whose block is -1
    for p in parameters:
        if setting.sharing.gathers and p.shards > 1:
            numels[p.block] += p.numel
    always = numels.pop()
    before = [0.0, *numels[:-1]]
    behind = [*accumulate(reversed(numels), initial=always)][:0:-1]
    weight_bytes, secondary = setting.weight_bytes, setting.secondary_bytes
    return [
        (
            (weight_bytes * (always + 2 * a) + setting.sharing.buffer_bytes(a), weight_bytes * b),
            weight_bytes * (always + a + b)
            - secondary * again
            + setting.sharing.buffer_bytes(max(a, b)),
        )
        for a, b, again in zip(numels, before, behind, strict=True)
    ]
