"""Costs of a stage on one rank, from the sums over its blocks (`sums.py`).

Formulas: docs/decides/price.md. Device and host share a pass: the longer where they differ, 9 %
more where they are equal (as near to vTrain's single-node rows as 19 %, and nearer to steps in fp8
under Transformer Engine, whose host's work is most of a pass); a CPU does one after the other.
Both last as long as on the slowest node (`costmodel/intervals.py`). Communication beside compute
takes part of the compute units and of the memory bandwidth. Hidden so, as far as the target does it
(`costmodel/target.py`): ZeRO-3's gathers behind both passes (the backward's from a secondary shard
in the node, where one is kept), gradient reduction behind the backward (the last one of a step,
where gradients are reduced once), and ZeRO-1's and 2's gathering of updated weights behind the
first forward. The last unit of a backward and the first one of a forward have nothing to hide
behind. Where ZeRO replicates its shards, the reduction among replicas joins the scatter of a step's
last backward, or follows it. On a CPU nothing is hidden: its cores compute and move the bytes.
States in host memory travel like ZeRO's gathers and scatters, activations beside other blocks
(`offload.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

import numpy as np

from meshwright.costmodel.intervals import slowest_of
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.stages import offload
from meshwright.costmodel.stages.stage_memory import (
    A,
    StageMemory,
    communicator_bytes,
    stage_memory,
)
from meshwright.costmodel.stages.sums import Floats, Recompute, Sums
from meshwright.costmodel.target import Target

Where: TypeAlias = Literal["forward", "backward", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts(StageMemory[A]):
    """Costs of a stage on one rank: floats, or of several stages arrays of one shape.

    Seconds per micro-batch (`*_s`; `weight_s` is part of `backward_s`), once per step (`reduce_s`,
    the part that is not hidden; `optimizer_s`); bytes as in `StageMemory`, those of a micro-batch
    in flight (`activation_bytes`), of communicators, which all stages of a device have in common,
    of host memory (`host_bytes`, and `away_bytes` per micro-batch in flight) and of files on its
    flash (`flash_bytes`). `several` is 1 where a step has several micro-batches, else 0.
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
    communicator_bytes: A
    several: A
    activation_bytes: A
    parameters: A
    host_bytes: A
    away_bytes: A
    flash_bytes: A

    @property
    def kept_bytes(self) -> A:
        """Bytes beside activations while another stage of its device is in a backward."""
        return self.fixed_bytes + self.several * self.gradient_bytes

    @property
    def passing_bytes(self) -> A:
        """Bytes that the highest of its backwards takes besides."""
        backward = self.several * self.later_bytes + (1 - self.several) * self.first_bytes
        return backward + self.communicator_bytes

    @property
    def stepping_bytes(self) -> A:
        """Bytes that the stage holds in the optimizer's step."""
        return self.fixed_bytes + self.step_bytes + self.communicator_bytes

    @property
    def late_bytes(self) -> A:
        """Bytes of a further version of the weights, and of gradients that wait, of one step."""
        return self.version_bytes + self.copied_bytes + self.waiting_bytes

    @property
    def static_bytes(self) -> A:
        """Bytes beside micro-batches in flight, of which there is one at least."""
        passing = self.kept_bytes + self.passing_bytes
        highest: A = np.maximum(passing, self.stepping_bytes - self.activation_bytes)
        return highest

    def in_host_bytes(self, in_flight: float) -> A:
        """Bytes of the host's memory with so many micro-batches in flight."""
        return self.host_bytes + in_flight * self.away_bytes

    def amortised_s(self, num_microbatches: int) -> A:
        """Seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


COSTS = tuple(cost.name for cost in fields(StageCosts))


def as_rows(costs: StageCosts[Floats]) -> Floats:
    """(COSTS, ...): the costs as rows of one array."""
    return np.stack(np.broadcast_arrays(*(getattr(costs, name) for name in COSTS)))


def of_rows(rows: Iterable[A]) -> StageCosts[A]:
    """Costs from the rows of `as_rows`."""
    return StageCosts(**dict(zip(COSTS, rows, strict=True)))


def of_one(costs: StageCosts[Floats], stage: int | tuple[()] = ()) -> StageCosts[float]:
    """Costs of one of several stages as floats; by default of the only one, 0-d."""
    return of_rows(float(getattr(costs, name)[stage]) for name in COSTS)


def mixed(low: StageCosts[float], high: StageCosts[float], part: float) -> StageCosts[float]:
    """Costs of a stage of which a `part` of the blocks is on the higher level."""
    pairs = ((getattr(low, name), getattr(high, name)) for name in COSTS)
    return of_rows((1 - part) * one + part * other for one, other in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Work beside a pass, or a step's first or last one: its `parts`, seconds by column of the
    ledger, and the seconds that it adds (`added_s`) to each forward, to each backward, or once
    (`where`)."""

    where: Where
    parts: Mapping[str, Floats]
    added_s: Floats


