"""Peak memory of a device; whether it fits.

At each moment of a step that can be its peak (`costmodel/schedules/held.py`) a device holds the
states and gradients of all its stages, what micro-batches in flight keep and put off, messages, and
what one of its stages holds besides in a pass (`StageMemory`); in the optimizer's step, when none
is in flight, gradients and what the optimizer makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.schedules import Action, Message, Moment, Pipeline, fewest_alike, moments
from meshwright.costmodel.stages.stage import StageCosts
from meshwright.costmodel.stages.stage_memory import A
from meshwright.costmodel.stages.sums import Floats
from meshwright.profiles.cluster import Cluster

PARTS = (
    "weights", "gradients", "optimizer", "activations", "buffers", "transient", "reserved",
)  # fmt: skip
# kinds of bytes of `StageMemory`, but for what is known of blocks alone, and of a micro-batch
HELD = (
    "fixed_bytes", "activation_bytes", "put_off_bytes", "gradient_bytes", "begun_bytes",
    "first_bytes", "later_bytes", "half_bytes", "second_bytes", "step_bytes",
)  # fmt: skip
_BESIDE = (*HELD[1:], "last_bytes", "end_bytes")  # states
NEARLY = 1 - 1e-9  # of a peak's bytes, moments that rounding may have below it


def room_bytes(cluster: Cluster) -> float:
    """Bytes of a device that tensors may take."""
    return cluster.device.usable_bytes


class InFlight(NamedTuple):
    """Micro-batches of a stage at its device's peak, numbers or arrays of the stages' shape:
    `active` from their forward on, in a backward behind others of the step, and those of which a
    part is `put_off` then, if backwards are `split`; those in flight in its `first` backward; and
    where gradients come late, further `versions` of its weights, whether there are some (`copied`),
    and steps whose gradients wait."""

    active: float | Floats
    put_off: float | Floats = 0.0
    first: float | Floats = 0.0
    split: bool | NDArray[np.bool_] = False
    versions: float | Floats = 0.0
    copied: float | Floats = 0.0
    waiting: float | Floats = 0.0

    def late_bytes(self, costs: StageCosts[Floats] | StageCosts[float]) -> float | Floats:
        """Bytes of such versions and gradients."""
        weights = self.versions * costs.version_bytes + self.copied * costs.copied_bytes
        return weights + self.waiting * costs.waiting_bytes


def late_at(pipeline: Pipeline, stage: int) -> tuple[int, int, int]:
    """The last three numbers of `InFlight`, of a stage."""
    further = pipeline.versions(stage) - 1
    return further, int(further > 0), pipeline.waiting_gradients(stage)


def stage_bytes(kept_bytes: A, activation_bytes: A, in_flight: A | float) -> A:
    """Bytes that stages hold with so many micro-batches in flight."""
    return kept_bytes + in_flight * activation_bytes


def used_bytes(
    costs: StageCosts[Floats] | StageCosts[float],
    in_flight: InFlight,
    alike: float | NDArray[Any] = 1,
    passing: StageCosts[Floats] | StageCosts[float] | None = None,
) -> Floats:
    """Bytes of a device with so many equal stages, of which one (`passing`) is in a backward."""
    running, (active, put_off, first, split) = passing or costs, in_flight[:4]
    late = in_flight.late_bytes(costs)
    held = costs.kept_bytes + late + active * costs.activation_bytes + put_off * costs.put_off_bytes
    begun = costs.fixed_bytes + late + first * costs.activation_bytes
    in_half = running.half_bytes + running.communicator_bytes
    in_first = running.first_bytes + running.communicator_bytes
    backward: Floats = np.maximum(
        alike * held + np.where(split, in_half, running.passing_bytes), alike * begun + in_first
    )
    return np.maximum(backward, alike * (costs.stepping_bytes + late))


@overload
def fits(used_bytes: float, room: float) -> bool: ...
@overload
def fits(used_bytes: Floats, room: float) -> NDArray[np.bool_]: ...
def fits(used_bytes: float | Floats, room: float) -> bool | NDArray[np.bool_]:
    """Whether so many bytes fit."""
    return used_bytes <= room


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Most bytes at once, and when: in the instruction (`action`) of a `stage`, the `first` of its
    kind, the `last` one or another, in the backward of its `block`, where that is known; or in the
    optimizer's step, no action. `parts` of them by name (`PARTS`); the rest is transient."""

    nbytes: float
    action: Action | None
    stage: int
    first: bool
    parts: Mapping[str, float]
    last: bool = False
    block: int | None = None

    @property
    def by_part(self) -> dict[str, float]:
        """Bytes by part: `weights` that are computed with, trained or not; `gradients` of
        parameters; states of the `optimizer`; `activations` that micro-batches in flight keep;
        `buffers` of messages; `transient` what is made again, gradients of activations, gathered
        weights and the like; `reserved` for the device's context and communicators, and on a CPU
        the caller's batch."""
        parts = dict.fromkeys(PARTS, 0.0) | {**self.parts}
        rest = self.nbytes - sum(parts.values())
        parts["activations"] += min(rest, 0.0)  # which the backward has let go of until then
        return parts | {"transient": max(rest, 0.0)}


