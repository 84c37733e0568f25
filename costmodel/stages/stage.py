"""Costs of a stage on one rank, from the sums over its blocks (`sums.py`).

A pass in which the device works for d seconds and the host needs h to issue it takes

    issued(h, d) = (h⁴ + d⁴)^(1/4)

as parts of it wait for the one and parts for the other: the longer of both where they differ, 19 %
more where they are equal (fitted to vTrain's single-node rows). Where the device is the host (a
CPU), it does one after the other. Both last as long as on the slowest node of the cluster
(`costmodel/errors.py`). Communication that runs beside compute c seconds long costs

    beside(compute, c) = max(compute + slowdown · min(compute, c), c)

in all: it takes part of the compute units and of the memory bandwidth while it lasts. Hidden so, as
far as the target does it (`costmodel/target.py`): ZeRO-3's gathers behind both passes (the
backward's from a secondary shard in the node, where one is kept), gradient
reduction behind the backward (the last one of a step, where gradients are reduced once), and
ZeRO-1's and 2's gathering of updated weights behind the first forward. The last unit of a backward
and the first one of a forward have nothing to hide behind. Where ZeRO replicates its shards, the
reduction among replicas joins what is scattered in a step's last backward, or follows it. On a CPU
nothing is hidden: all its cores compute, and they are what moves the bytes. What lies in host
memory is on its way like what ZeRO gathers and scatters (`offload.py`); of activations that lie
there see `away.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from meshwright.costmodel.errors import slowest_of
from meshwright.costmodel.memory import (
    model_states,
    optimizer_named,
    optimizer_step_bytes,
    undo_bytes,
    working_bytes,
)
from meshwright.costmodel.operators import DTYPE_BYTES, Setting
from meshwright.costmodel.quantized import buffer_bytes
from meshwright.costmodel.stages.away import Sent, sent_evenly
from meshwright.costmodel.stages.offload import (
    HostCosts,
    blocks_here,
    host_costs,
    sends_each,
    sent_gradients,
    weights_there,
)
from meshwright.costmodel.stages.sums import Floats, Recompute, Sums
from meshwright.costmodel.target import Target

A = TypeVar("A", float, Floats)

RESERVED_COMMUNICATORS = 2  # whose buffers are in `Device.reserved_bytes`


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts(Generic[A]):
    """Costs of a stage on one rank: floats, or of several stages arrays of one shape.

    Seconds per micro-batch (`*_s`; `weight_s` is part of `backward_s`), once per step (`reduce_s`,
    the part that is not hidden; `optimizer_s`); bytes in all (`static_bytes`, of which
    `passing_bytes` only during a backward, or for all stages of a device together) and per
    micro-batch in flight (`activation_bytes`), and of the host's memory (`host_bytes`, and
    `away_bytes` per micro-batch in flight) and of files on its flash (`flash_bytes`).
    """

    forward_s: A
    backward_s: A
    weight_s: A
    forward_comm_s: A
    backward_comm_s: A
    measured_s: A
    interpolated_s: A
    reduce_s: A
    optimizer_s: A
    static_bytes: A
    passing_bytes: A
    activation_bytes: A
    parameters: A
    host_bytes: A
    away_bytes: A
    flash_bytes: A

    @property
    def kept_bytes(self) -> A:
        """Bytes that the stage holds while another one of its device is in a backward, activations
        apart."""
        return self.static_bytes - self.passing_bytes

    def amortised_s(self, num_microbatches: int) -> A:
        """Seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


def combined(
    costs: Sequence[StageCosts[Floats]], combine: Callable[[Sequence[Floats]], A]
) -> StageCosts[A]:
    """Every cost of one `StageCosts` made of those of several."""
    names = [each.name for each in fields(StageCosts)]
    return StageCosts(**{name: combine([getattr(own, name) for own in costs]) for name in names})