def _alone(where: Where, column: str, seconds: Floats) -> Beside:
    """Work that nothing hides."""
    return Beside(where=where, parts={column: seconds}, added_s=seconds)


def _added(besides: Sequence[Beside], where: str) -> Floats:
    added: Floats = sum((b.added_s for b in besides if b.where == where), np.zeros(()))
    return added


def _issued(device: Floats, host: Floats) -> Floats:
    """Seconds of a pass that the device and the host share; sharpness 8."""
    longer = np.maximum(device, host)
    part = np.minimum(device, host) / np.where(longer > 0, longer, 1.0)
    more = 1 + np.square(np.square(np.square(part)))
    seconds: Floats = longer * np.sqrt(np.sqrt(np.sqrt(more)))
    return seconds


def _hidden(sums: Sums, target: Target) -> tuple[Floats, Floats]:
    """Seconds of both passes' exchange of tokens behind another micro-batch's compute."""
    part = target.overlap_experts
    forward, backward = sums.forward_exchange_s, sums.backward_exchange_s
    return (
        np.minimum(part * forward, sums.forward_s - forward),
        np.minimum(part * backward, sums.backward_s - backward),
    )


def _hiding(sums: Sums, setting: Setting) -> Callable[[Floats, Floats, bool], Floats]:
    """The seconds that a communication adds to compute, where it is `overlapped`."""
    target, device = setting.target, setting.cluster.device
    # the part of a communication that no compute can hide: its first or last block
    weights, largest = sums.moved_weights(setting.sharing)
    edge = largest / np.maximum(weights, 1.0)

    def added(compute: Floats, comm: Floats, overlapped: bool) -> Floats:
        if not overlapped or device.kind == "cpu":
            return comm
        body = comm * (1 - edge) * (target.hidden_zero3 if setting.sharing.gathers else 1.0)
        beside = np.maximum(compute + device.overlap_slowdown * np.minimum(compute, body), body)
        more: Floats = beside + (comm - body) - compute
        return more

    return added


def _data_axis(
    sums: Sums, forward: Floats, backward: Floats, setting: Setting, host: offload.HostCosts
) -> Iterator[Beside]:
    """ZeRO's gathers and scatters, and the reduction of gradients."""
    target, sharing = setting.target, setting.sharing
    added, copied = _hiding(sums, setting), _copy_s(sums, setting)
    gradients, parameters = target.overlap_gradients, target.overlap_parameters

    def replicated(scatter: Floats, column: str, hidden: bool) -> Beside:
        """Reduction among replicas, which joins a backward that scatters or follows it."""
        replicate = more = getattr(sums, column)
        if target.hides_replicas(sharing):
            more = added(backward, scatter + replicate, hidden) - added(backward, scatter, hidden)
        return Beside(where="step", parts={column: replicate}, added_s=more)

    def beside(where: Where, parts: Mapping[str, Floats], compute: Floats, hidden: bool) -> Beside:
        together = sum(parts.values(), np.zeros(()))
        return Beside(where=where, parts=parts, added_s=added(compute, together, hidden))

    if not sharing.divides:
        yield beside("step", {"reduce_s": sums.reduce_s}, backward, gradients)
        yield _alone("step", "compress_s", sums.compress_s)
    elif sharing.gathers:
        several = setting.batch.microbatches > 1
        gathered = {"zero3_gather_s": sums.zero3_gather_s, "fetched_s": host.fetched_s}
        again = {"zero3_again_s": sums.zero3_again_s, "fetched_s": host.fetched_s}
        if setting.keeps_secondary:
            again = {"zero3_secondary_s": sums.zero3_secondary_s}
        scattered = {"zero3_scatter_s": sums.zero3_scatter_s}
        returned = {"returned_s": host.returned_s}
        moved = again | scattered | ({} if several else returned)
        yield beside("forward", gathered, forward, parameters)
        yield beside("backward", moved, backward, parameters)
        if several:
            yield beside("backward", returned | {"added_s": host.added_s}, backward, False)
        yield _alone("forward", "copied_s", copied)
        yield _alone("backward", "copied_s", copied)
        yield replicated(sum(moved.values(), np.zeros(())), "zero3_replicate_s", parameters)
    else:
        scatter = {"scatter_s": sums.scatter_s}
        yield replicated(sums.scatter_s, "replicate_s", gradients)
        yield beside("step", {"gather_s": sums.gather_s}, forward, parameters)
        yield beside("backward" if sharing.scatters_whole else "step", scatter, backward, gradients)
        yield _alone("step", "copied_s", copied)