def device_peaks(
    stages: Sequence[StageCosts[float]],
    pipeline: Pipeline,
    *,
    messages: Mapping[tuple[int, int], tuple[float, float]] | None = None,
    reserved: float = 0.0,
) -> list[Peak]:
    """The peak of a device of each device group, where all reserve so many bytes. `messages` are
    the bytes of a micro-batch from one stage to another, where it is sent and where it arrives."""
    edges = None if messages is None else frozenset(messages)
    if not pipeline.record.flushes:
        late = (InFlight(0, 0, 0, False, *late_at(pipeline, k)) for k in range(len(stages)))
        more = (float(at.late_bytes(stage)) for at, stage in zip(late, stages, strict=True))
        both = zip(stages, more, strict=True)
        stages = [replace(stage, fixed_bytes=stage.fixed_bytes + n) for stage, n in both]
    weights = _of_moments(fewest_alike(pipeline), edges)
    values = np.array([[getattr(stage, name) for name in _BESIDE] for stage in stages])
    sizes = np.array([size for edge in sorted(edges or ()) for size in (messages or {})[edge]])
    peaks = []
    of_devices = zip(pipeline.placed, moments(pipeline, edges), weights, strict=True)
    for members, at, (often, sent) in of_devices:
        here = [stages[k] for k in members]
        nbytes = often @ values[[*members]].ravel() + sent @ sizes
        near = np.flatnonzero(nbytes >= nbytes.max() - abs(nbytes.max()) * (1 - NEARLY))
        held = [_at(at[k], members, here, messages or {}) for k in near]
        peak = max(*held, _stepping(members, here, pipeline), key=lambda p: p.nbytes)
        peaks.append(_with_states(peak, here, reserved))
    return peaks


def _at(
    moment: Moment,
    members: Sequence[int],
    stages: Sequence[StageCosts[float]],
    sizes: Mapping[tuple[int, int], tuple[float, float]],
) -> Peak:
    """Bytes of a moment beside the states."""
    acting, begun = members.index(moment.stage), moment.action is Action.BACKWARD_INPUT
    pairs, passes = [*zip(stages, _between(moment), strict=True)], _passing(moment, acting)
    activations = math.fsum(
        n["activation_bytes"] * stage.activation_bytes + n["put_off_bytes"] * stage.put_off_bytes
        for stage, n in pairs
    )
    gradients = math.fsum(
        n["gradient_bytes"] * stage.gradient_bytes + n["begun_bytes"] * stage.begun_bytes
        for stage, n in pairs
    )
    passing = math.fsum(n * getattr(stages[acting], name) for name, n in passes.items())
    sent = math.fsum(sizes[edge][end] for edge, end in map(_size_of, moment.messages))
    return Peak(
        nbytes=activations + gradients + passing + sent,
        action=moment.action,
        stage=moment.stage,
        first=not (moment.begun if begun else moment.later)[acting],
        last=moment.last,
        parts={"activations": activations, "gradients": gradients, "buffers": sent},
    )


def _between(moment: Moment) -> list[dict[str, int]]:
    """Count of each kind of bytes that each stage of the device holds, the running pass apart."""
    counts = zip(moment.active, moment.put_off, moment.later, moment.begun, strict=True)
    return [
        {
            "activation_bytes": n,
            "put_off_bytes": late,
            "gradient_bytes": int(done),
            "begun_bytes": int(begun and not done),
        }
        for n, late, done, begun in counts
    ]


def _passing(moment: Moment, acting: int) -> dict[str, int]:
    """Count of each kind of bytes that the stage in the pass holds for it."""
    last = int(moment.last)
    match moment.action:
        case Action.BACKWARD if moment.later[acting]:
            return {"later_bytes": 1, "last_bytes": last}
        case Action.BACKWARD_INPUT if moment.begun[acting]:
            return {"half_bytes": 1, "last_bytes": last}
        case Action.BACKWARD_WEIGHT:  # it has all gradients
            there = _between(moment)[acting]
            less = {name: -there[name] for name in ("gradient_bytes", "begun_bytes")}
            return {"second_bytes": 1, "end_bytes": last, **less}
    return {"first_bytes": 1}


def held_weights(pipeline: Pipeline) -> Floats:
    """(devices, moments, stages of each, `HELD`): how often a device holds each kind of bytes of
    each of its stages, in the order of the data, at the moments that can be its peak, messages
    apart; the rows beyond are the optimizer's step. Its peak is the most of these sums, and the
    bytes of communicators. Raises ValueError as `device_peaks`."""
    return _held_weights(fewest_alike(pipeline))


