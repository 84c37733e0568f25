"""The pipeline schedules: one record each, with all that search, price, builder and checks ask.

To add a schedule, write its order function (`costmodel.schedules.orders`) and its entry here.

    schedule          stages of device d      micro-batches in flight, of all its stages, at most
    gpipe             d                       m
    1f1b              d                       p - d
    eager_1f1b        d                       2(p - d) - 1
    zb_h1             d                       p
    zb_h2             d                       2p - 1
    interleaved_1f1b  d, d+p, .., d+(v-1)p    (v + 1)p - 1 - 2d
    zb_v              d, 2p-1-d               2p
    dualpipe_v        d, 2p-1-d               2p + 1

with m micro-batches, p devices and v stages per device. A micro-batch is in flight on a stage from
its F to the end of its backward. Stages of which a device owns v are v times smaller than if it
owned one, so the last three hold the activations of p + (p-1-2d)/v, p and p + 1/2 micro-batches on
a whole device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.schedules import orders
from meshwright.costmodel.schedules.orders import Compute, DeviceOrder
from meshwright.profiles.inputs import MeshwrightError, shown

Floats: TypeAlias = NDArray[np.float64]
Stages: TypeAlias = tuple[int, ...]

# per device, that the search tries where a schedule takes any number: those of published plans
VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8, 10, 12, 16)


class PipelineShape(NamedTuple):
    """m micro-batches on p devices with v stages each."""

    m: int
    p: int
    v: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule: placement and order of its stages, and how estimates treat it."""

    order: Callable[[DeviceOrder, Sequence[int], int, int, int], None]
    """(order, stages of the device, d, p, m): appends the computes of device d."""
    placement: Callable[[int, int], tuple[Stages, ...]]
    """(number of stages, p): the stages of each device, in the order of the data."""
    stages_per_device: int | None
    """None where any number is legal."""
    splits_backward: bool
    """Whether some backwards are run as I and W."""
    on_request: bool
    """Whether the search leaves it out unless it is the only schedule asked for."""
    in_flight: Callable[[int, int, int], int] | None
    """(stage, p, m): micro-batches in flight on a stage at most, before the minimum with m, for one
    stage per device; None where they are counted in the order, which must then repeat itself every
    p micro-batches from 2 · stages + p on."""
    in_flight_together: Callable[[int, PipelineShape], int] | None
    """(device, shape): micro-batches in flight of all stages of a device together at most, for m a
    multiple of p; None where they are counted in the order."""
    fill_s: Callable[[Floats, Floats, Floats, PipelineShape], Floats]
    """(F, B, W seconds of a stage, shape): seconds that filling and draining adds for each device
    but one, were all stages alike. Of a split backward W is a part of B."""
    bound_s: Callable[[float, float, int, int], float]
    """(seconds per micro-batch of all stages, of the slowest device, m, p): lower bound on the
    step, in seconds."""
    standard: bool
    """Whether every training framework has it: preferred where another gains next to nothing."""
    hides_sends: bool
    """Whether enough micro-batches are in flight for sends to run beside computes."""
    staggered: bool
    """Whether a device ends a step as many forwards later as it begins it, so that nothing waits
    for the first one where steps are validated afterwards."""

    @property
    def unequal_meshes(self) -> bool:
        """Whether stages may have different meshes: those of one device share its ranks."""
        return self.stages_per_device == 1

    @property
    def recomputed(self) -> tuple[str, ...] | None:
        """The recompute policies that blocks may have, None for all: what I computes again, W would
        have to keep; what is gathered again, W gathers."""
        return ("none", "regather") if self.splits_backward else None

    def divides(self, zero: int) -> bool:
        """Whether the search combines it with a ZeRO stage: with a split backward, ZeRO-2 and 3
        would gather weights twice and scatter gradients early."""
        return zero < 2 or not self.splits_backward

    def offered(self, virtual_stages: int | None) -> tuple[int, ...]:
        """Stages per device to try, where the user asked for so many (None: left free)."""
        if self.stages_per_device is None:
            return VIRTUAL_STAGES if virtual_stages is None else (virtual_stages,)
        return (self.stages_per_device,) if virtual_stages in (None, self.stages_per_device) else ()


