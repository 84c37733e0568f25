"""Components of a stage on one rank, and the sums over its blocks that they come from.

A pass takes the longer of what the device does and what the host needs to issue it; where the
device is the host (a CPU), it does one after the other. Communication
that runs beside compute c seconds long costs

    beside(compute, c) = max(compute + slowdown · min(compute, c), c)

in all: it takes part of the compute units and of the memory bandwidth while it lasts. Hidden so, as
far as the target does it (`costmodel/target.py`): ZeRO-3's gathers behind both passes, gradient
reduction behind the backward (the last one of a step, where gradients are reduced once), and
ZeRO-1's and 2's gathering of updated weights behind the first forward. The last unit of a backward
and the first one of a forward have nothing to hide behind. Where ZeRO replicates its shards, the
reduction among replicas joins what is scattered in a step's last backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.costmodel.blocks.price import BlockPrice
from meshwright.costmodel.blocks.selective import POLICIES
from meshwright.costmodel.graph import Block
from meshwright.costmodel.memory.states import model_state_bytes, working_bytes
from meshwright.costmodel.operators.cost import COST_FIELDS, DTYPE_BYTES, Setting
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.rules.traits import draws_anew, updates_statistics
from meshwright.costmodel.sharding.strategies import Placement
from meshwright.costmodel.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Components of a stage on one rank; floats, or arrays over (first block, last block + 1).

    Seconds per micro-batch (`*_s`; `weight_s` is part of `backward_s`), once per step (`reduce_s`,
    what is not hidden of it; `optimizer_s`); bytes in all (`static_bytes`, of which
    `passing_bytes` only during a backward) and per micro-batch in flight (`activation_bytes`).
    """

    forward_s: Any
    backward_s: Any
    weight_s: Any
    forward_comm_s: Any
    backward_comm_s: Any
    measured_s: Any
    interpolated_s: Any
    reduce_s: Any
    optimizer_s: Any
    static_bytes: Any
    passing_bytes: Any
    activation_bytes: Any
    parameters: Any

    def amortised_s(self, num_microbatches: int) -> Any:
        """Seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


# carried along a chain, in this order: sums, then maxima
SUMS = (
    *COST_FIELDS,
    "parameters",
    "shard_parameters",
    "frozen_bytes",
    "saved_bytes",
    "input_bytes",
    "full_s",
    "full_comm_s",
    "full_host_s",
    "full_bytes",
    *(f"{policy}_{what}" for policy in POLICIES for what in ("s", "host_s", "bytes")),
)
WAYS = ("forward", "backward")
MAXIMA = ("largest_bytes", "largest_parameters", "transient_bytes", "settled_bytes")
FIELDS = (*SUMS, *MAXIMA)
_AT = {name: k for k, name in enumerate(FIELDS)}


def components(price: BlockPrice, block: Block) -> np.ndarray:
    """One block's contribution to the sums. `full_*` and those of the other policies are
    what recompute repeats, or no longer keeps."""
    c = price.cost
    again = recomputable(block)
    own = {name: getattr(c, name) for name in COST_FIELDS} | {
        "parameters": price.parameters,
        "shard_parameters": price.shard_parameters,
        "frozen_bytes": price.frozen_bytes,
        "saved_bytes": price.saved_bytes,
        "input_bytes": price.input_bytes,
        "full_s": c.forward_s * again,
        "full_comm_s": c.forward_comm_s * again,
        "full_host_s": c.forward_host_s * again,
        "full_bytes": price.saved_bytes * again,
        "largest_bytes": price.saved_bytes * again,
        "largest_parameters": price.parameters,
        "transient_bytes": price.transient_bytes,
    }
    for policy, repeats in price.repeats.items():
        own[f"{policy}_s"] = repeats.seconds * again
        own[f"{policy}_host_s"] = repeats.host_s * again
        own[f"{policy}_bytes"] = repeats.freed_bytes * again
    return np.array([own.get(name, 0.0) for name in FIELDS])


def scaled(sums: np.ndarray, factor: float) -> np.ndarray:
    """Sums of so many runs of equal blocks, or of a part of one; maxima stay."""
    found = sums.copy()
    found[..., : -len(MAXIMA)] *= factor
    return found


def joined(before: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Sums of two runs of blocks, one after the other."""
    together = before + added
    last = len(MAXIMA)
    together[..., -last:] = np.maximum(before[..., -last:], added[..., -last:])
    return together


def parameter_sums(pricer: Pricer, value: str, state: Placement) -> np.ndarray:
    """What one parameter contributes to the sums of each block that reads it."""
    cost = pricer.parameter_cost(value, state)
    trained = pricer.graph.values[value].requires_grad
    own = {name: getattr(cost, name) for name in COST_FIELDS} | {
        "parameters": pricer.numel(value, state) * trained,
        "shard_parameters": pricer.numel(value, state)
        / pricer.parameters.shard_count(value, state)
        * trained,
        "frozen_bytes": pricer.nbytes(value, state) * (not trained),
    }
    return np.array([own.get(name, 0.0) for name in FIELDS])


def _hidden(whole: Any, exchange: Any, target: Target) -> Any:
    """Seconds of the exchange between experts that pass behind another micro-batch's compute."""
    return np.minimum(target.overlap_experts * exchange, whole - exchange)


