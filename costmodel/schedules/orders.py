"""The order in which each device of a pipeline computes: eight published schedules as data.

`m` micro-batches go through stages, numbered in the order of the data, on `p` devices (a "device"
is the device group that a stage is placed on). F is the forward of one micro-batch on one stage, B
its backward. Some schedules split B into I, the gradient of the stage's input, which the stage
before waits for, and W, the gradients of its weights, which nobody waits for and which therefore
fill bubbles.

    schedule          stages of device d      holds, from F to the end of the backward, at most
    gpipe             d                       m
    1f1b              d                       p - d
    eager_1f1b        d                       2(p - d) - 1
    zb_h1             d                       p
    zb_h2             d                       2p - 1
    interleaved_1f1b  d, d+p, .., d+(v-1)p    (v + 1)p - 1 - 2d
    zb_v              d, 2p-1-d               2p
    dualpipe_v        d, 2p-1-d               2p + 1

What is held is counted in the activations of one micro-batch on one stage. Stages of which a device
owns v are v times smaller than if it owned one, so the last three hold as much as p + (p-1-2d)/v, p
and p + 1/2 micro-batches on a whole device.

The orders are those published. They depend on p, v and m alone, not on times: what uneven stages
and slow links lose is for the simulation to say. Every order here is a part of one legal sequence
of all computes, and stays legal when some are left out. So the last three, which need a multiple of
p, at least p and at least 2p micro-batches, take any m: they are laid out for as many as they need,
and the computes of the micro-batches from m on are dropped. (An overlapped F is always of a later
micro-batch than its B, so it never loses it.)

Sources: GPipe, arXiv 1811.06965; 1F1B (PipeDream-Flush), 2006.09503; eager 1F1B, 2211.05322;
interleaved, 2104.04473; ZB-H1, ZB-H2 and ZB-V, 2401.10241; DualPipe, 2412.19437, of which DualPipeV
is one half.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple


class Action(StrEnum):
    """What one instruction of a stream does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_ACTIVATION = "send_activation"
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"
    RECV_GRADIENT = "recv_gradient"
    REDUCE_GRADIENTS = "reduce_gradients"


class Compute(NamedTuple):
    """F, B, I or W of one micro-batch on one stage.

    `overlapped` marks a forward that runs together with the backward next in the order: the two
    start when the inputs of both are there, and the results of both leave when both are done.
    """

    action: Action
    stage: int
    microbatch: int
    overlapped: bool = False


class _Order:
    """The computes of one device so far; each stage takes its micro-batches in turn."""

    def __init__(self) -> None:
        self.computes: list[Compute] = []
        self.forwards: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.awaiting_weight: deque[tuple[int, int]] = deque()  # (stage, micro-batch), I done

    def forward(self, stage: int, *, overlapped: bool = False) -> None:
        self.computes.append(
            Compute(Action.FORWARD, stage, self.forwards[stage], overlapped=overlapped)
        )
        self.forwards[stage] += 1

    def backward(self, stage: int, *, split: bool = False) -> None:
        """B, or only I: its W is then to follow."""
        action = Action.BACKWARD_INPUT if split else Action.BACKWARD
        microbatch = self.backwards[stage]
        self.computes.append(Compute(action, stage, microbatch))
        self.backwards[stage] += 1
        if split:
            self.awaiting_weight.append((stage, microbatch))

    def weight(self) -> None:
        """W of the I that has waited longest."""
        self.computes.append(Compute(Action.BACKWARD_WEIGHT, *self.awaiting_weight.popleft()))

    def forward_and_backward(self, forward: int, backward: int) -> None:
        """F of one stage and B of the other, overlapped."""
        self.forward(forward, overlapped=True)
        self.backward(backward)


def _one_f_one_b(
    order: _Order, *, forwards: Sequence[int], backwards: Sequence[int], warmup: int
) -> None:
    """The first `warmup` forwards, then F B F B .., then the last backwards, given by stage."""
    for stage in forwards[:warmup]:
        order.forward(stage)
    for k, stage in enumerate(backwards):
        if warmup + k < len(forwards):
            order.forward(forwards[warmup + k])
        order.backward(stage)


