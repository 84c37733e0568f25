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
    chimera           d, 2p-1-d               p
    dualpipe          d, 2p-1-d               p + 1
    pipedream_2bw     d                       p - d, some of the step before
    pipedream         d                       p - d, some of steps before

with m micro-batches, p devices and v stages per device; of c token slices each, c - 1 more slices,
but gpipe. A micro-batch is in flight on a stage from its F to the end of its backward. Stages of
which a device owns v are v times smaller than if it owned one, so the last three hold the
activations of p + (p-1-2d)/v, p and p + 1/2 micro-batches on a whole device.

The last two hold two copies of the model (`copies`): stages 0 to p-1 are the first, p to 2p-1 the
second, whose stage p+j has the blocks of stage j. Devices run them in opposite directions, so stage
p+j lies on device p-1-j: what fills the one pipeline drains the other. The first half of the
micro-batches goes through the first copy, the second half through the second, and at the end the
gradients of both are summed. Their stages are as large as if a device owned one, so they hold the
activations of p and p + 1 micro-batches on a whole device.

The two PipeDreams never flush: a step leaves p-1-d backwards of device d to the following ones,
where micro-batches are counted from the step's own first one, so that theirs are below 0
(docs/reference/stale.md).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from meshwright.costmodel.schedules import fills, orders
from meshwright.costmodel.schedules.fills import Floats, PipelineShape
from meshwright.costmodel.schedules.orders import Compute, DeviceOrder, of_all
from meshwright.profiles.inputs import MeshwrightError

Stages: TypeAlias = tuple[int, ...]

# per device, that the search tries where a schedule takes any number: those of published plans
VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8, 10, 12, 16)


class ScheduleError(MeshwrightError):
    """A schedule, or its stages, devices and micro-batches, that is no pipeline."""

    CODE = "MW206"
    PLACE = "pipeline schedule"
    LEGAL = "streams that compute each stage once and receive what is sent, with times for each"
    WAY_OUT = "take a schedule of SCHEDULES, or mend the streams"


# --- placements ---


def _in_turn(num_stages: int, num_devices: int) -> tuple[Stages, ...]:
    """Stage k on device k mod p."""
    return tuple(tuple(range(d, num_stages, num_devices)) for d in range(num_devices))


