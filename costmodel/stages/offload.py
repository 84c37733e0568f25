"""Costs of a stage with optimizer states (ZeRO-Offload) or activations, in part, in host memory.

Of n of a rank's elements (ZeRO's shards of them), fp32 weights, moments and gradients are in host
memory, 4 + 4 + moments bytes each, and the optimizer steps there: it reads and writes what it would
on a device, at the rank's part of the bandwidth that the host's cores reach. Over the host link go,
in fp32,

    ZeRO-0 to 2   once a step weights, beside the first forward, as ZeRO's gathers are hidden;
                  gradients beside the backward that makes them whole: that of every micro-batch
                  where no ranks sum them, or ZeRO-2 scatters them (the host adds up those of
                  several, and is waited for), else the last; after it among replicas of shards.
                  Weights that lie there: beside both passes of each micro-batch, in the precision
                  that is computed in; once a step a copy of that goes there, where it is another
                  than what is stored
    ZeRO-3        per micro-batch: weights, frozen ones too, before each gather, twice, and
                  gradients as they are scattered, beside compute; where there are several
                  micro-batches, torch waits for each gradient and adds it up on the host

Of the states, those in files on the node's flash (`host_files`) leave host memory but for their
gradients. What is read of files, weights before each first forward, all that the optimizer reads,
and what it writes, is waited for, at the rank's part of the flash's bandwidths.

Activations that block k sends go beside the next block's forward f, and come back beside its
backward b, with c seconds of copies each way: a forward waits added(f[k+1], c[k]), a backward
added(b[k+1], c[k]), added as in docs/decides/price.md; nothing lies beside the last block's.

A micro-batch in flight holds on the device what is not sent, and one at a time what two neighbours
have on its way. In a search whose blocks are not known yet, all blocks are alike.

Ranks share the host: where all of a node's were not timed at once, copies of each reach no more
than its part of the host cores' memory bandwidth, and with several nodes half of the link, whose
other half the network card has. Both are pessimistic: DMA may reach more, the card may be idle.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from meshwright.costmodel.memory import fused, optimizer_named
from meshwright.costmodel.operators import Problem, Setting
from meshwright.costmodel.stages.sums import Floats, Sums
from meshwright.profiles.cluster import Device
from meshwright.profiles.timings import COPIES, FLASH, HOST_STEP, at_once

# what torch pins over what is asked for: buffers are powers of two, sizes spread evenly over an
# octave in their logarithm (2 ln 2)
PINNED = 1.39


A = TypeVar("A", float, Floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of a rank's weights in host memory on their way to the device (`fetched_s`), of their
    gradients back (`returned_s`), of adding these up there (`added_s`), of the optimizer's step
    there with files read and written (`step_s`), of weights that lie there too on their way for a
    pass (`weights_s`), of what a step keeps of them (`kept_s`); bytes there, and in files."""

    fetched_s: Floats
    returned_s: Floats
    added_s: Floats
    step_s: Floats
    weights_s: Floats
    kept_s: Floats
    nbytes: Floats
    flash_bytes: Floats


def host_costs(sums: Sums, setting: Setting) -> HostCosts:
    """Costs of the part of the states that lies in host memory."""
    host = setting.cluster.host
    numel = sums.shard_parameters if setting.sharing.divides else sums.parameters
    moved = setting.host.states * numel
    if host is None or not setting.host.states:
        none = np.zeros_like(numel)
        return HostCosts(**dict.fromkeys((field.name for field in fields(HostCosts)), none))
    bandwidth = host_bandwidth(setting, HOST_STEP) / setting.cluster.devices_per_node
    kept, optimizer = setting.kept_bytes, setting.optimizer
    step_bytes = optimizer_named(fused(setting.problem.optimizer), kept).moved
    to_device, to_host = (host_bandwidth(setting, kind) for kind in COPIES)
    frozen = frozen_there(sums, setting)
    weights = weights_there(sums, setting)
    part = setting.host.weights  # of the weights, of which a step keeps copies
    if setting.weight_bytes == kept and not setting.sharing.divides:
        part = min(part, setting.host.files)  # others are what the optimizer steps
    copied = setting.weight_bytes * part * sums.parameters
    here, device = moved - setting.host.files * numel, setting.cluster.device
    filed = optimizer.state_bytes * setting.host.files * numel
    weights_filed = kept * setting.host.files * numel
    return HostCosts(
        fetched_s=(kept * moved + frozen) / to_device,
        returned_s=kept * moved / to_host,
        added_s=3 * kept * moved / bandwidth,
        step_s=step_bytes * moved / bandwidth + files_s(filed + weights_filed, filed, setting),
        weights_s=weights / to_device,
        kept_s=copied / to_host,
        nbytes=optimizer.moments * here
        + pinned_bytes(
            kept * (moved + here) + copied + frozen + staged_bytes(sums, setting), device
        ),
        flash_bytes=filed,
    )


def staged_bytes(sums: Sums, setting: Setting) -> Floats:
    """Pinned bytes of weights in files on their way to a device: of a block, and of the next."""
    if setting.cluster.device.kind == "cpu":
        return np.zeros_like(sums.parameters)
    both = np.minimum(2.0 * sums.largest_parameters, setting.host.files * sums.parameters)
    staged: Floats = setting.kept_bytes * both / setting.sharing.parts(setting.shards)
    return staged


