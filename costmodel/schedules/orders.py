"""The order in which one device computes, per schedule: functions that append to a `DeviceOrder`.

`m` micro-batches go through stages on `p` devices (a "device" is the device group that a stage is
placed on); `d` is the device and `stages` are its own. F is the forward of one micro-batch on one
stage, B its backward. Some schedules split B into I, the gradient of the stage's input, which the
stage before waits for, and W, the gradients of its weights, which nobody waits for and which
therefore fill bubbles.

The orders are those published. They depend on p, v and m alone, not on times. Every order is a part
of one legal sequence of all computes, and stays legal when some are left out. So interleaved 1F1B,
ZB-V and DualPipeV, which need a multiple of p, at least p and at least 2p micro-batches, take any
m: they are laid out for as many as they need, and the computes of the micro-batches from m on are
dropped. (An overlapped F is of a later micro-batch than its B, so it never loses it.)

Where the schedule holds two copies of the model, `m` micro-batches go through each, counted from 0,
and `stages` are the device's stage of the first copy and its stage of the second.

A micro-batch may go through as token slices, of which `m` counts each. Backwards take the slices of
a micro-batch from the last one to the first, whose keys and values the later ones have read. So the
last stage runs all forwards of a micro-batch before its first backward, and warm-ups are longer by
the slices but one (Seq1F1B).

Sources: GPipe, arXiv 1811.06965; 1F1B (PipeDream-Flush), 2006.09503; eager 1F1B, 2211.05322;
interleaved, 2104.04473; Chimera, 2107.06925; ZB-H1, ZB-H2 and ZB-V, 2401.10241; DualPipe,
2412.19437, of which DualPipeV is one half; slices: TeraPipe, 2102.07988, Seq1F1B, 2406.03488;
without a flush: PipeDream, 1806.03377, PipeDream-2BW, 2006.09503.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class Action(StrEnum):
    """Kind of an instruction: a compute, a send, a receive or the gradient reduction."""

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


class DeviceOrder:
    """The computes of one device so far; each stage takes its micro-batches in turn, and backwards
    those of each `slices` from the last to the first."""

    def __init__(self, slices: int = 1) -> None:
        self.slices = slices
        self.computes: list[Compute] = []
        self.forwards: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.awaiting_weight: deque[tuple[int, int]] = deque()  # (stage, micro-batch), I done

    def backward_of(self, stage: int, microbatch: int) -> None:
        """B of a micro-batch; below 0 it is of an earlier step."""
        self.computes.append(Compute(Action.BACKWARD, stage, microbatch))

    def forward(self, stage: int, *, overlapped: bool = False) -> None:
        self.computes.append(Compute(Action.FORWARD, stage, self.forwards[stage], overlapped))
        self.forwards[stage] += 1

    def backward(self, stage: int, *, split: bool = False) -> None:
        """B, or only I: its W is then to follow."""
        action = Action.BACKWARD_INPUT if split else Action.BACKWARD
        first, later = divmod(self.backwards[stage], self.slices)
        microbatch = (first + 1) * self.slices - 1 - later
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


def of_all(computes: Iterable[Compute], stages: Sequence[int]) -> Iterator[Compute]:
    """The computes of a device whose `stages` run as one: forwards in their order, backwards the
    other way."""
    for compute in computes:
        forward = compute.action is Action.FORWARD
        for stage in stages if forward else reversed(stages):
            yield compute._replace(stage=stage)


def _alternate(
    order: DeviceOrder, *, forwards: Sequence[int], backwards: Sequence[int], warmup: int
) -> None:
    """The first `warmup` forwards, then F B F B .., then the last backwards, given by stage."""
    warmup += order.slices - 1
    for stage in forwards[:warmup]:
        order.forward(stage)
    for k, stage in enumerate(backwards):
        if warmup + k < len(forwards):
            order.forward(forwards[warmup + k])
        order.backward(stage)


def gpipe(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    units = [stages[0]] * m
    _alternate(order, forwards=units, backwards=units, warmup=m)


def one_f_one_b(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    units = [stages[0]] * m
    _alternate(order, forwards=units, backwards=units, warmup=p - 1 - d)


def eager_1f1b(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    units = [stages[0]] * m
    _alternate(order, forwards=units, backwards=units, warmup=2 * (p - 1 - d))


def interleaved_1f1b(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """A round is p micro-batches on the first stage, the same p on the second, and so on; of slices
    the least number of whole micro-batches that are as many."""
    each = round_of(p, order.slices)
    rounds = math.ceil(m / each)
    _alternate(
        order,
        forwards=[stage for stage in stages for _ in range(each)] * rounds,
        backwards=[stage for stage in reversed(stages) for _ in range(each)] * rounds,
        warmup=2 * (p - 1 - d) + (len(stages) - 1) * each,
    )


def round_of(p: int, slices: int) -> int:
    """Slices after which orders repeat themselves: p, or more that are whole micro-batches."""
    return math.ceil(p / slices) * slices


def pipedream(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """1F1B without an end: behind each F the B of the micro-batch that went through p-1-d ago, the
    first ones of which are of earlier steps."""
    for k in range(m):
        order.forward(stages[0])
        order.backward_of(stages[0], k - (p - 1 - d))


def _alternate_split(order: DeviceOrder, stage: int, m: int, *, warmup: int, delay: int) -> None:
    """1F1B of F and I, each W `delay` micro-batches behind its I."""
    warmup += order.slices - 1
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


def zb_h1(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    _alternate_split(order, stages[0], m, warmup=p - 1 - d, delay=d)


def zb_h2(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    _alternate_split(order, stages[0], m, warmup=2 * (p - 1 - d), delay=2 * d)


def zb_v(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
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


def dualpipe_v(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """Fill the V, then F&B of the two stages crosswise; splits backwards only to start and end.
    Where nothing overlaps (`build_schedule`), each F&B is an F and then a B."""
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


def chimera(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """Units of p/2 micro-batches per copy, one after the other. With F and B of one slot each, the
    s-th stage of a copy takes micro-batch i of unit u

        F in slot  2pu + s + 2i,        B in slot  2pu + 2p - 1 - s + 2i,

    latest times of 1F1B in which the copies never meet on a device: their F lie on slots of s's and
    p-1-s's parity, their B on those of the other one."""
    half = p // 2
    taken = []
    for place, stage in zip((d, p - 1 - d), stages, strict=True):
        for k in range(math.ceil(m / half) * half):
            slot = 2 * p * (k // half) + 2 * (k % half)
            taken.append((slot + place, stage, True))
            taken.append((slot + 2 * p - 1 - place, stage, False))
    for _, stage, is_forward in sorted(taken):
        if is_forward:
            order.forward(stage)
        else:
            order.backward(stage)


def dualpipe(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """DualPipeV is one half of this: a device and its mirror image run it, each with the two copies
    in the other's order."""
    nearer = min(d, p - 1 - d)
    dualpipe_v(order, stages if d == nearer else stages[::-1], nearer, p // 2, m)
