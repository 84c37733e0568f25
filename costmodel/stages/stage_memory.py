"""Bytes of a stage at each kind of moment that can be a peak, from the sums over its blocks.

Between passes a stage holds its states (`fixed_bytes`) and the gradients that earlier backwards of
the step left (`gradient_bytes`), and of each micro-batch in flight what its forward kept. A
backward holds more (`sums.py`), also gradients by their reduction:

    ZeRO-0, 1   the first backward makes them, later ones add to all; ZeRO-1's last one scatters
    ZeRO-2      every one scatters: no more than made to the peak, or in buckets, and the shards
    ZeRO-3      those of a block, and of the block behind it, which are being scattered; the shards

Of a target whose step is not followed, it is the most of each kind at once. Exact for the blocks of
a plan (`course.py`), an estimate of a few buckets here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from meshwright.costmodel import memory
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.stages import offload
from meshwright.costmodel.stages.sums import (
    FIRST,
    GROWN,
    INSIDE,
    LATER,
    SECOND,
    Floats,
    Recompute,
    Sums,
)
from meshwright.costmodel.target import SCATTERED_AT_ONCE, SENT_AT_ONCE

A = TypeVar("A", float, Floats)

RESERVED_COMMUNICATORS = 2  # whose buffers are in `Device.reserved_bytes`


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory(Generic[A]):
    """Bytes of a stage: of `fixed_bytes` the weights that are computed with are `weight_bytes`;
    beyond those and what micro-batches keep, in the first backward of a step (`first_bytes`, with
    its gradients) and in a later one (`later_bytes`, beside `gradient_bytes`), in the first half of
    one that is split (`half_bytes`, with what it puts off, beside those or the `begun_bytes` that
    the step's first one left), in the second (`second_bytes`, with all gradients), and how much
    more in the last of several, which may reduce (`last_bytes`), and in its second half
    (`end_bytes`), where that is known; in the optimizer's step (`step_bytes`, with gradients); the
    `put_off_bytes` of a micro-batch between both halves. Where gradients come late, and the place
    is not known yet: of one further version of the weights (`version_bytes`), of what is stepped
    where there are several (`copied_bytes`), of one step's gradients that wait (`waiting_bytes`).
    """

    weight_bytes: A
    fixed_bytes: A
    gradient_bytes: A
    first_bytes: A
    later_bytes: A
    begun_bytes: A
    half_bytes: A
    second_bytes: A
    last_bytes: A
    end_bytes: A
    step_bytes: A
    put_off_bytes: A
    version_bytes: A
    copied_bytes: A
    waiting_bytes: A


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """Bytes of gradients `between` backwards, in the peaks of the first and of a later one with the
    activations (`first`, `later`), those that the optimizer reads, and those on their way as the
    next backward, or its first half, begins (`ahead`)."""

    between: Floats
    first: Floats
    later: Floats
    read: Floats
    ahead: Floats | float = 0.0


def communicator_bytes(setting: Setting) -> int:
    """Bytes of a rank's communicators beyond those in the device's `reserved_bytes`."""
    more = max(0, setting.communicators - RESERVED_COMMUNICATORS)
    return more * setting.cluster.device.communicator_bytes


def stage_memory(
    sums: Sums, setting: Setting, repeated: Recompute, activations: Floats, sent: offload.Sent
) -> StageMemory[Floats]:
    """Memory of stages that keep `activations` on the device, and have `sent` others."""
    # ranks that a parameter is divided among, on average: experts among fewer than the rest
    shards = np.maximum(sums.parameters / np.maximum(sums.shard_parameters, 1e-9), 1.0)
    sharing = setting.sharing
    states = memory.model_states(
        sums.parameters,
        weight_bytes=setting.weight_bytes,
        sharing=sharing,
        dp=shards,
        optimizer=setting.optimizer,
        target=setting.target,
        away=(setting.host.states, offload.sent_gradients(setting)),
        moments=(sums.moments, sums.shard_moments),
    )
    stepped = sums.parameters / sharing.parts(shards)
    undone = setting.validated * stepped * setting.optimizer.state_bytes
    version = setting.late * setting.weight_bytes * sums.parameters
    is_stepped = not sharing.divides and setting.weight_bytes == setting.kept_bytes
    frozen = sums.frozen_shard_bytes if sharing.gathers else sums.frozen_bytes
    weights = states.weights + frozen - offload.frozen_there(sums, setting)
    weights = weights - offload.weights_there(sums, setting) + offload.blocks_here(sums, setting)
    weights = weights + sums.moved_weights(sharing)[0] * setting.secondary_bytes
    followed = setting.target.gradients_come
    gradients = (_followed if followed else _added_up)(sums, setting, repeated, states)
    undivided = _undivided(sums, setting) if followed else 0.0
    # as it comes back, what the micro-batch kept on the device of later blocks is let go
    back = np.maximum(sent.passing_bytes - activations, 0.0)
    half, put_off = repeated.excess[FIRST] + gradients.ahead, repeated.put_off_bytes
    second = sums.gradients + repeated.excess[SECOND]
    if not followed:
        half, put_off, second = gradients.later, activations, gradients.first
    return StageMemory(
        weight_bytes=weights,
        fixed_bytes=weights + states.optimizer + undone + undivided,
        gradient_bytes=gradients.between,
        first_bytes=gradients.first + back,
        later_bytes=gradients.later + back,
        begun_bytes=gradients.between * (not followed),
        half_bytes=half + back,
        second_bytes=second,
        last_bytes=np.zeros_like(second),
        end_bytes=np.zeros_like(second),
        step_bytes=gradients.read + _temporary_bytes(sums, setting) * (not setting.in_backward),
        put_off_bytes=put_off,
        version_bytes=version,
        copied_bytes=version * is_stepped,
        waiting_bytes=setting.late * setting.kept_bytes * stepped,
    )


def _undivided(sums: Sums, setting: Setting) -> Floats:
    """Bytes of the computing weights of experts that ZeRO-3 divides among nobody."""
    holders, nbytes = setting.shards, setting.weight_bytes
    if (
        not setting.sharing.gathers
        or setting.mesh.ep < setting.mesh.holders
        or nbytes == setting.kept_bytes
    ):
        return np.zeros_like(sums.parameters)
    undivided = (sums.shard_parameters - sums.parameters / holders) / max(1 - 1 / holders, 1e-9)
    weights: Floats = nbytes * np.maximum(undivided, 0.0)
    return weights


def _temporary_bytes(sums: Sums, setting: Setting) -> Floats:
    """Bytes that the optimizer makes beside its states on a GPU, where a step is followed."""
    if setting.cluster.device.kind != "cuda" or not setting.target.gradients_come:
        return np.zeros_like(sums.parameters)
    owned = sums.shard_parameters if setting.sharing.divides else sums.parameters
    optimizer = setting.optimizer.temporary
    temporary: Floats = optimizer * (1 - setting.host.states) * owned
    return temporary


def _added_up(
    sums: Sums, setting: Setting, repeated: Recompute, states: memory.ModelStates[Floats]
) -> _Gradients:
    """Gradients and buffers all the time, where no step is followed."""
    _, gathered = sums.moved_weights(setting.sharing)
    buffers = setting.sharing.buffer_bytes(gathered) + memory.working_bytes(
        sums.parameters,
        sums.largest_parameters,
        gathered,
        weight_bytes=setting.weight_bytes,
        gradient_bytes=setting.gradient_bytes,
        sharing=setting.sharing,
        dp=setting.mesh.holders,
        target=setting.target,
    )
    between, later = states.gradients + buffers, repeated.excess[LATER]
    return _Gradients(between=between, first=between + later, later=later, read=states.gradients)


def _followed(
    sums: Sums, setting: Setting, repeated: Recompute, states: memory.ModelStates[Floats]
) -> _Gradients:
    """Gradients as `train_step` makes and reduces them."""
    sharing, several = setting.sharing, setting.batch.microbatches > 1
    later, grown = repeated.excess[LATER], repeated.excess[GROWN]
    full, shard = sums.gradients, setting.kept_bytes * sums.shard_parameters
    here = 1.0 - setting.host.states
    read = here * shard
    summed = setting.mesh.holders > 1
    bucket = np.minimum(setting.target.bucket_bytes, full) * summed
    largest = setting.kept_bytes * sums.largest_numel
    sending = np.minimum(SENT_AT_ONCE * largest, full) * offload.sent_gradients(setting)
    if not sharing.divides or not summed:
        first = np.minimum(states.gradients + later, grown + bucket)
        if setting.in_backward:  # the least: one at a time, and what the optimizer makes for it
            stepped = largest * (1 + setting.optimizer.temporary / setting.kept_bytes)
            return _Gradients(between=np.zeros_like(full), first=later, later=later, read=stepped)
        first, later = first + sending, later + sending
        return _Gradients(between=states.gradients, first=first, later=later, read=here * full)
    if sharing.gathers:
        inside = repeated.excess[INSIDE] + sharing.buffer_bytes(sums.largest_gathered)
        between = here * shard
        summed_up = np.maximum(grown - later, 0.0) * (shard / np.maximum(full, 1.0))
        first = inside + np.minimum(summed_up, between)
        return _Gradients(between=between, first=first, later=inside, read=between)
    received = setting.cluster.device.kind == "cpu"
    at_peak = np.maximum(grown - later, 0.0) + bucket
    under_way = np.minimum(SCATTERED_AT_ONCE * np.maximum(largest, bucket), full)
    twice = received * np.minimum(at_peak, under_way)
    part = shard / np.maximum(full, 1.0)
    scattering = np.minimum(grown + bucket + twice, later + (1 + received) * under_way)
    if not sharing.divides_gradients and several:
        first = np.minimum(full + later, grown + bucket)
        last = later + under_way * (part + received)  # all whole still, as it begins to scatter
        return _Gradients(between=full, first=first, later=last, read=read)
    scattering = np.minimum(scattering, full + later + twice)
    stays = 1.0 - offload.sent_gradients(setting)
    first, between = scattering + stays * np.minimum(at_peak * part, shard), stays * shard
    # a later one begins while the first block's buckets of the one before are on their way
    ahead = sums.first_gradients
    ahead = np.where(ahead <= largest + bucket, ahead, SCATTERED_AT_ONCE * bucket)
    begun = later + (1 + received) * (ahead + np.minimum(at_peak, np.maximum(largest, bucket)))
    begun = np.maximum(scattering, begun)
    left_ahead = ahead * (1 + received + part)
    return _Gradients(between=between, first=first, later=begun, read=read, ahead=left_ahead)