def files_s(read: Floats, written: Floats, setting: Setting) -> Floats:
    """Seconds in which a rank reads and writes bytes of files on its node's flash."""
    if not setting.host.files:
        return np.zeros_like(read)
    from_flash, to_flash = (host_bandwidth(setting, kind) for kind in FLASH)
    return setting.cluster.devices_per_node * (read / from_flash + written / to_flash)


def sends_each(setting: Setting) -> bool:
    """Whether every backward sends its gradients to the host, below ZeRO-3."""
    if setting.mesh.holders == 1:
        return True
    return setting.sharing.scatters_whole and setting.shards == setting.mesh.holders


def sent_gradients(setting: Setting) -> float:
    """Part of the gradients that goes to the host as backwards make it, below ZeRO-3."""
    last = setting.batch.microbatches == 1 and setting.shards == setting.mesh.holders
    return setting.host.states if last or sends_each(setting) else 0.0


def frozen_there(sums: Sums, setting: Setting) -> Floats:
    """Bytes of frozen parameters in host memory: ZeRO-3 keeps the shards of a block together."""
    frozen: Floats = setting.host.states * setting.sharing.gathers * sums.frozen_shard_bytes
    return frozen


def weights_there(sums: Sums, setting: Setting) -> Floats:
    """Bytes of weights that the device has only while their block runs."""
    weights: Floats = setting.weight_bytes * setting.host.weights * sums.parameters
    return weights


def blocks_here(sums: Sums, setting: Setting) -> Floats:
    """Bytes of those weights that the device has then: of a block, and of the next."""
    both: Floats = 2.0 * setting.weight_bytes * sums.largest_parameters
    return np.minimum(both, weights_there(sums, setting))


def host_bandwidth(setting: Setting, kind: str) -> float:
    """Bytes per second of a kind of `profiles.timings.OF_HOST`: measured, else the catalog's; for
    copies a rank's part while all ranks of its node move as much."""
    host, profile, cluster = setting.cluster.host, setting.profile, setting.cluster
    assert host is not None
    per_node = cluster.devices_per_node
    measured = profile.host_bandwidth(kind, at_once(kind, per_node)) if profile else None
    bandwidth = measured or host.bandwidth(kind)
    if kind not in COPIES or cluster.device.kind == "cpu" or (measured and per_node == 1):
        return bandwidth
    link = bandwidth / (2 if cluster.num_nodes > 1 else 1)
    return min(link, host_bandwidth(setting, HOST_STEP) / per_node)


def pinned_bytes(nbytes: A, device: Device) -> A:
    """Host memory that is pinned for so many bytes of a device."""
    return nbytes if device.kind == "cpu" else PINNED * nbytes


def held_bytes(problem: Problem) -> float:
    """Bytes of each element whose states lie in host memory; its weight and gradient are pinned."""
    optimizer = problem.stepped
    return pinned_bytes(2.0 * optimizer.kept_bytes, problem.cluster.device) + optimizer.moments


# --- activations ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes of a micro-batch in host memory (`nbytes`), the most of them that are on a device on
    their way, and the seconds that both passes wait for them."""

    nbytes: Floats
    passing_bytes: Floats
    forward_s: Floats
    backward_s: Floats


def sent_evenly(
    activations: Floats,
    blocks: Floats,
    forward: Floats,
    backward: Floats,
    setting: Setting,
    alone: tuple[Floats, Floats] = (np.zeros(()), np.zeros(())),
) -> Sent:
    """Activations sent of stages with equal `blocks`, but for the last ones (`alone`)."""
    part = setting.host.activations
    if not part or setting.cluster.host is None:
        none = np.zeros(np.shape(activations))
        return Sent(nbytes=none, passing_bytes=none, forward_s=none, backward_s=none)
    blocks = np.maximum(blocks, 1.0)
    beside = np.minimum(part, 1 - 1 / blocks)
    like = np.maximum(blocks - alone[0], 1.0)
    per_block = np.maximum(activations - alone[1], 0.0) / like
    nbytes = np.minimum(part * blocks, like) * per_block
    # parts that reach the last ones send of them, too
    nbytes = np.where(part * blocks > like, np.maximum(nbytes, part * activations), nbytes)
    return Sent(
        nbytes=nbytes,
        passing_bytes=np.minimum(2 * per_block, nbytes),
        forward_s=_added(beside * forward, nbytes, "to_host", setting),
        backward_s=_added(beside * backward, nbytes, "to_device", setting),
    )


def sent_by_block(moved: Floats, forward: Floats, backward: Floats, setting: Setting) -> Sent:
    """Activations sent of one stage: `moved` bytes of each block, beside its seconds, (K,)."""

    def waits(seconds: Floats, kind: str) -> Floats:
        following = np.append(seconds[1:], 0.0)
        return np.asarray(_added(following, moved, kind, setting).sum())

    return Sent(
        nbytes=np.asarray(moved.sum()),
        passing_bytes=np.asarray((moved + np.append(0.0, moved[:-1])).max(initial=0.0)),
        forward_s=waits(forward, "to_host"),
        backward_s=waits(backward, "to_device"),
    )


def _added(compute: Floats, nbytes: Floats, kind: str, setting: Setting) -> Floats:
    """Seconds that copies add to the compute beside them."""
    device, copies = setting.cluster.device, nbytes / host_bandwidth(setting, kind)
    if device.kind == "cpu":
        return copies
    both = np.maximum(compute + device.overlap_slowdown * np.minimum(compute, copies), copies)
    added: Floats = both - compute
    return added