def _host_link(
    sums: Sums, forward: Floats, backward: Floats, setting: Setting, host: offload.HostCosts
) -> Iterator[Beside]:
    """Copies to and from the host below ZeRO-3."""
    added, none = _hiding(sums, setting), np.zeros(())

    def more(where: Where, column: str, compute: Floats, comm: Floats = none) -> Beside:
        """Seconds of the host's column that `comm`, on its way beside the same, does not have."""
        copied: Floats = getattr(host, column)
        without = added(compute, comm, True) if comm is not none else none
        more_s = added(compute, comm + copied, True) - without
        return Beside(where=where, parts={column: copied}, added_s=more_s)

    divided = setting.sharing.divides
    yield more("forward", "weights_s", forward)
    yield more("backward", "weights_s", backward)
    yield more("step", "fetched_s", forward, sums.gather_s if divided else none)
    yield more("step", "kept_s", forward)
    returned = more("step", "returned_s", backward, sums.scatter_s if divided else sums.reduce_s)
    if offload.sends_each(setting):
        yield replace(returned, where="backward")
        if setting.batch.microbatches > 1:
            yield _alone("backward", "added_s", host.added_s)
    elif setting.shards < setting.mesh.holders:  # among replicas, after all
        yield replace(returned, added_s=host.returned_s)
    else:
        yield returned


def _copy_s(sums: Sums, setting: Setting) -> Floats:
    """Seconds to copy all gathered weights to where they are read."""
    device, weight_bytes = setting.cluster.device, setting.weight_bytes
    in_place = not setting.sharing.gathers and weight_bytes == setting.kept_bytes
    if in_place or not setting.target.copies_weights:
        return np.zeros(())
    moved = 2 * weight_bytes * sums.moved_weights(setting.sharing)[0]
    reached = device.memory_bandwidth * device.memory_efficiency(np.maximum(moved, 1.0))
    seconds: Floats = moved / reached
    return seconds


def _copying(setting: Setting) -> float:
    """Seconds of an optimizer's step that first copies what it writes, over one that doesn't."""
    if not setting.validated:
        return 1.0
    copied = 2 * setting.optimizer.state_bytes  # read and written
    return 1 + copied / setting.optimizer.moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds that the device works in both passes (`forward_s`, `backward_s`), of which `*_comm_s`
    communicates within them; part of the exchange between experts that is `hidden_s` in each; work
    `beside`, or added for what the host issues and for the slowest node (`issue_s`); the
    optimizer's step on the device (`optimizer_s`); what the host does and what is `sent` there."""

    forward_s: Floats
    backward_s: Floats
    forward_comm_s: Floats
    backward_comm_s: Floats
    hidden_s: tuple[Floats, Floats]
    beside: Sequence[Beside]
    optimizer_s: Floats
    host: offload.HostCosts
    sent: offload.Sent