@lru_cache(maxsize=256)
def _of_moments(
    pipeline: Pipeline, edges: frozenset[tuple[int, int]] | None
) -> list[tuple[Floats, Floats]]:
    """Per device, how often it holds each kind of bytes of its stages (`_BESIDE`) and each edge's
    two sizes of messages at the moments that can be its peak: (moments, stages · kinds) and
    (moments, edges · 2)."""
    at = {edge: 2 * k for k, edge in enumerate(sorted(edges or ()))}
    rows = []
    for members, of_device in zip(pipeline.placed, moments(pipeline, edges), strict=True):
        sent = np.zeros((len(of_device), 2 * len(at)))
        for row, moment in zip(sent, of_device, strict=True):
            for message in moment.messages:
                edge, there = _size_of(message)
                row[at[edge] + there] += 1
        rows.append((_weights(of_device, members, _BESIDE).reshape(len(of_device), -1), sent))
    return rows


@lru_cache(maxsize=256)
def _held_weights(pipeline: Pipeline) -> Floats:
    placed = pipeline.placed
    rows = [
        _most(_weights([*{q._replace(last=False) for q in of_device}], members))
        for members, of_device in zip(placed, moments(pipeline), strict=True)
    ]
    weights = np.zeros((len(placed), 1 + max(map(len, rows)), len(placed[0]), len(HELD)))
    weights[..., [HELD.index("fixed_bytes"), HELD.index("step_bytes")]] = 1.0
    for of_device, rows_here, members in zip(weights, rows, placed, strict=True):
        of_device[..., HELD.index("activation_bytes")] = [pipeline.left(k) for k in members]
        of_device[: len(rows_here)] = rows_here
    return weights


def _weights(at: Sequence[Moment], members: Sequence[int], kinds: Sequence[str] = HELD) -> Floats:
    """(moments, stages of the device, kinds of bytes)."""
    weights = np.zeros((len(at), len(members), len(kinds)))
    later, begun = (np.array([getattr(q, name) for q in at]) for name in ("later", "begun"))
    columns = {
        "fixed_bytes": 1.0,
        "activation_bytes": [q.active for q in at],
        "put_off_bytes": [q.put_off for q in at],
        "gradient_bytes": later,
        "begun_bytes": begun & ~later,
    }
    for name in kinds:
        weights[..., kinds.index(name)] = columns.get(name, 0.0)
    for row, moment in zip(weights, at, strict=True):
        acting = members.index(moment.stage)
        for name, n in _passing(moment, acting).items():
            if name in kinds:
                row[acting, kinds.index(name)] += n
    return weights


def _most(rows: Floats) -> Floats:
    """Rows that hold no less of something than each other one."""
    flat = np.unique(rows.reshape(len(rows), -1), axis=0)
    needed = np.ones(len(flat), dtype=bool)
    for k in flat.sum(axis=1).argsort():  # the least first
        needed[k] = False
        needed[k] = not (flat[needed] >= flat[k]).all(axis=1).any()
    most: Floats = flat[needed].reshape(-1, *rows.shape[1:])
    return most


def _size_of(message: Message) -> tuple[tuple[int, int], bool]:
    """The edge of a message, and at which of its ends it is: gradients go the other way."""
    stage, action, peer = message
    forward = action in (Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
    sends = action in (Action.SEND_ACTIVATION, Action.SEND_GRADIENT)
    edge = (stage, peer) if forward is sends else (peer, stage)
    return edge, edge[0] != stage


def _stepping(
    members: Sequence[int], stages: Sequence[StageCosts[float]], pipeline: Pipeline
) -> Peak:
    """Bytes of the optimizer's step beside the states; with passes that are left to the next step,
    whose gradients are on their way while those that are read are among the waiting ones."""
    nbytes = math.fsum(stage.step_bytes for stage in stages)
    reads = [min(stage.gradient_bytes, stage.step_bytes) for stage in stages]
    activations, made = 0.0, 0.0
    for k, stage, read in zip(members, stages, reads, strict=True):
        left = pipeline.left(k)
        activations += left * stage.activation_bytes
        if left % pipeline.num_microbatches:
            made += stage.gradient_bytes - read
    return Peak(
        nbytes=nbytes + activations + made,
        action=None,
        stage=min(members),
        first=False,
        parts={"gradients": math.fsum(reads) + made, "activations": activations},
    )


def _with_states(peak: Peak, stages: Sequence[StageCosts[float]], reserved: float) -> Peak:
    fixed = math.fsum(stage.fixed_bytes for stage in stages)
    weights = math.fsum(stage.weight_bytes for stage in stages)
    reserved += max(stage.communicator_bytes for stage in stages)
    states = {"weights": weights, "optimizer": fixed - weights, "reserved": reserved}
    return replace(peak, nbytes=peak.nbytes + fixed + reserved, parts={**peak.parts, **states})