def recomputable(block: Block) -> bool:
    """Whether running a block twice is harmless: not where a forward updates running statistics, or
    draws what it would not draw again."""
    return not any(updates_statistics(op) or draws_anew(op) for op in block.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Seconds of both passes with what the data axis adds to them, that part by itself, and what is
    not hidden of the reductions and gathers that come once per step."""

    forward_s: Any
    backward_s: Any
    forward_comm_s: Any
    backward_comm_s: Any
    reduce_s: Any


def _with_data_axis(
    get: Mapping[str, Any], forward: Any, backward: Any, setting: Setting
) -> _Passes:
    """The two passes beside ZeRO's gathers and scatters and the reduction of gradients."""
    target, slowdown = setting.target, setting.cluster.device.overlap_slowdown
    # the part of a communication that no compute can hide: its first or last block
    edge = get["largest_parameters"] / np.maximum(get["parameters"], 1.0)

    def added(compute: Any, comm: Any, overlapped: bool) -> Any:
        """Seconds that a communication adds to compute."""
        if not overlapped:
            return comm
        body = comm * (1 - edge)
        beside = np.maximum(compute + slowdown * np.minimum(compute, body), body)
        return beside + comm * edge - compute

    gather, scatter = get["gather_s"], get["scatter_s"]
    to_forward: Any = 0.0
    to_backward: Any = 0.0
    reduce: Any = 0.0
    replicate = get["replicate_s"]
    if setting.zero == 3:
        to_forward = added(forward, gather, target.overlap_parameters)
        to_backward = added(backward, gather + scatter, target.overlap_parameters)
        last = added(backward, gather + scatter + replicate, target.overlap_parameters)
        reduce = last - to_backward
    elif setting.zero == 2:
        to_backward = added(backward, scatter, target.overlap_gradients)
        last = added(backward, scatter + replicate, target.overlap_gradients)
        reduce = last - to_backward + added(forward, gather, target.overlap_parameters)
    else:
        once = scatter + replicate if setting.zero else get["reduce_s"]
        reduce = added(backward, once, target.overlap_gradients)
        if setting.zero:
            reduce = reduce + added(forward, gather, target.overlap_parameters)
    return _Passes(
        forward_s=forward + to_forward,
        backward_s=backward + to_backward,
        forward_comm_s=to_forward,
        backward_comm_s=to_backward,
        reduce_s=reduce,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What the blocks of a stage run again in a backward, by any policy each; floats or arrays.

    Seconds per micro-batch (`seconds`, of which `comm_s`; the host's `host_s`), bytes per
    micro-batch no longer kept (`freed_bytes`), and the most that a block holds once it has been run
    again as a whole (`largest_bytes`).
    """

    seconds: Any = 0.0
    comm_s: Any = 0.0
    host_s: Any = 0.0
    freed_bytes: Any = 0.0
    largest_bytes: Any = 0.0

    def __add__(self, other: Again) -> Again:
        return Again(
            seconds=self.seconds + other.seconds,
            comm_s=self.comm_s + other.comm_s,
            host_s=self.host_s + other.host_s,
            freed_bytes=self.freed_bytes + other.freed_bytes,
            largest_bytes=np.maximum(self.largest_bytes, other.largest_bytes),
        )


def again_of(sums: np.ndarray, policy: str) -> Again:
    """What blocks of these sums run again where all of them follow one policy."""

    def get(name: str) -> Any:
        return sums[..., _AT[name]] if name in _AT else 0.0

    return Again(
        seconds=get(f"{policy}_s"),
        comm_s=get(f"{policy}_comm_s"),
        host_s=get(f"{policy}_host_s"),
        freed_bytes=get(f"{policy}_bytes"),
        largest_bytes=get("largest_bytes") if policy == "full" else 0.0,
    )


def stage_costs(sums: np.ndarray, setting: Setting, recompute: str | Again) -> StageCosts:
    """Components of a stage from the sums of its blocks (last axis: `FIELDS`). `recompute` is one
    policy for all of them, or what they run again by several."""
    get = {name: sums[..., k] for k, name in enumerate(FIELDS)}
    target, replicas = setting.target, setting.dp * setting.cp
    again = again_of(sums, recompute) if isinstance(recompute, str) else recompute
    hidden = [_hidden(get[f"{way}_s"], get[f"{way}_exchange_s"], target) for way in WAYS]
    device = setting.cluster.device
    both = np.maximum if device.kind == "cuda" else np.add
    forward = both(get["forward_s"] - hidden[0], get["forward_host_s"])
    backward = both(
        get["backward_s"] - hidden[1] + again.seconds, get["backward_host_s"] + again.host_s
    )
    passes = _with_data_axis(get, forward, backward, setting)
    # ranks that a parameter is divided among, on average: experts among fewer than the rest
    shards = get["parameters"] / np.maximum(get["shard_parameters"], 1e-9)
    states = model_state_bytes(
        get["parameters"],
        precision=setting.precision,
        zero=setting.zero,
        dp=np.maximum(shards, 1.0),
        optimizer=setting.optimizer,
        target=target,
    )
    work = working_bytes(
        get["parameters"],
        get["largest_parameters"],
        weight_bytes=DTYPE_BYTES[setting.precision],
        zero=setting.zero,
        dp=replicas,
        target=target,
    )
    # what one backward holds besides: a block computed again, one operator's gradients
    passing = get["transient_bytes"] + np.maximum(again.largest_bytes, get["settled_bytes"])
    return StageCosts(
        forward_s=passes.forward_s,
        backward_s=passes.backward_s,
        weight_s=np.minimum(get["weight_s"], passes.backward_s),
        forward_comm_s=get["forward_comm_s"] + passes.forward_comm_s,
        backward_comm_s=get["backward_comm_s"] + again.comm_s + passes.backward_comm_s,
        measured_s=get["measured_s"],
        interpolated_s=get["interpolated_s"],
        reduce_s=passes.reduce_s,
        optimizer_s=get["shard_s" if setting.zero else "optimizer_s"],
        static_bytes=states + work + get["frozen_bytes"] + passing,
        passing_bytes=passing,
        activation_bytes=get["saved_bytes"] + get["input_bytes"] - again.freed_bytes,
        parameters=get["parameters"],
    )
