"""Bytes that a device holds at its peak, and whether they fit: the one place that says so.

At each moment of a step that can be its peak (`costmodel/schedules/held.py`) a device holds the
states of all its stages and the gradients that they have, what micro-batches in flight keep and
put off, messages, and what one of its stages holds besides in a pass (`StageMemory`); in the
optimizer's step, when none is in flight, gradients and what the optimizer makes.
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
from meshwright.costmodel.stages.memory import A
from meshwright.costmodel.stages.stage import StageCosts
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
    part is `put_off` then, if backwards are `split`; those in flight in its `first` backward."""

    active: float | Floats
    put_off: float | Floats = 0.0
    first: float | Floats = 0.0
    split: bool | NDArray[np.bool_] = False


def stage_bytes(kept_bytes: A, activation_bytes: A, in_flight: A | float) -> A:
    """Bytes that stages hold with so many micro-batches in flight."""
    return kept_bytes + in_flight * activation_bytes


def used_bytes(
    costs: StageCosts[Floats] | StageCosts[float],
    in_flight: InFlight,
    alike: float | NDArray[Any] = 1,
    passing: StageCosts[Floats] | StageCosts[float] | None = None,
) -> Floats:
    """Bytes of a device with so many stages that are alike, of which one is in a backward, that of
    `passing` if it is given."""
    own, (active, put_off, first, split) = passing or costs, in_flight
    held = costs.kept_bytes + active * costs.activation_bytes + put_off * costs.put_off_bytes
    begun = costs.fixed_bytes + first * costs.activation_bytes
    in_half = own.half_bytes + own.communicator_bytes
    in_first = own.first_bytes + own.communicator_bytes
    found: Floats = np.maximum(
        alike * held + np.where(split, in_half, own.passing_bytes), alike * begun + in_first
    )
    return np.maximum(found, alike * costs.stepping_bytes)


@overload
def fits(used_bytes: float, room: float) -> bool: ...
@overload
def fits(used_bytes: Floats, room: float) -> NDArray[np.bool_]: ...
def fits(used_bytes: float | Floats, room: float) -> bool | NDArray[np.bool_]:
    """Whether so many bytes fit."""
    return used_bytes <= room


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes at once, and when: in the instruction (`action`) of a `stage`, the `first` of
    its kind, the `last` one or another, in the backward of its `block` of that number, where that
    is known; or in the optimizer's step, no action. `parts` of them by name (`PARTS`); the rest is
    there in passing."""

    nbytes: float
    action: Action | None
    stage: int
    first: bool
    parts: Mapping[str, float]
    last: bool = False
    block: int | None = None

    @property
    def by_part(self) -> dict[str, float]:
        """Bytes of all parts, whose sum they are.

        `weights` that are computed with, trained or not; `gradients` of parameters; states of the
        `optimizer`; `activations` that micro-batches in flight keep; `buffers` of messages; in
        passing (`transient`) what is made again, the gradients of activations, gathered weights and
        the like; `reserved` for the device's context and communicators, and on a CPU the caller's
        batch.
        """
        found = dict.fromkeys(PARTS, 0.0) | {**self.parts}
        rest = self.nbytes - sum(found.values())
        found["activations"] += min(rest, 0.0)  # which the backward has let go of until then
        return found | {"transient": max(rest, 0.0)}


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
    found = moments(pipeline, edges)
    weights = _of_moments(fewest_alike(pipeline), edges)
    values = np.array([[getattr(stage, name) for name in _BESIDE] for stage in stages])
    sizes = np.array([size for edge in sorted(edges or ()) for size in (messages or {})[edge]])
    peaks = []
    for members, own, (often, sent) in zip(pipeline.placed, found, weights, strict=True):
        here = [stages[k] for k in members]
        nbytes = often @ values[[*members]].ravel() + sent @ sizes
        near = np.flatnonzero(nbytes >= nbytes.max() - abs(nbytes.max()) * (1 - NEARLY))
        held = [_at(own[k], members, here, messages or {}) for k in near]
        peak = max(*held, _stepping(members, here), key=lambda each: each.nbytes)
        peaks.append(_with_states(peak, here, reserved))
    return peaks


def _at(
    moment: Moment,
    members: Sequence[int],
    stages: Sequence[StageCosts[float]],
    sizes: Mapping[tuple[int, int], tuple[float, float]],
) -> Peak:
    """What is held in a moment beside the states."""
    own = members.index(moment.stage)
    between, passes = _between(moment), _passing(moment, own)
    activations = math.fsum(
        n["activation_bytes"] * each.activation_bytes + n["put_off_bytes"] * each.put_off_bytes
        for each, n in zip(stages, between, strict=True)
    )
    gradients = math.fsum(
        n["gradient_bytes"] * each.gradient_bytes + n["begun_bytes"] * each.begun_bytes
        for each, n in zip(stages, between, strict=True)
    )
    passing = math.fsum(n * getattr(stages[own], name) for name, n in passes.items())
    sent = math.fsum(_message_bytes(each, sizes) for each in moment.messages)
    return Peak(
        nbytes=activations + gradients + passing + sent,
        action=moment.action,
        stage=moment.stage,
        first=not (moment.begun if moment.action is Action.BACKWARD_INPUT else moment.later)[own],
        last=moment.last,
        parts={"activations": activations, "gradients": gradients, "buffers": sent},
    )


def _between(moment: Moment) -> list[dict[str, int]]:
    """How often each stage of the device holds its bytes of a kind in a moment, a pass apart."""
    return [
        {
            "activation_bytes": n,
            "put_off_bytes": late,
            "gradient_bytes": int(done),
            "begun_bytes": int(begun and not done),
        }
        for n, late, done, begun in zip(
            moment.active, moment.put_off, moment.later, moment.begun, strict=True
        )
    ]


def _passing(moment: Moment, own: int) -> dict[str, int]:
    """The same of the stage that is in the pass, number `own` of the device's."""
    last = int(moment.last)
    match moment.action:
        case Action.BACKWARD if moment.later[own]:
            return {"later_bytes": 1, "last_bytes": last}
        case Action.BACKWARD_INPUT if moment.begun[own]:
            return {"half_bytes": 1, "last_bytes": last}
        case Action.BACKWARD_WEIGHT:  # it has all gradients
            there = _between(moment)[own]
            less = {name: -there[name] for name in ("gradient_bytes", "begun_bytes")}
            return {"second_bytes": 1, "end_bytes": last, **less}
    return {"first_bytes": 1}


