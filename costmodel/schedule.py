"""Pipeline schedules as instruction streams: one stream per stage, read by two readers.

The simulator (`costmodel.simulate`) prices the streams and the executor runs the same streams, so
what was predicted is what runs. With `p` stages and `m` micro-batches, a schedule is nothing but
the order in which stage `s` computes its forwards F and backwards B:

    gpipe   F0 .. F(m-1)  B0 .. B(m-1)                      holds m micro-batches
    1f1b    F0 .. F(w-1)  then F B F B ..  then the last Bs  holds min(p - s, m)
            with the warm-up w = min(p - 1 - s, m)

Communication is derived from that order and from the edges of the stage graph, never written by
hand: the inputs of a compute are received just before it, its results sent just after it.

Two properties follow for any edges (i, j) with i < j, skip edges included. The streams cannot
deadlock, because F(j, k) already comes after F(i, k) along the chain of stages and B(i, k) after
B(j, k), so an edge adds no order the schedule did not have. And both ends of a channel list the
micro-batches in the same order, which NCCL needs since it matches messages by order, not by tag.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Action(StrEnum):
    """What one instruction of a stream does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_ACTIVATION = "send_activation"
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"
    RECV_GRADIENT = "recv_gradient"
    REDUCE_GRADIENTS = "reduce_gradients"


_SYMBOLS: Mapping[Action, str] = MappingProxyType(
    {
        Action.FORWARD: "F",
        Action.BACKWARD: "B",
        Action.SEND_ACTIVATION: "sendF",
        Action.RECV_ACTIVATION: "recvF",
        Action.SEND_GRADIENT: "sendB",
        Action.RECV_GRADIENT: "recvB",
        Action.REDUCE_GRADIENTS: "reduce",
    }
)
_SENDS = (Action.SEND_ACTIVATION, Action.SEND_GRADIENT)
_RECEIVES = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One step of one stage, printed as F3, B3, sendF3->1, recvF3<-0, sendB3->0, recvB3<-1, reduce.

    `peer` is the stage at the other end of a send or receive, and None for everything else.
    REDUCE_GRADIENTS carries the micro-batch whose backward it follows, the last of its stage.
    """

    action: Action
    stage: int
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if (self.peer is not None) != (self.action in _SENDS or self.action in _RECEIVES):
            raise ValueError(
                f"{self.action.value} on stage {self.stage} has peer={self.peer}: sends and "
                f"receives name the other stage as peer, all other actions have peer=None"
            )

    def __str__(self) -> str:
        symbol = _SYMBOLS[self.action]
        if self.action is Action.REDUCE_GRADIENTS:
            return symbol
        if self.peer is None:
            return f"{symbol}{self.microbatch}"
        arrow = "->" if self.action in _SENDS else "<-"
        return f"{symbol}{self.microbatch}{arrow}{self.peer}"


ComputeOrder = Callable[[int, int, int], Sequence[tuple[Action, int]]]


def _gpipe_order(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[Action, int]]:
    forwards = [(Action.FORWARD, k) for k in range(num_microbatches)]
    return forwards + [(Action.BACKWARD, k) for k in range(num_microbatches)]


def _1f1b_order(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[Action, int]]:
    warmup = min(num_stages - 1 - stage, num_microbatches)
    steady = num_microbatches - warmup
    order = [(Action.FORWARD, k) for k in range(warmup)]
    for k in range(steady):
        order += [(Action.FORWARD, warmup + k), (Action.BACKWARD, k)]
    return order + [(Action.BACKWARD, k) for k in range(steady, num_microbatches)]


# (stage, num_stages, num_microbatches) -> the computes of the stage, in order.
SCHEDULES: Mapping[str, ComputeOrder] = MappingProxyType(
    {"gpipe": _gpipe_order, "1f1b": _1f1b_order}
)

# The same arguments -> the peak of in_flight. Closed forms, because the search asks very often.
_PEAK_IN_FLIGHT: Mapping[str, Callable[[int, int, int], int]] = MappingProxyType(
    {
        "gpipe": lambda stage, num_stages, num_microbatches: num_microbatches,
        "1f1b": lambda stage, num_stages, num_microbatches: min(
            num_stages - stage, num_microbatches
        ),
    }
)


def build_schedule(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    edges: Collection[tuple[int, int]] | None = None,
) -> tuple[tuple[Instruction, ...], ...]:
    """The instruction streams of one training step, one per stage.

    `edges` are the (source, destination) stages that exchange activations forward and gradients
    backward, each source before its destination; by default each stage with the next. Raises
    ValueError for an unknown schedule, a count below 1 or an edge that does not point forward.
    """
    _check_arguments(name, num_stages=num_stages, num_microbatches=num_microbatches)
    if edges is None:
        edges = [(stage, stage + 1) for stage in range(num_stages - 1)]
    sources: list[list[int]] = [[] for _ in range(num_stages)]
    destinations: list[list[int]] = [[] for _ in range(num_stages)]
    for source, destination in sorted(set(edges)):
        if not 0 <= source < destination < num_stages:
            raise ValueError(
                f"edge ({source}, {destination}) of the stage graph: need 0 <= source < "
                f"destination < {num_stages} (num_stages); number the stages in the order of the "
                f"data flow"
            )
        sources[destination].append(source)
        destinations[source].append(destination)
    return tuple(
        _stage_stream(
            SCHEDULES[name](stage, num_stages, num_microbatches),
            stage=stage,
            sources=sources[stage],
            destinations=destinations[stage],
        )
        for stage in range(num_stages)
    )


def in_flight(name: str, *, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Peak number of micro-batches whose activations `stage` holds, from their F to their B."""
    _check_arguments(name, num_stages=num_stages, num_microbatches=num_microbatches)
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage={stage}: a pipeline of {num_stages} has 0..{num_stages - 1}")
    return _PEAK_IN_FLIGHT[name](stage, num_stages, num_microbatches)


def _stage_stream(
    order: Sequence[tuple[Action, int]],
    *,
    stage: int,
    sources: Sequence[int],
    destinations: Sequence[int],
) -> tuple[Instruction, ...]:
    """Wrap each compute in the receives it needs and the sends of what it produced."""
    stream: list[Instruction] = []

    def emit(action: Action, microbatch: int, peers: Sequence[int | None]) -> None:
        stream.extend(
            Instruction(action=action, stage=stage, microbatch=microbatch, peer=peer)
            for peer in peers
        )

    for compute, microbatch in order:
        if compute is Action.FORWARD:
            emit(Action.RECV_ACTIVATION, microbatch, sources)
            emit(compute, microbatch, [None])
            emit(Action.SEND_ACTIVATION, microbatch, destinations)
        else:
            emit(Action.RECV_GRADIENT, microbatch, destinations)
            emit(compute, microbatch, [None])
            emit(Action.SEND_GRADIENT, microbatch, sources)
    emit(Action.REDUCE_GRADIENTS, order[-1][1], [None])
    return tuple(stream)


def _check_arguments(name: str, *, num_stages: int, num_microbatches: int) -> None:
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: known schedules are {', '.join(sorted(SCHEDULES))}")
    for argument, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{argument}={value}: a schedule needs at least 1")