def stage_passes(
    sums: Sums, setting: Setting, repeated: Recompute, sent: offload.Sent | None = None
) -> Passes:
    """The passes of stages from the sums of their blocks, and what they run again; what these send
    to host memory, where that is not known by block, is sent evenly."""
    hidden, host = _hidden(sums, setting.target), offload.host_costs(sums, setting)
    device = sums.forward_s - hidden[0], sums.backward_s - hidden[1] + repeated.seconds
    issued = sums.forward_host_s, sums.backward_host_s + repeated.host_s
    both = _issued if setting.cluster.device.kind == "cuda" else np.add
    slowest = slowest_of(setting.cluster.num_nodes)
    forward, backward = (slowest * both(*pair) for pair in zip(device, issued, strict=True))
    beside = [
        _alone("forward", "issue_s", forward - device[0]),
        _alone("backward", "issue_s", backward - device[1]),
        *_data_axis(sums, forward, backward, setting, host),
    ]
    if setting.host.states and not setting.sharing.gathers:
        beside += _host_link(sums, forward, backward, setting, host)
    if setting.sharing.gathers:  # before it, nothing hides
        beside.append(_alone("backward", "zero3_gather_s", repeated.gather_s))
    if sent is None:
        busy = host.fetched_s * setting.sharing.gathers  # the link, in a backward
        alone = np.maximum(device[1] - busy, 0.0)
        activations, last = kept_bytes(sums, repeated), (sums.alone_blocks, sums.alone_bytes)
        sent = offload.sent_evenly(activations, sums.blocks, device[0], alone, setting, last)
    beside += _away(sent, setting)
    stepped = sums.shard_s if setting.sharing.divides else sums.optimizer_s
    return Passes(
        forward_s=device[0],
        backward_s=device[1],
        forward_comm_s=sums.forward_comm_s - hidden[0],
        backward_comm_s=sums.backward_comm_s - hidden[1] + repeated.comm_s,
        hidden_s=hidden,
        beside=beside,
        optimizer_s=(1 - setting.host.states) * _copying(setting) * stepped,
        host=host,
        sent=sent,
    )


def kept_bytes(sums: Sums, repeated: Recompute) -> Floats:
    """Bytes of activations that a micro-batch keeps from its forward to its backward."""
    activations: Floats = sums.saved_bytes + sums.input_bytes - repeated.freed_bytes
    return activations


def _away(sent: offload.Sent, setting: Setting) -> Iterator[Beside]:
    """Activations on their way to the host and back."""
    if setting.cluster.host is None or not setting.host.activations:
        return
    to_host = sent.nbytes / offload.host_bandwidth(setting, "to_host")
    to_device = sent.nbytes / offload.host_bandwidth(setting, "to_device")
    yield Beside(where="forward", parts={"away_to_host_s": to_host}, added_s=sent.forward_s)
    yield Beside(where="backward", parts={"away_to_device_s": to_device}, added_s=sent.backward_s)


def stage_costs(
    sums: Sums, setting: Setting, recompute: str | Recompute, sent: offload.Sent | None = None
) -> StageCosts[Floats]:
    """Costs of stages from the sums of their blocks. `recompute` is one policy for all blocks, or
    what they run again: by several, or with a leading axis of alternatives. `sent` is what goes to
    host memory, where it is known by block."""
    repeated = sums.recompute(recompute) if isinstance(recompute, str) else recompute
    activations, passes = kept_bytes(sums, repeated), stage_passes(sums, setting, repeated, sent)
    host, sent = passes.host, passes.sent
    forward, backward, once = (_added(passes.beside, w) for w in ("forward", "backward", "step"))
    active = np.maximum(activations - sent.nbytes, 0.0)  # rounded
    memory = stage_memory(sums, setting, repeated, active, sent)
    issue = [b.added_s for b in passes.beside if "issue_s" in b.parts]
    return StageCosts(
        forward_s=passes.forward_s + forward,
        backward_s=passes.backward_s + backward,
        weight_s=np.minimum(sums.weight_s, passes.backward_s + backward),
        forward_comm_s=passes.forward_comm_s + forward - issue[0],
        backward_comm_s=passes.backward_comm_s + backward - issue[1],
        measured_s=sums.measured_s,
        interpolated_s=sums.interpolated_s,
        reduce_s=once,
        optimizer_s=passes.optimizer_s + host.step_s,
        **{kind.name: getattr(memory, kind.name) for kind in fields(StageMemory)},
        communicator_bytes=np.full_like(sums.parameters, communicator_bytes(setting)),
        several=np.full_like(sums.parameters, setting.batch.microbatches > 1),
        activation_bytes=active,
        parameters=sums.parameters,
        host_bytes=host.nbytes,
        flash_bytes=host.flash_bytes,
        away_bytes=offload.pinned_bytes(sent.nbytes, setting.cluster.device),
    )