def held_weights(pipeline: Pipeline) -> Floats:
    """(devices, moments, stages of each, `HELD`): how often a device holds each kind of bytes of
    each of its stages, in the order of the data, at the moments that can be its peak, messages
    apart; those that are left are the optimizer's step. Its peak is the most of these sums, and the
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
    for members, own in zip(pipeline.placed, moments(pipeline, edges), strict=True):
        sent = np.zeros((len(own), 2 * len(at)))
        for row, moment in zip(sent, own, strict=True):
            for message in moment.messages:
                edge, there = _size_of(message)
                row[at[edge] + there] += 1
        rows.append((_weights(own, members, _BESIDE).reshape(len(own), -1), sent))
    return rows


@lru_cache(maxsize=256)
def _held_weights(pipeline: Pipeline) -> Floats:
    placed = pipeline.placed
    rows = [
        _most(_weights([*{q._replace(last=False) for q in own}], members))
        for members, own in zip(placed, moments(pipeline), strict=True)
    ]
    weights = np.zeros((len(placed), 1 + max(map(len, rows)), len(placed[0]), len(HELD)))
    weights[..., [HELD.index("fixed_bytes"), HELD.index("step_bytes")]] = 1.0
    for own, there in zip(weights, rows, strict=True):
        own[: len(there)] = there
    return weights


def _weights(
    found: Sequence[Moment], members: Sequence[int], kinds: Sequence[str] = HELD
) -> Floats:
    """(moments, stages of the device, kinds of bytes)."""
    weights = np.zeros((len(found), len(members), len(kinds)))
    later, begun = (np.array([getattr(q, name) for q in found]) for name in ("later", "begun"))
    columns = {
        "fixed_bytes": 1.0,
        "activation_bytes": [q.active for q in found],
        "put_off_bytes": [q.put_off for q in found],
        "gradient_bytes": later,
        "begun_bytes": begun & ~later,
    }
    for name in kinds:
        weights[..., kinds.index(name)] = columns.get(name, 0.0)
    for own, moment in zip(weights, found, strict=True):
        acting = members.index(moment.stage)
        for name, n in _passing(moment, acting).items():
            if name in kinds:
                own[acting, kinds.index(name)] += n
    return weights


def _most(rows: Floats) -> Floats:
    """Those of moments that hold no less of something than each other one."""
    flat = np.unique(rows.reshape(len(rows), -1), axis=0)
    kept = np.ones(len(flat), dtype=bool)
    for k in flat.sum(axis=1).argsort():  # the least first
        kept[k] = False
        kept[k] = not (flat[kept] >= flat[k]).all(axis=1).any()
    found: Floats = flat[kept].reshape(-1, *rows.shape[1:])
    return found


def _message_bytes(message: Message, sizes: Mapping[tuple[int, int], tuple[float, float]]) -> float:
    """Bytes of what an instruction sends or receives."""
    edge, end = _size_of(message)
    return sizes[edge][end]


def _size_of(message: Message) -> tuple[tuple[int, int], bool]:
    """The edge of a message, and at which of its ends it is: gradients go the other way."""
    stage, action, peer = message
    forward = action in (Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
    sends = action in (Action.SEND_ACTIVATION, Action.SEND_GRADIENT)
    edge = (stage, peer) if forward is sends else (peer, stage)
    return edge, edge[0] != stage


def _stepping(members: Sequence[int], stages: Sequence[StageCosts[float]]) -> Peak:
    """What is held in the optimizer's step beside the states."""
    nbytes = math.fsum(each.step_bytes for each in stages)
    read = math.fsum(min(each.gradient_bytes, each.step_bytes) for each in stages)
    return Peak(
        nbytes=nbytes, action=None, stage=min(members), first=False, parts={"gradients": read}
    )


def _with_states(peak: Peak, stages: Sequence[StageCosts[float]], reserved: float) -> Peak:
    fixed = math.fsum(each.fixed_bytes for each in stages)
    weights = math.fsum(each.weight_bytes for each in stages)
    reserved += max(each.communicator_bytes for each in stages)
    states = {"weights": weights, "optimizer": fixed - weights, "reserved": reserved}
    return replace(peak, nbytes=peak.nbytes + fixed + reserved, parts={**peak.parts, **states})
