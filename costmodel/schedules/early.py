"""The forwards that a device may run before it knows that its last optimizer step holds.

Optimizer post-validation (Qi et al., 2401.10241, §4): a device steps its optimizer as soon as its
own gradients are summed, and goes on to the next step. Whether the step was right (no gradient
anywhere that is not finite, no norm to be clipped) is known when the last device has ended its
backwards. A device waits for that verdict before its first backward: forwards leave nothing but
activations, and can be made again from weights that were put right.

A device's *early* instructions are those before its first backward, fewer where one of them would
receive what another device sends only after its own verdict:

    early(d) = the longest prefix of d's stream without a backward, all of whose receives are of
               sends in the early part of the sender's

So after a verdict that does not hold every device knows what is under way to it: the messages of
the senders' early parts (`arriving`), which it takes and drops. All devices then begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.costmodel.schedules.orders import Action
from meshwright.costmodel.schedules.schedule import Instruction, Streams

_FORWARDS = (Action.FORWARD, Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
_Message = tuple[int, int, int]  # source stage, destination stage, micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """The first `count` instructions of a device, and of its receives of the whole step those that
    are `arriving` because their senders send them in their own early parts."""

    count: int
    arriving: tuple[Instruction, ...]


@lru_cache(maxsize=64)
def early_parts(streams: Streams) -> tuple[Early, ...]:
    """The early part of each device's stream."""
    counts = [
        next((n for n, each in enumerate(stream) if each.action not in _FORWARDS), len(stream))
        for stream in streams
    ]
    while True:
        sent = _sent(streams, counts)
        shorter = [
            next((n for n, each in enumerate(stream[:count]) if _waits(each, sent)), count)
            for stream, count in zip(streams, counts, strict=True)
        ]
        if shorter == counts:
            break
        counts = shorter
    return tuple(
        Early(
            count=count,
            arriving=tuple(
                each
                for each in stream
                if each.action is Action.RECV_ACTIVATION and _received(each) in sent
            ),
        )
        for stream, count in zip(streams, counts, strict=True)
    )


def _sent(streams: Streams, counts: Sequence[int]) -> set[_Message]:
    """The messages that are sent in the first so many instructions of each device."""
    return {
        (each.stage, each.peer, each.microbatch)
        for stream, count in zip(streams, counts, strict=True)
        for n, each in enumerate(stream)
        if n < count and each.action is Action.SEND_ACTIVATION and each.peer is not None
    }


def _received(receive: Instruction) -> _Message:
    assert receive.peer is not None
    return receive.peer, receive.stage, receive.microbatch


def _waits(instruction: Instruction, sent: set[_Message]) -> bool:
    """Whether this receives what is sent after the sender's verdict."""
    return instruction.action is Action.RECV_ACTIVATION and _received(instruction) not in sent
