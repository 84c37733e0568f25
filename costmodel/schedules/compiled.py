"""Instruction streams compiled to arithmetic, so that pricing one plan costs a loop over numbers.

A compute waits for the one before it on its device and for its messages, a message for the compute
that made it and for the one before it on its channel, whatever the seconds:

    end(n) = max(end(a), end(b)) + seconds of n                        for nodes n = 1, 2, ..

with the two predecessors a, b < n, node 0 being the start of the step. A compute that waits for
more than one message gets a node without seconds for each of the others. Compiling runs the streams
one by one, each until it waits for a message that has not been sent, which is linear in the number
of instructions and finds every fault of the streams: deadlocks, messages that nobody receives, ends
of a channel that disagree.

A channel leads from a device to a device and carries one message at a time, in the order sent, be
they activations or gradients and whichever stages they belong to.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.schedules.orders import Action
from meshwright.costmodel.schedules.schedule import (
    FORWARD_MESSAGES,
    RECEIVES,
    SENDS,
    Instruction,
    ScheduleError,
    Streams,
)


class TimeSlot(IntEnum):
    """Seconds of a stage by kind; those of computes are named as their `Action`."""

    FORWARD = 0
    OVERLAPPED_FORWARD = 1
    BACKWARD = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4
    REDUCE = 5
    OPTIMIZER = 6


NOTHING = -1  # the index of the zero at the end of the seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps n = 1, 2, .. are (a, b, index of the seconds), in an order in which a, b < n.

    The seconds are indexed by stage * len(TimeSlot) + slot; then come those of the `edges`, each
    with the first instruction that needs it; then a zero. `instructions` are those of the steps,
    None for one that only waits. `computes` counts per device the F, B, I and W of each index.
    `first_computes` and `last_computes` are the nodes of each device's first and last compute,
    `last_nodes` of the last thing it does, 0 where there is none.
    """

    stages_of: tuple[tuple[int, ...], ...]
    edges: Mapping[tuple[int, int], Instruction]
    steps: tuple[tuple[int, int, int], ...]
    instructions: tuple[Instruction | None, ...]
    computes: tuple[Mapping[int, int], ...]
    first_computes: tuple[int, ...]
    last_computes: tuple[int, ...]
    last_nodes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages_of))


@lru_cache(maxsize=64)
def program_of(streams: Streams) -> Program:
    """The program of the streams, compiled once."""
    return _Compiler(streams).run()


@dataclass(slots=True)
class _Link:
    """The messages of one direction from a stage to another; `index` of the seconds of each."""

    index: int
    destination_device: int
    inbox: deque[tuple[int, int]]  # (micro-batch, node)
    receiver_waits: bool = False