def of_one(costs: StageCosts[Floats], stage: int | tuple[()] = ()) -> StageCosts[float]:
    """Costs of one of several stages as floats; by default of the only one, 0-d."""
    return combined([costs], lambda values: float(values[0][stage]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Seconds of both passes with the data axis' communication, that part by itself, and what is
    not hidden of the reductions and gathers that come once per step."""

    forward_s: Floats
    backward_s: Floats
    forward_comm_s: Floats
    backward_comm_s: Floats
    reduce_s: Floats


def _issued(device: Floats, host: Floats) -> Floats:
    """Seconds of a pass that the device and the host share; sharpness 4."""
    seconds: Floats = np.sqrt(np.sqrt(np.square(np.square(device)) + np.square(np.square(host))))
    return seconds


def _hidden(whole: Floats, exchange: Floats, target: Target) -> Floats:
    """Seconds of the exchange between experts that pass behind another micro-batch's compute."""
    hidden: Floats = np.minimum(target.overlap_experts * exchange, whole - exchange)
    return hidden


def _with_data_axis(
    sums: Sums, forward: Floats, backward: Floats, setting: Setting, host: HostCosts
) -> _Passes:
    """The two passes beside ZeRO's gathers and scatters, the reduction of gradients, and what goes
    to the host and comes from it."""
    target, device = setting.target, setting.cluster.device
    # the part of a communication that no compute can hide: its first or last block
    edge = sums.largest_parameters / np.maximum(sums.parameters, 1.0)

    def added(compute: Floats, comm: Floats, overlapped: bool) -> Floats:
        """Seconds that a communication adds to compute."""
        if not overlapped or device.kind == "cpu":
            return comm
        body = comm * (1 - edge) * (target.hidden_zero3 if setting.sharing.zero == 3 else 1.0)
        beside = np.maximum(compute + device.overlap_slowdown * np.minimum(compute, body), body)
        more: Floats = beside + (comm - body) - compute
        return more

    def replicated(compute: Floats, scatter: Floats, replicate: Floats, hidden: bool) -> Floats:
        """Seconds that the reduction among replicas adds to a backward that scatters."""
        if setting.sharing.zero not in target.overlap_replicas:
            return replicate
        more: Floats = added(compute, scatter + replicate, hidden) - added(compute, scatter, hidden)
        return more

    gradients, parameters = target.overlap_gradients, target.overlap_parameters
    scatter, gather, replicate = sums.scatter_s, sums.gather_s, sums.replicate_s
    to_forward: Floats = np.zeros(())
    to_backward: Floats = np.zeros(())
    if setting.sharing.zero == 3:
        gather, replicate = sums.zero3_gather_s, sums.zero3_replicate_s
        gather = gather + host.fetched_s
        again = sums.zero3_secondary_s if setting.sharing.hpz else gather
        moved, copied = again + sums.zero3_scatter_s, _copy_s(sums, setting)
        several = setting.batch.microbatches > 1
        moved = moved + host.returned_s * (not several)
        waited = (host.returned_s + host.added_s) * several
        to_forward = added(forward, gather, parameters) + copied
        to_backward = added(backward, moved, parameters) + copied + waited
        reduce = replicated(backward, moved, replicate, parameters)
    elif setting.sharing.zero:
        reduce = replicated(backward, scatter, replicate, gradients)
        reduce = reduce + added(forward, gather, parameters) + _copy_s(sums, setting)
        if setting.sharing.zero == 2:
            to_backward = added(backward, scatter, gradients)
        else:
            reduce = reduce + added(backward, scatter, gradients)
    else:
        reduce = added(backward, sums.reduce_s, gradients)
    if setting.sharing.zero < 3 and setting.host.states:
        ways = _ways_to_host(added, sums, forward, backward, setting, host)
        to_forward, to_backward = ways[0], to_backward + ways[1]
        reduce = reduce + ways[2]
    return _Passes(
        forward_s=forward + to_forward,
        backward_s=backward + to_backward,
        forward_comm_s=to_forward,
        backward_comm_s=to_backward,
        reduce_s=reduce,
    )


def _ways_to_host(
    added: Callable[[Floats, Floats, bool], Floats],
    sums: Sums,
    forward: Floats,
    backward: Floats,
    setting: Setting,
    host: HostCosts,
) -> tuple[Floats, Floats, Floats]:
    """Seconds that what goes to the host and comes from it adds to each forward, each backward and
    a step, below ZeRO-3, beside ZeRO's gathers and the reduction of gradients."""
    to_forward = added(forward, host.weights_s, True)
    to_backward = added(backward, host.weights_s, True)
    comm = sums.gather_s if setting.sharing.zero else np.zeros(())
    once = added(forward, comm + host.fetched_s, True) - added(forward, comm, True)
    once = once + added(forward, host.kept_s, True)
    comm = sums.scatter_s if setting.sharing.zero else sums.reduce_s
    sent = added(backward, comm + host.returned_s, True) - added(backward, comm, True)
    if sends_each(setting):
        several = setting.batch.microbatches > 1
        return to_forward, to_backward + sent + host.added_s * several, once
    divided = setting.shards < setting.mesh.holders  # among replicas, after all
    return to_forward, to_backward, once + (host.returned_s if divided else sent)


def _copy_s(sums: Sums, setting: Setting) -> Floats:
    """Seconds to copy all gathered weights to where they are read."""
    device, weight_bytes = setting.cluster.device, DTYPE_BYTES[setting.precision]
    in_place = setting.sharing.zero < 3 and weight_bytes == 4
    if in_place or not setting.target.copies_weights:
        return np.zeros(())
    moved = 2 * weight_bytes * sums.parameters
    reached = device.memory_bandwidth * device.memory_efficiency(np.maximum(moved, 1.0))
    seconds: Floats = moved / reached
    return seconds


def _copying(setting: Setting) -> float:
    """How many times as long an optimizer's step takes that copies first what it writes."""
    if not setting.validated:
        return 1.0
    copied = 2 * undo_bytes(1.0, 1, zero=0, optimizer=setting.optimizer)  # read and written
    return 1 + copied / optimizer_step_bytes(1.0, optimizer=setting.optimizer)


def _static_bytes(
    held: HeldBytes[Floats], passing: Floats, active: Floats, sums: Sums, setting: Setting
) -> Floats:
    """Bytes beside the micro-batches in flight, each of which holds so many `active` ones: in a
    backward, or in the optimizer's step, when none is in flight."""
    states = held.weights + held.gradients + held.optimizer + held.frozen
    stepping = states + held.communicators + _temporary_bytes(sums, setting)
    static: Floats = np.maximum(states + held.buffers + passing, stepping - active)
    return static


def _temporary_bytes(sums: Sums, setting: Setting) -> Floats:
    """Bytes that the optimizer makes beside its states on a GPU, where a step is followed so far:
    others are fitted with what theirs do."""
    device, target = setting.cluster.device.kind, setting.target
    if device != "cuda" or not target.gradients_come:
        return np.zeros_like(sums.parameters)
    owned = sums.shard_parameters if setting.sharing.zero else sums.parameters
    own = optimizer_named(setting.optimizer).temporary
    found: Floats = own * (1 - setting.host.states) * owned
    return found


def of_policy(costs: StageCosts[Floats], k: int) -> StageCosts[Floats]:
    """Of the costs of stages under several policies, (P, ...) where they depend on it, those under
    policy k."""
    single = costs.parameters.ndim
    return combined([costs], lambda own: own[0][k] if own[0].ndim > single else own[0])


def communicator_bytes(setting: Setting) -> int:
    """Bytes of a rank's communicators beyond those in the device's `reserved_bytes`."""
    more = max(0, setting.communicators - RESERVED_COMMUNICATORS)
    return more * setting.cluster.device.communicator_bytes


def secondary_bytes(setting: Setting) -> float:
    """Bytes of secondary shards for each parameter, in the precision that is gathered."""
    return DTYPE_BYTES[setting.precision] / setting.sharing.hpz if setting.sharing.hpz else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes(Generic[A]):
    """Bytes that a stage holds on one rank, by what they are: states of the model (`frozen`:
    parameters that are not trained), `buffers` of gradients and gathered weights; only during a
    backward what is made again and the gradients of activations (`transient`); `communicators`,
    which the stages of a device have in common."""

    weights: A
    gradients: A
    optimizer: A
    frozen: A
    buffers: A
    transient: A
    communicators: A


def held_bytes(sums: Sums, setting: Setting, repeated: Recompute) -> HeldBytes[Floats]:
    """What a stage holds, activations apart, from the sums of its blocks."""
    target = setting.target
    # ranks that a parameter is divided among, on average: experts among fewer than the rest
    shards = sums.parameters / np.maximum(sums.shard_parameters, 1e-9)
    states = model_states(
        sums.parameters,
        precision=setting.precision,
        zero=setting.sharing.zero,
        dp=np.maximum(shards, 1.0),
        optimizer=setting.optimizer,
        target=target,
        host=setting.host.states,
        sent=sent_gradients(setting),
    )
    kept = sums.parameters * secondary_bytes(setting)
    undone = setting.validated * undo_bytes(
        sums.parameters,
        np.maximum(shards, 1.0),
        zero=setting.sharing.zero,
        optimizer=setting.optimizer,
    )
    return HeldBytes(
        weights=states.weights + kept - weights_there(sums, setting),
        gradients=states.gradients,
        optimizer=states.optimizer + undone,
        frozen=sums.frozen_bytes,
        buffers=buffer_bytes(sums.largest_parameters, setting.sharing.quantized)
        + blocks_here(sums, setting)
        + working_bytes(
            sums.parameters,
            sums.largest_parameters,
            weight_bytes=DTYPE_BYTES[setting.precision],
            zero=setting.sharing.zero,
            dp=setting.mesh.holders,
            target=target,
        ),
        # a block computed again, one operator's gradients
        transient=sums.transient_bytes + np.maximum(repeated.largest_bytes, sums.decided_bytes),
        communicators=np.full_like(sums.parameters, communicator_bytes(setting)),
    )


def stage_costs(
    sums: Sums, setting: Setting, recompute: str | Recompute, sent: Sent | None = None
) -> StageCosts[Floats]:
    """Costs of stages from the sums of their blocks. `recompute` is one policy for all blocks, or
    what they run again: by several, or with a leading axis of alternatives. `sent` is what goes to
    host memory, where it is known by block."""
    target = setting.target
    repeated = sums.recompute(recompute) if isinstance(recompute, str) else recompute
    forward = sums.forward_s - _hidden(sums.forward_s, sums.forward_exchange_s, target)
    backward = sums.backward_s - _hidden(sums.backward_s, sums.backward_exchange_s, target)
    both = _issued if setting.cluster.device.kind == "cuda" else np.add
    slowest = slowest_of(setting.cluster.num_nodes)
    host = host_costs(sums, setting)
    passes = _with_data_axis(
        sums,
        slowest * both(forward, sums.forward_host_s),
        slowest * both(backward + repeated.seconds, sums.backward_host_s + repeated.host_s),
        setting,
        host,
    )
    again_s = (
        repeated.gather_s if setting.sharing.zero == 3 else np.zeros(())
    )  # before it, nothing hides
    held = held_bytes(sums, setting, repeated)
    kept = sums.saved_bytes + sums.input_bytes - repeated.freed_bytes
    if sent is None:
        busy = host.fetched_s * (setting.sharing.zero == 3)  # the link, in a backward
        alone = np.maximum(backward + repeated.seconds - busy, 0.0)
        sent = sent_evenly(kept, sums.blocks, forward, alone, setting)
    # as it comes back, what the micro-batch kept on the device of later blocks is let go
    back = np.maximum(sent.passing_bytes - (kept - sent.nbytes), 0.0)
    passing = held.transient + held.communicators + back
    return StageCosts(
        forward_s=passes.forward_s + sent.forward_s,
        backward_s=passes.backward_s + again_s + sent.backward_s,
        weight_s=np.minimum(sums.weight_s, passes.backward_s),
        forward_comm_s=sums.forward_comm_s + passes.forward_comm_s + sent.forward_s,
        backward_comm_s=sums.backward_comm_s
        + repeated.comm_s
        + passes.backward_comm_s
        + again_s
        + sent.backward_s,
        measured_s=sums.measured_s,
        interpolated_s=sums.interpolated_s,
        reduce_s=passes.reduce_s,
        optimizer_s=(1 - setting.host.states)
        * _copying(setting)
        * (sums.shard_s if setting.sharing.zero else sums.optimizer_s)
        + host.step_s,
        static_bytes=_static_bytes(held, passing, kept - sent.nbytes, sums, setting),
        passing_bytes=passing,
        activation_bytes=kept - sent.nbytes,
        parameters=sums.parameters,
        host_bytes=host.nbytes,
        flash_bytes=host.flash_bytes,
        away_bytes=sent.nbytes,
    )
