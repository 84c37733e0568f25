"""Pipeline schedules as instruction streams: one stream per device, read by two readers.

The simulator (`simulate.py`) prices the streams that the executor runs. A schedule is a placement
of stages on devices and the order in which each device computes (`table.py`). Communication follows
from that order and from the edges of the stage graph: the inputs of a compute are received just
before it, its results sent just after it, and stages of one device exchange theirs without a
message. Software that overlaps an F with a B (`paired`) receives the inputs of both before the two
and sends both results after them; in `train_step` the two run one after the other.

Two properties follow for any edges (i, j) with i < j, skip edges included. The streams cannot
deadlock, because F(j, k) already comes after F(i, k) along the chain of stages and B(i, k) after
B(j, k), so an edge adds no order the schedule did not have. And both ends of a channel list the
micro-batches in the same order, as every stage takes them in turn, which NCCL needs since it
matches messages by order, not by tag. Where branches lie apart, a device has the order of
that device of a chain which is as deep, and each edge leads to a lesser depth, so that F(j, k)
comes after F(i, k) along this chain: the devices of one depth do together what one does there.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from meshwright.costmodel.schedules.orders import Action, Compute
from meshwright.costmodel.schedules.table import Pipeline, ScheduleError, compute_orders

_SYMBOLS = {
    Action.FORWARD: "F",
    Action.BACKWARD: "B",
    Action.BACKWARD_INPUT: "I",
    Action.BACKWARD_WEIGHT: "W",
    Action.SEND_ACTIVATION: "sendF",
    Action.RECV_ACTIVATION: "recvF",
    Action.SEND_GRADIENT: "sendB",
    Action.RECV_GRADIENT: "recvB",
    Action.REDUCE_GRADIENTS: "reduce",
}
SENDS = (Action.SEND_ACTIVATION, Action.SEND_GRADIENT)
RECEIVES = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)
FORWARD_MESSAGES = (Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One step of one stage, printed as F3, B3, I3, W3, sendF3->1, recvF3<-0, sendB3->0, recvB3<-1
    or reduce.

    `peer` is the stage at the other end of a send or receive, and None for everything else.
    `overlapped` marks a FORWARD that runs together with the BACKWARD next in the stream.
    REDUCE_GRADIENTS carries the micro-batch whose backward it follows, the last of its stage.
    Micro-batches below 0 are of earlier steps, -1 the last of the step before.
    """

    action: Action
    stage: int
    microbatch: int
    peer: int | None = None
    overlapped: bool = False

    def __post_init__(self) -> None:
        if (self.peer is not None) != (self.action in SENDS or self.action in RECEIVES):
            raise ScheduleError(
                f"{self.action.value} on stage {self.stage} has peer={self.peer}: sends and "
                f"receives name the other stage as peer, all other actions have peer=None"
            )
        if self.overlapped and self.action is not Action.FORWARD:
            raise ScheduleError(
                f"{self.action.value} on stage {self.stage} has overlapped=True: only a forward has"
            )

    def __str__(self) -> str:
        symbol = _SYMBOLS[self.action]
        if self.action is Action.REDUCE_GRADIENTS:
            return symbol
        if self.peer is None:
            return f"{symbol}{self.microbatch}"
        arrow = "->" if self.action in SENDS else "<-"
        return f"{symbol}{self.microbatch}{arrow}{self.peer}"