class _Compiler:
    """Positions of the devices, messages under way, and the program so far."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.stages_of = _stages_of(streams)
        self.device_of = {s: d for d, stages in enumerate(self.stages_of) for s in stages}
        self.edges: dict[tuple[int, int], Instruction] = {}
        self.steps: list[tuple[int, int, int]] = []
        self.instructions: list[Instruction | None] = []
        self.position = [0] * len(streams)
        self.last = [0] * len(streams)
        self.arrived = [0] * len(streams)  # a message that the device's next node waits for
        self.links = Memo[tuple[int, int, str], _Link]()  # source, destination stage, F or B
        self.last_message: Counter[tuple[int, int]] = Counter()  # by (source, destination) device
        self.ready = deque(range(len(streams)))
        self.computes: list[Counter[int]] = [Counter() for _ in streams]
        self.first_computes = [0] * len(streams)
        self.last_computes = [0] * len(streams)

    def run(self) -> Program:
        while self.ready:
            self._advance(self.ready.popleft())
        self._check_finished()
        return Program(
            stages_of=self.stages_of,
            edges=self.edges,
            steps=tuple(self.steps),
            instructions=tuple(self.instructions),
            computes=tuple(self.computes),
            first_computes=tuple(self.first_computes),
            last_computes=tuple(self.last_computes),
            last_nodes=tuple(self.last),
        )

    def _advance(self, device: int) -> None:
        """Run one device until its stream ends or waits for a message that has not been sent."""
        stream = self.streams[device]
        while self.position[device] < len(stream):
            instruction = stream[self.position[device]]
            if instruction.action in RECEIVES:
                if not self._receive(device, instruction):
                    return
            elif instruction.action in SENDS:
                self._send(device, instruction)
            elif instruction.action is Action.REDUCE_GRADIENTS:
                self._occupy(device, instruction, TimeSlot.REDUCE)
                self._occupy(device, instruction, TimeSlot.OPTIMIZER)
            else:
                self._compute(device, instruction)
            self.position[device] += 1

    def _compute(self, device: int, instruction: Instruction) -> None:
        name = "OVERLAPPED_FORWARD" if instruction.overlapped else instruction.action.name
        index = self._occupy(device, instruction, TimeSlot[name])
        self.computes[device][index] += 1
        self.last_computes[device] = self.last[device]
        self.first_computes[device] = self.first_computes[device] or self.last[device]

    def _occupy(self, device: int, instruction: Instruction, slot: TimeSlot) -> int:
        index = instruction.stage * len(TimeSlot) + slot
        self._follow(device, index, instruction)
        return index

    def _follow(self, device: int, index: int, instruction: Instruction | None) -> None:
        """Next node of the device, which also waits for the message that arrived."""
        self.last[device] = self._add(self.last[device], self.arrived[device], index, instruction)
        self.arrived[device] = 0

    def _send(self, device: int, instruction: Instruction) -> None:
        if self.arrived[device]:
            self._follow(device, NOTHING, None)
        link = self._link(instruction)
        pair = (device, link.destination_device)
        node = self._add(self.last[device], self.last_message[pair], link.index, instruction)
        self.last_message[pair] = node
        link.inbox.append((instruction.microbatch, node))
        if link.receiver_waits:
            link.receiver_waits = False
            self.ready.append(link.destination_device)

    def _receive(self, device: int, instruction: Instruction) -> bool:
        """Let the device's next node wait for the next message, if that was sent."""
        link = self._link(instruction)
        if not link.inbox:
            link.receiver_waits = True
            return False
        microbatch, node = link.inbox.popleft()
        if microbatch != instruction.microbatch:
            raise ScheduleError(
                f"stage {instruction.stage} expects {instruction}, but the next message stage "
                f"{instruction.peer} sends it there is of micro-batch {microbatch}; both ends must "
                f"list the same order"
            )
        if self.arrived[device]:
            self._follow(device, NOTHING, None)
        self.arrived[device] = node
        return True

    def _link(self, message: Instruction) -> _Link:
        """Link of a send or receive, the same one for both."""
        assert message.peer is not None
        source, destination = message.stage, message.peer
        if message.action in RECEIVES:
            source, destination = destination, source
        direction = "F" if message.action in FORWARD_MESSAGES else "B"
        key = source, destination, direction
        return self.links.of(key, lambda: self._new_link(message, *key))

    def _new_link(
        self, message: Instruction, source: int, destination: int, direction: str
    ) -> _Link:
        if message.peer not in self.device_of:
            raise ScheduleError(
                f"{message} of stage {message.stage} names stage {message.peer}, which no stream "
                f"computes; legal: 0..{len(self.device_of) - 1}"
            )
        edge = (source, destination) if direction == "F" else (destination, source)
        self.edges.setdefault(edge, message)
        return _Link(
            index=len(self.device_of) * len(TimeSlot) + list(self.edges).index(edge),
            destination_device=self.device_of[destination],
            inbox=deque(),
        )

    def _add(self, first: int, second: int, index: int, instruction: Instruction | None) -> int:
        self.steps.append((first, second, index))
        self.instructions.append(instruction)
        return len(self.steps)

    def _check_finished(self) -> None:
        waiting = [
            f"stage {stream[position].stage} in {stream[position]}"
            for stream, position in zip(self.streams, self.position, strict=True)
            if position < len(stream)
        ]
        if waiting:
            raise ScheduleError(
                f"the streams deadlock, waiting are {', '.join(waiting)}; every message must be "
                f"sent before its sender waits for anything that depends on it"
            )
        for (source, destination, direction), link in self.links.items():
            if link.inbox:
                raise ScheduleError(
                    f"stage {destination} never receives send{direction}{link.inbox[0][0]} of "
                    f"stage {source}; add the receive to its stream"
                )


def _stages_of(streams: Streams) -> tuple[tuple[int, ...], ...]:
    """Stages of each stream, which must be 0, 1, .. in all, each of one stream."""
    stages_of = tuple(tuple(sorted({i.stage for i in stream})) for stream in streams)
    owned = sorted(stage for stages in stages_of for stage in stages)
    if owned != list(range(len(owned))):
        raise ScheduleError(
            f"the streams compute stages {owned}: need 0, 1, 2, .., each in one stream alone"
        )
    return stages_of
