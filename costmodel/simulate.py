"""Event simulation of instruction streams: the seconds of one training step, with the reasons.

The semantics are the executor's. Each stage computes in the order of its stream, one thing at a
time. Receives are posted ahead, so a compute starts as soon as its stage is free and its messages
are there. Sends run beside the computes; each channel (source, destination, direction) carries one
message at a time, in the order sent. Nothing a stage does depends on when another stage is looked
at, so the streams are run one by one, each until it waits for a message that has not been sent,
in time linear in the number of instructions.

What comes out, for stages with tᵢ = Fᵢ + Bᵢ, transfers that cost nothing, and no reduction:

    gpipe          T = Σ tᵢ + (m-1)(max Fᵢ + max Bᵢ)                       exactly
    1f1b           max over k of (Σ_{i<k} tᵢ + m·t_k)  <=  T  <=  the gpipe time
    equal stages   T = (m + p - 1)(F + B) for both; the bubble is (p-1)/m of the ideal m(F + B)

Alpa's objective Σ tᵢ + (m-1)·max tᵢ is the gpipe time when one stage is the slowest in both
directions (always so when all stages have the same B/F). For 1f1b it is then an upper bound. With
the same B/F everywhere it is exact when the slowest stage is the last, and otherwise too high by
at most the sum of t over the stages after it, whose work hides behind its own. When different
stages are slowest in the two directions, gpipe takes longer than Alpa's formula, and 1f1b can.

Alpa's objective does not know transfers either. With cᵢ seconds on each link of a chain,

    gpipe          T = Σ tᵢ + 2 Σ cᵢ + (m-1)(max(Fᵢ, cᵢ) + max(Bᵢ, cᵢ))     exactly

so overlap hides all but the filling. 1f1b holds too few micro-batches to hide them: a round trip
of stage 0 takes Σ tᵢ + 2 Σ cᵢ, and no more than p micro-batches are under way in it, so each costs
at least the p-th part of that however fast the sends overlap. Hence this simulation.

The upper bound of 1f1b: along any chain of dependent computes, stage + micro-batch grows by one
from each F to the next F, whether the chain moves to the next stage, stays in the warm-up or
returns through Bs. So a chain whose F reach stage J holds at most m + J of them and at least one
of each stage up to J: at most ΣF + (m-1)·max F seconds. Backwards in time the same holds for B.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from costmodel.schedule import Action, Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage: F and B of one micro-batch, and what is left to do once per step.

    `reduce_s` is the gradient reduction that the last backward does not hide.
    """

    forward_s: float
    backward_s: float
    reduce_s: float
    optimizer_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_seconds(getattr(self, each.name), what=each.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that occupied a track of a stage from `start_s` to `end_s`.

    Tracks are "compute" (F, B, optimizer), "reduce", and one per channel the stage sends on:
    "sendF->1" for activations to stage 1, "sendB->0" for gradients to stage 0. Events of one
    track do not overlap. `microbatch` is None for what happens once per step.
    """

    stage: int
    track: str
    name: str
    start_s: float
    end_s: float
    microbatch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One training step: what happened when, and how much of it was waiting.

    `pipeline_s` is the time until the last F or B of any stage has ended, `step_time_s` the time
    until everything has. `busy_s` is the F and B seconds of each stage.
    """

    events: tuple[Event, ...]
    step_time_s: float
    pipeline_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Part of the stages' seconds in the pipeline that no F or B fills, in [0, 1].

        The gradient reduction of a stage that is done early lies in the bubble and counts as it.
        """
        available_s = len(self.busy_s) * self.pipeline_s
        if available_s == 0:
            return 0.0
        return max(0.0, 1.0 - sum(self.busy_s) / available_s)  # rounding may leave -1e-16

    def idle_s(self, stage: int) -> float:
        """Seconds of the pipeline in which `stage` computes neither F nor B."""
        return self.pipeline_s - self.busy_s[stage]

    def chrome_trace(self) -> dict[str, Any]:
        """The step in Chrome's trace event format: one process per stage, one thread per track.

        The result is ready for `json.dump` and opens in Perfetto or chrome://tracing.
        """
        threads: dict[tuple[int, str], int] = {}
        trace: list[dict[str, Any]] = [
            _trace_label("process_name", f"stage {stage}", pid=stage, tid=0)
            for stage in range(len(self.busy_s))
        ]
        for event in self.events:
            key = (event.stage, event.track)
            if key not in threads:
                threads[key] = len(threads)
                trace.append(
                    _trace_label("thread_name", event.track, pid=event.stage, tid=threads[key])
                )
            trace.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "cat": event.track,
                    "pid": event.stage,
                    "tid": threads[key],
                    "ts": event.start_s * 1e6,  # the format counts in microseconds
                    "dur": (event.end_s - event.start_s) * 1e6,
                    "args": {} if event.microbatch is None else {"microbatch": event.microbatch},
                }
            )
        return {"traceEvents": trace, "displayTimeUnit": "ms"}


def simulate(
    streams: Sequence[Sequence[Instruction]],
    times: Sequence[StageTimes],
    transfer_s: Mapping[tuple[int, int], float],
) -> Timeline:
    """Play the streams of a schedule, one per stage, and return what happens when.

    `transfer_s` is the seconds of one micro-batch's activations from a source to a destination
    stage; its gradients take the same on the way back, and the two directions do not share a
    channel. Raises ValueError when stages wait for each other for ever, when the two ends of a
    channel disagree, or when a time is missing or not a number of seconds.
    """
    if len(times) != len(streams):
        raise ValueError(
            f"times has {len(times)} entries for {len(streams)} streams; give one each"
        )
    for (source, destination), seconds in transfer_s.items():
        _check_seconds(seconds, what=f"transfer_s[{source}, {destination}]")
    simulation = _Simulation(streams, times, transfer_s)
    simulation.run()
    events = simulation.events
    events.sort(key=attrgetter("start_s", "stage", "track"))
    return Timeline(
        events=tuple(events),
        step_time_s=max((event.end_s for event in events), default=0.0),
        pipeline_s=simulation.pipeline_s,
        busy_s=tuple(simulation.busy_s),
    )


@dataclass(slots=True)
class _Channel:
    """The messages of one direction from one stage to another, delivered in the order sent."""

    free_at_s: float = 0.0
    inbox: deque[tuple[int, float]] = field(default_factory=deque)  # (micro-batch, arrival_s)
    receiver_waits: bool = False


class _Simulation:
    """The state of a simulation: a clock and a position per stage, the channels, the events."""

    def __init__(
        self,
        streams: Sequence[Sequence[Instruction]],
        times: Sequence[StageTimes],
        transfer_s: Mapping[tuple[int, int], float],
    ) -> None:
        self.streams = streams
        self.times = times
        self.transfer_s = transfer_s
        self.clock_s = [0.0] * len(streams)
        self.position = [0] * len(streams)
        self.ready = deque(range(len(streams)))
        self.channels: dict[tuple[int, int, str], _Channel] = {}
        self.events: list[Event] = []
        self.busy_s = [0.0] * len(streams)
        self.pipeline_s = 0.0

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.popleft())
        self._check_finished()

    def _advance(self, stage: int) -> None:
        """Run one stage until its stream ends or waits for a message that has not been sent."""
        stream = self.streams[stage]
        while self.position[stage] < len(stream):
            instruction = stream[self.position[stage]]
            action = instruction.action
            if action is Action.FORWARD or action is Action.BACKWARD:
                self._compute(stage, instruction)
            elif action is Action.SEND_ACTIVATION or action is Action.SEND_GRADIENT:
                self._send(stage, instruction)
            elif action is Action.REDUCE_GRADIENTS:
                self._reduce(stage)
            elif not self._receive(stage, instruction):
                return
            self.position[stage] += 1

    def _compute(self, stage: int, instruction: Instruction) -> None:
        times = self.times[stage]
        forward = instruction.action is Action.FORWARD
        seconds = times.forward_s if forward else times.backward_s
        self._occupy(stage, "compute", str(instruction), seconds, instruction.microbatch)
        self.busy_s[stage] += seconds
        self.pipeline_s = max(self.pipeline_s, self.clock_s[stage])

    def _reduce(self, stage: int) -> None:
        self._occupy(stage, "reduce", "reduce", self.times[stage].reduce_s, None)
        self._occupy(stage, "compute", "optimizer", self.times[stage].optimizer_s, None)

    def _occupy(
        self, stage: int, track: str, name: str, seconds: float, microbatch: int | None
    ) -> None:
        start_s = self.clock_s[stage]
        self.clock_s[stage] = start_s + seconds
        self._record(stage, track, name, start_s, start_s + seconds, microbatch)

    def _send(self, stage: int, instruction: Instruction) -> None:
        peer = instruction.peer
        assert peer is not None
        if instruction.action is Action.SEND_ACTIVATION:
            direction, edge = "F", (stage, peer)
        else:
            direction, edge = "B", (peer, stage)
        if edge not in self.transfer_s:
            raise ValueError(
                f"transfer_s has no entry {edge}, which {instruction} of stage {stage} needs; it "
                f"has {sorted(self.transfer_s)}"
            )
        channel = self._channel(stage, peer, direction)
        start_s = max(self.clock_s[stage], channel.free_at_s)
        end_s = channel.free_at_s = start_s + self.transfer_s[edge]
        channel.inbox.append((instruction.microbatch, end_s))
        track = f"send{direction}->{peer}"
        self._record(stage, track, str(instruction), start_s, end_s, instruction.microbatch)
        if channel.receiver_waits:
            channel.receiver_waits = False
            self.ready.append(peer)

    def _receive(self, stage: int, instruction: Instruction) -> bool:
        """Take the next message of the channel if it has been sent, else say that we wait."""
        peer = instruction.peer
        assert peer is not None
        direction = "F" if instruction.action is Action.RECV_ACTIVATION else "B"
        channel = self._channel(peer, stage, direction)
        if not channel.inbox:
            channel.receiver_waits = True
            return False
        microbatch, arrival_s = channel.inbox.popleft()
        if microbatch != instruction.microbatch:
            raise ValueError(
                f"stage {stage} expects {instruction}, but the next message stage {peer} sends it "
                f"there is of micro-batch {microbatch}; both ends must list the same order"
            )
        self.clock_s[stage] = max(self.clock_s[stage], arrival_s)
        return True

    def _channel(self, source: int, destination: int, direction: str) -> _Channel:
        key = (source, destination, direction)
        if key not in self.channels:
            self.channels[key] = _Channel()
        return self.channels[key]

    def _record(
        self,
        stage: int,
        track: str,
        name: str,
        start_s: float,
        end_s: float,
        microbatch: int | None,
    ) -> None:
        self.events.append(
            Event(
                stage=stage,
                track=track,
                name=name,
                start_s=start_s,
                end_s=end_s,
                microbatch=microbatch,
            )
        )

    def _check_finished(self) -> None:
        waiting = [
            f"stage {stage} in {stream[position]}"
            for stage, (stream, position) in enumerate(
                zip(self.streams, self.position, strict=True)
            )
            if position < len(stream)
        ]
        if waiting:
            raise ValueError(
                f"the streams deadlock, waiting are {', '.join(waiting)}; every message must be "
                f"sent, and sent before its sender waits for anything that depends on it"
            )
        for (source, destination, direction), channel in self.channels.items():
            if channel.inbox:
                raise ValueError(
                    f"stage {destination} never receives send{direction}{channel.inbox[0][0]} of "
                    f"stage {source}; add the receive to its stream"
                )


def _trace_label(kind: str, name: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _check_seconds(value: float, *, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what}={value}: need a finite number of seconds, at least 0")