class Streams(tuple[tuple[Instruction, ...], ...]):
    """The instruction streams of one training step, one per device; equal to themselves only, so
    that caches by streams compare nothing."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def build_schedule(
    pipeline: Pipeline, edges: Collection[tuple[int, int]], *, paired: bool = False
) -> Streams:
    """The instruction streams of one training step, one per device.

    `edges` are the (source, destination) stages that exchange activations forward and gradients
    backward, each source before its destination. With `paired` forwards and backwards that the
    schedule pairs run as one thing. The streams of equal arguments are built once. Raises
    ValueError for an unknown schedule, a count below 1, stages that do not go evenly on the
    devices, or an edge that does not point forward.
    """
    return _build(pipeline, frozenset(edges), paired)


@lru_cache(maxsize=64)
def _build(pipeline: Pipeline, edges: frozenset[tuple[int, int]], paired: bool) -> Streams:
    device_of, orders, count = (pipeline.device_of, compute_orders(pipeline), pipeline.num_stages)
    sources: list[list[int]] = [[] for _ in range(count)]
    destinations: list[list[int]] = [[] for _ in range(count)]
    for source, destination in sorted(edges):
        if not 0 <= source < destination < count:
            raise ScheduleError(
                f"edge ({source}, {destination}) of the stage graph: need 0 <= source < "
                f"destination < {count} (num_stages), stages in the order of the data flow"
            )
        if device_of[source] != device_of[destination]:
            sources[destination].append(source)
            destinations[source].append(destination)
    if not paired:
        orders = tuple(tuple(c._replace(overlapped=False) for c in order) for order in orders)
    count = 0 if pipeline.record.flushes else pipeline.num_microbatches
    return Streams(tuple(_stream(order, sources, destinations, count)) for order in orders)


def _stream(
    order: Sequence[Compute],
    sources: Sequence[Sequence[int]],
    destinations: Sequence[Sequence[int]],
    count: int,
) -> Iterator[Instruction]:
    """Each compute after the receives that it needs, before the sends of its results. Where steps
    of `count` micro-batches don't end together, gradients are reduced behind the last of them."""
    last: dict[int, int] = {}  # stage -> micro-batch, the stage that ends first in front
    at = 0
    while at < len(order):
        together = order[at : at + 1 + order[at].overlapped]
        for compute in together:
            if compute.action is Action.FORWARD:
                yield from _messages(Action.RECV_ACTIVATION, compute, sources)
            elif compute.action is not Action.BACKWARD_WEIGHT:
                yield from _messages(Action.RECV_GRADIENT, compute, destinations)
        for action, stage, m, overlapped in together:
            yield Instruction(action=action, stage=stage, microbatch=m, overlapped=overlapped)
            last.pop(stage, None)
            last[stage] = m
        for compute in together:
            if compute.action is Action.FORWARD:
                yield from _messages(Action.SEND_ACTIVATION, compute, destinations)
            elif compute.action is not Action.BACKWARD_WEIGHT:
                yield from _messages(Action.SEND_GRADIENT, compute, sources)
        at += len(together)
        ended = [c for c in together if count and c.microbatch % count == count - 1]
        for _, stage, m, _ in (c for c in ended if c.action is not Action.FORWARD):
            yield Instruction(action=Action.REDUCE_GRADIENTS, stage=stage, microbatch=m)
    for stage, microbatch in last.items() if not count else ():
        yield Instruction(action=Action.REDUCE_GRADIENTS, stage=stage, microbatch=microbatch)


def unrolled(streams: Streams, count: int, calls: int) -> Streams:
    """The streams of so many steps in a row of a schedule without a flush, and of those that end
    what they leave; `count` micro-batches a step, counted on."""
    rest = -(-max(1 - i.microbatch for stream in streams for i in stream) // count)
    begun = range(calls + rest)

    def all_of(stream: Sequence[Instruction]) -> Iterator[Instruction]:
        for at, i in ((i.microbatch + count * call, i) for call in begun for i in stream):
            if 0 <= at < calls * count:
                yield replace(i, microbatch=at)

    return Streams(tuple(all_of(stream)) for stream in streams)


def _messages(
    action: Action, compute: Compute, peers: Sequence[Sequence[int]]
) -> Iterator[Instruction]:
    stage, m = compute.stage, compute.microbatch
    for peer in peers[stage]:
        yield Instruction(action=action, stage=stage, microbatch=m, peer=peer)


def backward_follows_forward(pipeline: Pipeline, stage: int) -> bool:
    """Whether `stage` runs the backward of every micro-batch right after its forward."""
    return all(
        (after.stage, after.microbatch) == (stage, compute.microbatch)
        for order in compute_orders(pipeline)
        for compute, after in pairwise(order)
        if compute.stage == stage and compute.action is Action.FORWARD
    )