def _v_shaped(num_stages: int, num_devices: int) -> tuple[Stages, ...]:
    """There and back again: stage k on device min(k, 2p - 1 - k)."""
    return tuple((d, num_stages - 1 - d) for d in range(num_devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule: placement and order of its stages, and how estimates treat it."""

    order: Callable[[DeviceOrder, Sequence[int], int, int, int], None]
    """(order, stages of the device, d, p, m): appends the computes of device d."""
    fill_s: Callable[[Floats, Floats, Floats, PipelineShape], Floats]
    """(F, B, W seconds of a stage, shape): seconds that filling and draining adds for each device
    but one, were all stages alike. Of a split backward W is a part of B."""
    bound_s: Callable[[float, float, int, int], float] = fills.bound_of_slowest
    """(seconds per micro-batch of all stages, of the slowest device, m, p): lower bound on the
    step, in seconds."""
    placement: Callable[[int, int], tuple[Stages, ...]] = _in_turn
    """(number of stages, p): the stages of each device, in the order of the data."""
    stages_per_device: int | None = 1
    """None where any number is legal."""
    in_flight: Callable[[int, int, int], int] | None = None
    """(stage, p, m): micro-batches in flight on a stage at most, before the minimum with m, for one
    stage per device; None where they are counted in the order, which must then repeat itself every
    p micro-batches from 5 p on."""
    splits_backward: bool = False
    """Whether some backwards are run as I and W."""
    on_request: bool = False
    """Whether the search leaves it out unless it is the only schedule asked for."""
    standard: bool = False
    """Whether every training framework has it: preferred where another gains next to nothing."""
    hides_sends: bool = True
    """Whether enough micro-batches are in flight for sends to run beside computes."""
    staggered: bool = False
    """Whether a device ends a step as many forwards later as it begins it, so that nothing waits
    for the first one where steps are validated afterwards."""
    sliced: bool = False
    """Whether micro-batches may go through as token slices: backwards come from the last slice to
    the first, which an order must leave room for (`DeviceOrder.slices`)."""
    branched: bool = False
    """Whether branches may lie apart: of a stage its order asks no more than how many device groups
    are on the longest way to it and from it, p in all."""
    late: Callable[[int, int, int], int] | None = None
    """(stage, p, m): steps by which the gradients of a stage come late, where a step leaves
    backwards to those behind it; None where it ends with the last one."""
    copies: int = 1
    """Of the model: stages of one copy after those of the other, each with an equal share of the
    micro-batches."""

    @property
    def unequal_meshes(self) -> bool:
        """Whether stages may have different meshes: those of one device share its ranks."""
        return self.stages_per_device == 1

    @property
    def recomputed(self) -> tuple[str, ...] | None:
        """The recompute policies that blocks may have, None for all: what I computes again, W would
        have to keep; what is gathered again, W gathers."""
        return ("none", "regather") if self.splits_backward else None

    @property
    def gathers(self) -> bool:
        """Whether it runs with ZeRO-3: torch loses gradients where the backward is split; of two
        copies, and of versions of the weights, it is not built."""
        return not self.splits_backward and self.copies == 1 and self.flushes

    def pipelines(self, num_stages: int) -> tuple[range, ...]:
        """The stages of each copy of the model."""
        per_copy = num_stages // self.copies
        return tuple(range(k * per_copy, (k + 1) * per_copy) for k in range(self.copies))

    def runs(self, m: int, p: int) -> bool:
        """Whether m micro-batches and p devices divide among the copies, and gradients are whole
        when they are due."""
        in_time = self.flushes or (p > 1 and math.ceil((p - 1) / m) <= self.staleness(m, p))
        return m % self.copies == 0 and p % self.copies == 0 and in_time

    @property
    def flushes(self) -> bool:
        """Whether a step ends with its last backward."""
        return self.late is None

    def staleness(self, m: int, p: int) -> int:
        """Steps by which gradients come late, on the stage where they do most."""
        return 0 if self.late is None else self.late(0, p, m)

    def is_evenly_late(self, m: int, p: int) -> bool:
        """Whether gradients come late, by as many steps on every stage."""
        return self.late is not None and len({self.late(k, p, m) for k in range(p)}) == 1

    def offered(self, virtual_stages: int | None) -> tuple[int, ...]:
        """Stages per device to try; `virtual_stages` as the user asked, None: left free."""
        if self.stages_per_device is None:
            return VIRTUAL_STAGES if virtual_stages is None else (virtual_stages,)
        return (self.stages_per_device,) if virtual_stages in (None, self.stages_per_device) else ()


_TABLE: dict[str, Schedule] = {
    "gpipe": Schedule(
        order=orders.gpipe,
        in_flight=lambda stage, p, m: m,
        sliced=True,
        branched=True,
        fill_s=fills.fill_whole,
        bound_s=fills.bound_of_chain,
        standard=True,
    ),
    "1f1b": Schedule(
        order=orders.one_f_one_b,
        in_flight=lambda stage, p, m: p - stage,
        sliced=True,
        branched=True,
        fill_s=fills.fill_whole,
        bound_s=fills.bound_of_chain,
        standard=True,
        hides_sends=False,
    ),
    "eager_1f1b": Schedule(
        order=orders.eager_1f1b,
        in_flight=lambda stage, p, m: 2 * (p - stage) - 1,
        sliced=True,
        branched=True,
        fill_s=fills.fill_whole,
        bound_s=fills.bound_of_chain,
    ),
    "interleaved_1f1b": Schedule(
        order=orders.interleaved_1f1b,
        stages_per_device=None,
        sliced=True,
        fill_s=fills.fill_interleaved,
        standard=True,
    ),
    "zb_h1": Schedule(
        order=orders.zb_h1,
        splits_backward=True,
        in_flight=lambda stage, p, m: p,
        sliced=True,
        branched=True,
        fill_s=fills.fill_less_weights,
    ),
    "zb_h2": Schedule(
        order=orders.zb_h2,
        splits_backward=True,
        in_flight=lambda stage, p, m: 2 * p - 1,
        sliced=True,
        branched=True,
        fill_s=fills.fill_less_weights_twice,
        staggered=True,
    ),
    "zb_v": Schedule(
        order=orders.zb_v,
        placement=_v_shaped,
        stages_per_device=2,
        splits_backward=True,
        fill_s=fills.fill_v_shaped,
        staggered=True,
    ),
    "dualpipe_v": Schedule(
        order=orders.dualpipe_v,
        placement=_v_shaped,
        stages_per_device=2,
        splits_backward=True,
        on_request=True,  # gains on zb_v only where communication hides in another's computation
        fill_s=fills.fill_less_weights,
    ),
    "chimera": Schedule(
        order=orders.chimera,
        placement=_v_shaped,
        stages_per_device=2,
        on_request=True,  # holds weights, gradients and states twice
        fill_s=fills.fill_chimera,
        hides_sends=False,
        copies=2,
    ),
    "dualpipe": Schedule(
        order=orders.dualpipe,
        placement=_v_shaped,
        stages_per_device=2,
        splits_backward=True,
        on_request=True,  # holds weights, gradients and states twice
        fill_s=fills.fill_dualpipe,
        copies=2,
    ),
    "pipedream_2bw": Schedule(
        order=orders.pipedream,
        in_flight=lambda stage, p, m: p - stage,
        fill_s=fills.fill_never,
        hides_sends=False,
        late=lambda stage, p, m: 1,
    ),
    "pipedream": Schedule(
        order=orders.pipedream,
        in_flight=lambda stage, p, m: p - stage,
        fill_s=fills.fill_never,
        hides_sends=False,
        late=lambda stage, p, m: math.ceil((p - 1 - stage) / m),
    ),
}
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_TABLE)


class Pipeline(NamedTuple):
    """Micro-batches through stages on devices (groups of them), in a schedule's order; where each
    goes through as `slices`, these are what `num_microbatches` counts."""

    schedule: str
    num_stages: int
    num_microbatches: int
    num_devices: int
    slices: int = 1
    depths: tuple[int, ...] = ()
    """Of each stage the device groups on the longest way from it to the end, its own included,
    where branches of the model lie apart; else stages follow each other."""
    groups: tuple[int, ...] = ()
    """The device of each stage, where branches lie apart."""

    @property
    def record(self) -> Schedule:
        """Record of its schedule."""
        return SCHEDULES[self.schedule]

    @property
    def length(self) -> int:
        """Devices that a micro-batch goes through one after the other, at most."""
        return max(self.depths, default=self.num_devices)

    @property
    def each(self) -> int:
        """Stages on a device, at most."""
        return max(map(self.groups.count, self.groups), default=self.num_stages // self.num_devices)

    @property
    def round(self) -> int:
        """Micro-batches, or slices, after which its order repeats itself."""
        return orders.round_of(self.num_devices, self.slices)

    def most_in_flight(self, stage: int) -> int | None:
        """`Schedule.in_flight` on a stage, of slices too; None where they are counted."""
        if (self.each > 1 and not self.depths) or self.record.in_flight is None:
            return None
        place = self.length - self.depths[stage] if self.depths else stage
        count = self.record.in_flight(place, self.length, self.num_microbatches)
        return count + self.slices - 1

    @property
    def staleness(self) -> int:
        """Steps by which gradients come late, on the stage where they do most."""
        return self.record.staleness(self.num_microbatches, self.num_devices)

    def left(self, stage: int) -> int:
        """Micro-batches of a stage whose backwards a step leaves to those behind it."""
        return 0 if self.record.flushes else self.num_stages - 1 - stage

    def versions(self, stage: int) -> int:
        """Versions of a stage's weights that forwards under way have read."""
        return 1 + math.ceil(self.left(stage) / self.num_microbatches)

    def late(self, stage: int) -> int:
        """Steps by which the gradients of a stage come late."""
        late = self.record.late
        return 0 if late is None else late(stage, self.num_devices, self.num_microbatches)

    def waiting_gradients(self, stage: int) -> int:
        """Steps of a stage whose gradients are whole, and wait while others are made."""
        return self.late(stage) - self.left(stage) // self.num_microbatches

    @property
    def shape(self) -> PipelineShape:
        """Its numbers as `fills.py` reads them."""
        return PipelineShape(self.num_microbatches, self.length, 1 if self.depths else self.each)

    @property
    def placed(self) -> tuple[Stages, ...]:
        """The stages of each device, in the order of the data. Raises as `stages_of_devices`."""
        if self.groups:
            of = [[k for k, g in enumerate(self.groups) if g == d] for d in range(self.num_devices)]
            return tuple(map(tuple, of))
        return stages_of_devices(
            self.schedule, num_stages=self.num_stages, num_devices=self.num_devices
        )

    @property
    def device_of(self) -> list[int]:
        """Device of every stage."""
        of = {stage: device for device, stages in enumerate(self.placed) for stage in stages}
        return [of[k] for k in range(self.num_stages)]


def stages_of_devices(name: str, *, num_stages: int, num_devices: int) -> tuple[Stages, ...]:
    """The stages each device owns, in the order of the data. Raises ValueError for an unknown
    schedule, a count below 1, or counts that the schedule cannot place."""
    if name not in SCHEDULES:
        raise ScheduleError.refused("schedule", name, legal=SCHEDULES)
    schedule = SCHEDULES[name]
    legal = schedule.stages_per_device
    check_count("num_stages", num_stages)
    check_count("num_devices", num_devices)
    if num_stages % num_devices or legal not in (None, num_stages // num_devices):
        number = "a whole number of" if legal is None else str(legal)
        raise ScheduleError(
            f"={name!r} places {number} stages on each device, which num_stages={num_stages} "
            f"on num_devices={num_devices} are not",
            place="schedule",
            legal=f"num_stages={(legal or 1) * num_devices}{' or a multiple' * (legal is None)}",
            way_out="change one of the two",
        )
    if num_devices % schedule.copies:
        raise ScheduleError(
            f"={name!r} runs {schedule.copies} copies of the model in opposite directions, which "
            f"{num_devices} device groups can't share",
            place="schedule",
            legal="an even number of device groups",
            way_out="change pp, or the schedule",
        )
    return schedule.placement(num_stages, num_devices)


@lru_cache(maxsize=64)
def compute_orders(pipeline: Pipeline) -> tuple[tuple[Compute, ...], ...]:
    """The computes of each device in one training step, in order. Raises ValueError as
    `stages_of_devices`, and for less than one micro-batch."""
    placed = pipeline.placed
    check_count("num_microbatches", pipeline.num_microbatches)
    schedule = pipeline.record
    _check_slices(pipeline)
    _check_late(pipeline)
    per_copy, rest = divmod(pipeline.num_microbatches, schedule.copies)
    if rest:
        raise ScheduleError(
            f"={pipeline.num_microbatches} with schedule={pipeline.schedule!r}: each of its "
            f"{schedule.copies} copies of the model takes as many",
            place="num_microbatches",
            legal=f"a multiple of {schedule.copies}",
        )
    copies = schedule.pipelines(pipeline.num_stages)
    first = {stage: k * per_copy for k, copy in enumerate(copies) for stage in copy}
    orders = []
    for device, stages in enumerate(placed):
        order = DeviceOrder(pipeline.slices)
        if pipeline.depths:
            place = pipeline.length - pipeline.depths[stages[0]]
            schedule.order(order, stages[:1], place, pipeline.length, per_copy)
        else:
            schedule.order(order, stages, device, len(placed), per_copy)
        computes = of_all(order.computes, stages) if pipeline.depths else order.computes
        needed = (c for c in computes if c.microbatch < per_copy)
        replaced = (c._replace(microbatch=first[c.stage] + c.microbatch) for c in needed)
        orders.append(tuple(replaced))
    return tuple(orders)


def _check_late(pipeline: Pipeline) -> None:
    """Raise ValueError where a schedule without a flush has too few micro-batches or devices."""
    p, m = pipeline.num_devices, pipeline.num_microbatches
    if pipeline.record.flushes or pipeline.record.runs(m, p):
        return
    if p == 1:
        raise ScheduleError(
            f"={pipeline.schedule!r}: on one device group there is no flush to save",
            place="schedule",
            legal="pp from 2",
            way_out="take another schedule, as 1f1b",
        )
    raise ScheduleError(
        f"={m} with schedule={pipeline.schedule!r} on {p} device groups: gradients would come more "
        f"than {pipeline.staleness} step late",
        place="num_microbatches",
        legal=f"{p - 1} or more",
        way_out="take more micro-batches, or schedule='pipedream'",
    )


def _check_slices(pipeline: Pipeline) -> None:
    """Raise ValueError unless its schedule takes slices, and they are those of whole
    micro-batches."""
    check_count("slices", pipeline.slices)
    if pipeline.slices > 1 and not pipeline.record.sliced:
        raise ScheduleError(
            f"={pipeline.schedule!r} takes micro-batches whole",
            place="schedule",
            legal=[name for name, record in SCHEDULES.items() if record.sliced],
            way_out="take one of these, or micro-batches without slices",
        )
    if pipeline.num_microbatches % pipeline.slices:
        raise ScheduleError(
            f"={pipeline.num_microbatches} slices are no whole micro-batches of {pipeline.slices}",
            place="num_microbatches",
            legal=f"a multiple of {pipeline.slices}",
        )


def check_count(argument: str, value: int) -> None:
    """Raise ValueError for a count below 1."""
    if value < 1:
        raise ScheduleError.refused(argument, value, legal="a whole number, 1 or more")
