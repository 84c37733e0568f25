"""The forwards that a device may run before it knows that its last optimizer step holds.

Optimizer post-validation (Qi et al., 2401.10241, §4): a device steps its optimizer as soon as its
own gradients are summed, and goes on to the next step. Whether the step was right (all gradients
finite, no norm to be clipped) is known when the last device has ended its backwards. A device waits
for that verdict before its first backward: forwards leave nothing but activations, and can run
again with corrected weights.

A device's *early* instructions are those before its first backward, fewer where one of them would
receive what another device sends only after its own verdict:

    early(d) = the longest prefix of d's stream without a backward, all of whose receives are of
               sends in the early part of the sender's

So after a verdict that does not hold every device knows what is under way to it: the messages of
the senders' early parts (`arriving`), which it takes and drops. All devices then begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, takewhile
from operator import not_

from meshwright.costmodel.schedules.orders import Action
from meshwright.costmodel.schedules.schedule import Instruction, Streams

_FORWARDS = (Action.FORWARD, Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
_Message = tuple[int, int | None, int]  # source stage, destination stage, micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """The first `count` instructions of a device, and of its receives of the whole step those that
    are `arriving` because their senders send them in their own early parts."""

    count: int
    arriving: tuple[Instruction, ...]


@lru_cache(maxsize=64)
def early_parts(streams: Streams) -> tuple[Early, ...]:
    """The early part of each device's stream."""
    counts = [_first(i.action not in _FORWARDS for i in stream) for stream in streams]
    while True:
        sent = {
            (i.stage, i.peer, i.microbatch)
            for stream, count in zip(streams, counts, strict=True)
            for i in stream[:count]
            if i.action is Action.SEND_ACTIVATION
        }
        receives = [[_is_early(i, sent) for i in stream] for stream in streams]
        shorter = [
            _first(early is False for early in device[:count])
            for device, count in zip(receives, counts, strict=True)
        ]
        if shorter == counts:
            break
        counts = shorter
    return tuple(
        Early(count=count, arriving=tuple(compress(stream, early)))
        for stream, count, early in zip(streams, counts, receives, strict=True)
    )


def _first(flags: Iterable[bool]) -> int:
    """Number of flags before the first that is up."""
    return sum(1 for _ in takewhile(not_, flags))


def _is_early(instruction: Instruction, sent: Set[_Message]) -> bool | None:
    """Whether a receive is of a message `sent` early; None for other instructions."""
    if instruction.action is not Action.RECV_ACTIVATION:
        return None
    return (instruction.peer, instruction.stage, instruction.microbatch) in sent