# --- placements ---


def _in_turn(num_stages: int, num_devices: int) -> tuple[Stages, ...]:
    """Stage k on device k mod p."""
    return tuple(tuple(range(d, num_stages, num_devices)) for d in range(num_devices))


def _v_shaped(num_stages: int, num_devices: int) -> tuple[Stages, ...]:
    """There and back again: stage k on device min(k, 2p - 1 - k)."""
    return tuple((d, num_stages - 1 - d) for d in range(num_devices))


def _together_interleaved(device: int, shape: PipelineShape) -> int:
    """The forwards of the warm-up and the next one."""
    m, p, v = shape
    return min(m * v, 2 * (p - 1 - device) + (v - 1) * p + 1)


# --- fills: seconds that filling and draining adds for each device but one ---


def _fill_whole(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    return f + b


def _fill_interleaved(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """One pass through a stage of each device; where the last round of micro-batches leaves devices
    out, as many turns of the other stages are idle."""
    m, p, v = shape
    missing = -m % p * (v - 1) / max(1, p - 1)
    return f + b + missing * (f + b if m < p else np.maximum(f, b))


def _fill_less_weights(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """W runs where the device would wait, once in the warm-up and once in the cool-down; with few
    micro-batches part of it."""
    once = min(1.0, (shape.m - 1) / max(1, shape.p - 1))
    return np.maximum(f + b - (1 + once) * w, 0.0)


def _fill_v_shaped(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """From two passes less W with one micro-batch to a backward's first part with p and more."""
    early = max(0.0, 1.0 - (shape.m - 1) / max(1, shape.p - 1))
    least = np.maximum(b - w + (f - w) / 2, 0.0)
    return least + early * np.maximum(2 * (f + b - w) - least, 0.0)


def _fill_less_weights_twice(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """W runs instead of waiting twice as often, until waiting for the first F alone is left: all
    devices start and end a step together."""
    often = min(2.0, (shape.m - 1) / max(1, shape.p - 1))
    return np.maximum(f + b - (1 + often) * w, f)


# --- lower bounds on the step ---


def _bound_of_slowest(work_s: float, slowest_s: float, m: int, p: int) -> float:
    """T >= m · the slowest device."""
    return m * slowest_s


def _bound_of_chain(work_s: float, slowest_s: float, m: int, p: int) -> float:
    """Stage k starts after one micro-batch went forward through all stages before it, which then
    wait for its way back, and works m times: T >= t₁ + .. + t_{k-1} + m·t_k for every k. The least
    T for which such t add up to W, the work, is where all of these hold with equality:

        T  >=  W / (1 - (1 - 1/m)^p)
    """
    return max(m * slowest_s, work_s / (1 - (1 - 1 / m) ** p))


_TABLE: dict[str, Schedule] = {
    "gpipe": Schedule(
        order=orders.gpipe,
        placement=_in_turn,
        stages_per_device=1,
        splits_backward=False,
        on_request=False,
        in_flight=lambda stage, p, m: m,
        in_flight_together=None,
        fill_s=_fill_whole,
        bound_s=_bound_of_chain,
        standard=True,
        hides_sends=True,
        staggered=False,
    ),
    "1f1b": Schedule(
        order=orders.one_f_one_b,
        placement=_in_turn,
        stages_per_device=1,
        splits_backward=False,
        on_request=False,
        in_flight=lambda stage, p, m: p - stage,
        in_flight_together=None,
        fill_s=_fill_whole,
        bound_s=_bound_of_chain,
        standard=True,
        hides_sends=False,
        staggered=False,
    ),
    "eager_1f1b": Schedule(
        order=orders.eager_1f1b,
        placement=_in_turn,
        stages_per_device=1,
        splits_backward=False,
        on_request=False,
        in_flight=lambda stage, p, m: 2 * (p - stage) - 1,
        in_flight_together=None,
        fill_s=_fill_whole,
        bound_s=_bound_of_chain,
        standard=False,
        hides_sends=True,
        staggered=False,
    ),
    "interleaved_1f1b": Schedule(
        order=orders.interleaved_1f1b,
        placement=_in_turn,
        stages_per_device=None,
        splits_backward=False,
        on_request=False,
        in_flight=None,
        in_flight_together=_together_interleaved,
        fill_s=_fill_interleaved,
        bound_s=_bound_of_slowest,
        standard=True,
        hides_sends=True,
        staggered=False,
    ),
    "zb_h1": Schedule(
        order=orders.zb_h1,
        placement=_in_turn,
        stages_per_device=1,
        splits_backward=True,
        on_request=False,
        in_flight=lambda stage, p, m: p,
        in_flight_together=None,
        fill_s=_fill_less_weights,
        bound_s=_bound_of_slowest,
        standard=False,
        hides_sends=True,
        staggered=False,
    ),
    "zb_h2": Schedule(
        order=orders.zb_h2,
        placement=_in_turn,
        stages_per_device=1,
        splits_backward=True,
        on_request=False,
        in_flight=lambda stage, p, m: 2 * p - 1,
        in_flight_together=None,
        fill_s=_fill_less_weights_twice,
        bound_s=_bound_of_slowest,
        standard=False,
        hides_sends=True,
        staggered=True,
    ),
    "zb_v": Schedule(
        order=orders.zb_v,
        placement=_v_shaped,
        stages_per_device=2,
        splits_backward=True,
        on_request=False,
        in_flight=None,
        in_flight_together=None,
        fill_s=_fill_v_shaped,
        bound_s=_bound_of_slowest,
        standard=False,
        hides_sends=True,
        staggered=True,
    ),
    "dualpipe_v": Schedule(
        order=orders.dualpipe_v,
        placement=_v_shaped,
        stages_per_device=2,
        splits_backward=True,
        on_request=True,  # gains on zb_v only where communication hides in another's computation
        in_flight=None,
        in_flight_together=None,
        fill_s=_fill_less_weights,
        bound_s=_bound_of_slowest,
        standard=False,
        hides_sends=True,
        staggered=False,
    ),
}
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_TABLE)


def stages_of_devices(
    name: str, *, num_stages: int, num_devices: int | None = None
) -> tuple[Stages, ...]:
    """The stages each device owns, in the order of the data.

    `num_devices` may be left out where the schedule fixes the number of stages per device. Raises
    ValueError for an unknown schedule, a count below 1, or counts that the schedule cannot place.
    """
    schedule = _known(name)
    check_count("num_stages", num_stages)
    each = schedule.stages_per_device
    if num_devices is None:
        if each is None:
            raise MeshwrightError(
                f"={name!r} with num_stages={num_stages} needs num_devices",
                place="schedule",
                legal="any divisor of num_stages",
            )
        num_devices = max(1, num_stages // each)
    check_count("num_devices", num_devices)
    if num_stages % num_devices or each not in (None, num_stages // num_devices):
        per_device = "a whole number of" if each is None else str(each)
        raise MeshwrightError(
            f"={name!r} places {per_device} stages on each device, which num_stages={num_stages} "
            f"on num_devices={num_devices} are not",
            place="schedule",
            legal=f"num_stages={per_device * num_devices}",
            way_out="change one of the two",
        )
    return schedule.placement(num_stages, num_devices)


@lru_cache(maxsize=64)
def compute_orders(
    name: str, *, num_stages: int, num_microbatches: int, num_devices: int | None = None
) -> tuple[tuple[Compute, ...], ...]:
    """The computes of each device in one training step, in order. Raises ValueError as
    `stages_of_devices`, and for less than one micro-batch."""
    placed = stages_of_devices(name, num_stages=num_stages, num_devices=num_devices)
    check_count("num_microbatches", num_microbatches)
    found = []
    for device, stages in enumerate(placed):
        order = DeviceOrder()
        SCHEDULES[name].order(order, stages, device, len(placed), num_microbatches)
        found.append(tuple(c for c in order.computes if c.microbatch < num_microbatches))
    return tuple(found)


def check_count(argument: str, value: int) -> None:
    """Raise ValueError for a count below 1."""
    if value < 1:
        raise MeshwrightError(f"={value}", place=argument, legal="a whole number, 1 or more")


def _known(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise MeshwrightError(f"={shown(name)}", place="schedule", legal=SCHEDULES)
    return SCHEDULES[name]