def _gpipe(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    units = [stages[0]] * m
    _one_f_one_b(order, forwards=units, backwards=units, warmup=m)


def _1f1b(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    units = [stages[0]] * m
    _one_f_one_b(order, forwards=units, backwards=units, warmup=p - 1 - d)


def _eager_1f1b(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    units = [stages[0]] * m
    _one_f_one_b(order, forwards=units, backwards=units, warmup=2 * (p - 1 - d))


def _interleaved_1f1b(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """A round is p micro-batches on the first stage, the same p on the second, and so on."""
    rounds = math.ceil(m / p)
    _one_f_one_b(
        order,
        forwards=[stage for stage in stages for _ in range(p)] * rounds,
        backwards=[stage for stage in reversed(stages) for _ in range(p)] * rounds,
        warmup=2 * (p - 1 - d) + (len(stages) - 1) * p,
    )


def _one_f_one_i(order: _Order, stage: int, m: int, *, warmup: int, delay: int) -> None:
    """1F1B of F and I, each W `delay` micro-batches behind its I."""
    for _ in range(min(warmup, m)):
        order.forward(stage)
    for k in range(m):
        if warmup + k < m:
            order.forward(stage)
        order.backward(stage, split=True)
        if k >= delay:
            order.weight()
    for _ in range(min(delay, m)):
        order.weight()


def _zb_h1(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    _one_f_one_i(order, stages[0], m, warmup=p - 1 - d, delay=d)


def _zb_h2(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    _one_f_one_i(order, stages[0], m, warmup=2 * (p - 1 - d), delay=2 * d)


def _zb_v(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """Fill the V, then an F I W of each stage in turn; at the end Is first, as others wait."""
    down, up = stages
    for _ in range(2 * (p - d) - 1):
        order.forward(down)
    for _ in range(d):
        order.forward(up)
        order.forward(down)
    for _ in range(p - d):
        order.forward(up)
        order.backward(up, split=True)
        order.weight()
    for _ in range(m - p):
        if order.forwards[down] < m:
            order.forward(down)
        order.backward(down, split=True)
        order.weight()
        order.forward(up)
        order.backward(up, split=True)
        order.weight()
    for _ in range(d):
        order.backward(down, split=True)
        order.backward(up, split=True)
    for _ in range(p - d):
        order.backward(down, split=True)
        order.weight()
    for _ in range(2 * d):
        order.weight()


def _dualpipe_v(order: _Order, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """Fill the V, then F&B of the two stages crosswise; splits backwards only to start and end."""
    down, up = stages
    m = max(m, 2 * p)
    after = p - 1 - d
    for _ in range(2 * after):
        order.forward(down)
    for _ in range(d + 1):
        order.forward(down)
        order.forward(up)
    for _ in range(after):
        order.backward(up, split=True)
        order.weight()
        order.forward(up)
    for k in range(m - p - after):
        if k == 0 and after == 0:  # at the turn the backward is late: the forward does not wait
            order.forward(down)
            order.backward(up)
        else:
            order.forward_and_backward(down, up)
        order.forward_and_backward(up, down)
    for _ in range(after):
        order.backward(up)
        order.forward_and_backward(up, down)
    for k in range(d + 1):  # the second half of these 2(d + 1) backwards is split
        order.backward(up, split=2 * k >= d + 1)
        order.backward(down, split=2 * k + 1 >= d + 1)
    for _ in range(after):
        order.weight()
        order.backward(down, split=True)
    for _ in range(d + 1):
        order.weight()


# Appends the computes of one device: (order, stages of the device, d, p, m).
_Fill = Callable[[_Order, Sequence[int], int, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a schedule places stages on devices, and in which order these compute.

    `stages_per_device` is None where any number is legal. Stage k lies on device k mod p or, where
    the placement is `v_shaped`, there and back again: on device min(k, 2p - 1 - k).
    """

    fill: _Fill
    stages_per_device: int | None = 1
    v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "gpipe": Schedule(fill=_gpipe),
        "1f1b": Schedule(fill=_1f1b),
        "eager_1f1b": Schedule(fill=_eager_1f1b),
        "interleaved_1f1b": Schedule(fill=_interleaved_1f1b, stages_per_device=None),
        "zb_h1": Schedule(fill=_zb_h1, splits_backward=True),
        "zb_h2": Schedule(fill=_zb_h2, splits_backward=True),
        "zb_v": Schedule(fill=_zb_v, stages_per_device=2, v_shaped=True, splits_backward=True),
        "dualpipe_v": Schedule(
            fill=_dualpipe_v, stages_per_device=2, v_shaped=True, splits_backward=True
        ),
    }
)


def stages_of_devices(
    name: str, *, num_stages: int, num_devices: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The stages each device owns, in the order of the data.

    `num_devices` may be left out where the schedule fixes the number of stages per device. Raises
    ValueError for an unknown schedule, a count below 1, or counts that the schedule cannot place.
    """
    schedule = _known(name)
    check_count("num_stages", num_stages)
    each = schedule.stages_per_device
    if num_devices is None:
        if each is None:
            raise ValueError(
                f"schedule={name!r} with num_stages={num_stages} needs num_devices: any divisor of "
                f"num_stages is legal"
            )
        num_devices = max(1, num_stages // each)
    check_count("num_devices", num_devices)
    if num_stages % num_devices or each not in (None, num_stages // num_devices):
        per_device = "a whole number of" if each is None else str(each)
        raise ValueError(
            f"schedule={name!r} places {per_device} stages on each device, which num_stages="
            f"{num_stages} on num_devices={num_devices} are not; change one of the two"
        )
    last = num_stages - 1
    if schedule.v_shaped:
        return tuple((d, last - d) for d in range(num_devices))
    return tuple(tuple(range(d, num_stages, num_devices)) for d in range(num_devices))


@lru_cache(maxsize=64)
def compute_orders(
    name: str, *, num_stages: int, num_microbatches: int, num_devices: int | None = None
) -> tuple[tuple[Compute, ...], ...]:
    """What each device computes in one training step, in order."""
    placed = stages_of_devices(name, num_stages=num_stages, num_devices=num_devices)
    check_count("num_microbatches", num_microbatches)
    orders = []
    for device, stages in enumerate(placed):
        order = _Order()
        SCHEDULES[name].fill(order, stages, device, len(placed), num_microbatches)
        orders.append(tuple(c for c in order.computes if c.microbatch < num_microbatches))
    return tuple(orders)


def check_count(argument: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{argument}={value}: a schedule needs at least 1")


def _known(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: known schedules are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
