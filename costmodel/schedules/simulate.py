"""Event simulation of instruction streams: the seconds of one training step, with the reasons.

The semantics are the executor's. Each device computes in the order of its stream, one thing at a
time. Receives are posted ahead, so a compute starts as soon as its device is free and its messages
are there. Sends run beside the computes; the channel from a device to another carries one message
at a time, in the order sent. An overlapped F and B (F&B), which software has that isn't ours, are
one thing: they start when the inputs of both are there, take F + B less what the overlap saves, and
send their results when both are done. At the end each stage reduces its gradients and steps its
optimizer, one after the other.

What waits for what is compiled once per schedule; a price is one pass over it.

Seconds over the ideal time m·v·(F + B) of equal stages with F, B = I + W seconds each, transfers
that cost nothing and no reduction, on p devices with v stages each:

    gpipe, 1f1b, eager_1f1b     (p-1)(F + B)               a part (p-1)/m of the ideal
    interleaved_1f1b            (p-1)(F + B)               (p-1)/(m·v); m a multiple of p
    zb_h1                       (p-1)(F + I - W)           W <= F, I and m >= p
    zb_h2                       (p-1) max(F, F + I - 2W)   W <= F, I and m >= 2p-1
    zb_h2                       (p-1)(F + I - 2W)          W <= F, I and m >= 2p-1; `validated_s`
    zb_v                        2(p-1)(F - W)              W <= F = I and m >= 2p-1; `validated_s`
    dualpipe_v                  (p-1)(F + I - W)           W <= F = I and m >= 2p
    dualpipe_v, paired          (p-1)(F&B + B - 3W)        W <= F = I and m >= 2p; the most that a
                                                           device idles, if overlap shortens F&B
    chimera                     (p-2)(F + K (B - F))       F <= B, m = K·p; stages as for v = 1
    dualpipe                    (p/2-1)(F + I - W)         W <= F = I, m >= 2p; likewise

so zb_h2 and zb_v have no bubble where F = I = W, but that of a common start and end, (p-1) F, which
is none where steps are validated afterwards. For stages tᵢ = Fᵢ + Bᵢ that are not equal

    gpipe          T = Σ tᵢ + (m-1)(max Fᵢ + max Bᵢ)                       exactly
    1f1b           max over k of (Σ_{i<k} tᵢ + m·t_k)  <=  T  <=  the gpipe time
    any            T >= the longest that a device computes, and grows with every time

Alpa's objective Σ tᵢ + (m-1)·max tᵢ is the gpipe time when one stage is the slowest in both
directions (always so when all stages have the same B/F). For 1f1b it is then an upper bound. With
the same B/F everywhere it is exact when the slowest stage is the last, and otherwise too high by
at most the sum of t over the stages after it, whose work hides behind its own. When different
stages are slowest in the two directions, gpipe takes longer than Alpa's formula, and 1f1b can.

Alpa's objective does not know transfers either. With cᵢ seconds on each link of a chain,

    gpipe          T = Σ tᵢ + 2 Σ cᵢ + (m-1)(max(Fᵢ, cᵢ) + max(Bᵢ, cᵢ))     exactly

so overlap hides all but the filling. 1f1b holds too few micro-batches to hide them: a round trip
of stage 0 takes Σ tᵢ + 2 Σ cᵢ, and no more than p micro-batches are under way in it, so each costs
at least the p-th part of that however fast the sends overlap. Hence eager_1f1b, which holds about
twice as many, and hence this simulation.

The upper bound of 1f1b: along any chain of dependent computes, stage + micro-batch grows by one
from each F to the next F, whether the chain moves to the next stage, stays in the warm-up or
returns through Bs. So a chain whose F reach stage J holds at most m + J of them and at least one
of each stage up to J: at most ΣF + (m-1)·max F seconds. Backwards in time the same holds for B.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.schedules.early import early_parts
from meshwright.costmodel.schedules.fills import Floats
from meshwright.costmodel.schedules.held import _moments, in_flight
from meshwright.costmodel.schedules.orders import Action
from meshwright.costmodel.schedules.schedule import (
    FORWARD_MESSAGES,
    RECEIVES,
    SENDS,
    Instruction,
    ScheduleError,
    Streams,
    _build,
    build_schedule,
)
from meshwright.costmodel.schedules.table import (
    _TABLE,
    SCHEDULES,
    Pipeline,
    Schedule,
    compute_orders,
)
from meshwright.profiles.inputs import shown

T = TypeVar("T", float, Floats)
_COMPUTES = (Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage: F and B of one micro-batch, and what is left to do once per step.

    `reduce_s` is the gradient reduction that the last backward does not hide. `weight_s` is the
    part W of `backward_s` that schedules may put off, 0 where the split is not known. `overlap_s`
    is what an F of this stage saves when it runs together with a B of another micro-batch, because
    the communication inside one of the two hides behind the computation of the other.
    """

    forward_s: float
    backward_s: float
    reduce_s: float
    optimizer_s: float
    weight_s: float = 0.0
    overlap_s: float = 0.0

    def __post_init__(self) -> None:
        for seconds in fields(self):
            _check_seconds(getattr(self, seconds.name), what=seconds.name)
        for part, total in (("weight_s", "backward_s"), ("overlap_s", "forward_s")):
            if getattr(self, part) > getattr(self, total):
                raise ScheduleError(
                    f"{part}={getattr(self, part)} is more than {total}={getattr(self, total)}, of "
                    f"which it is a part"
                )


# of a slice: the times of each stage, and the seconds of its messages
SliceTimes: TypeAlias = tuple[Sequence[StageTimes], Mapping[tuple[int, int], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that occupied a track of a device from `start_s` to `end_s`.

    Tracks are "compute" (F, B, I, W, optimizer), "reduce", and one per channel that a stage of the
    device sends on: "sendF->1" for activations to stage 1, "sendB->0" for gradients to stage 0.
    Events of one track do not overlap. `microbatch` is None for what happens once per step, `stage`
    for what a device does for all its stages at once, which only a measured step tells.
    """

    stage: int | None
    track: str
    name: str
    start_s: float
    end_s: float
    microbatch: int | None


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One training step: what happened when, and how much of it was waiting.

    `stages_of` are the stages of each device. `step_time_s` is the time from a common start until
    everything has ended, `pipeline_s` until the last compute has. `busy_s` is the seconds that each
    device computes F, B, I and W. `span_s` is the time from the start of each device's first
    compute to the end of its optimizer. The events are put together when first asked for.
    """

    stages_of: tuple[tuple[int, ...], ...]
    step_time_s: float
    pipeline_s: float
    busy_s: tuple[float, ...]
    span_s: tuple[float, ...]
    _program: Program = field(repr=False, compare=False)
    _end_s: Sequence[float] = field(repr=False, compare=False)

    @property
    def period_s(self) -> float:
        """Seconds from one step to the next where each device starts its next one as soon as its
        optimizer is done (zb_h2, zb_v). Optimizer steps are then checked, and undone if need be,
        afterwards: a global gradient norm would make all devices wait."""
        return max(self.span_s, default=0.0)

    def validated_s(self, streams: Streams, verdict_s: float) -> float:
        """`period_s` of steps that are validated afterwards: the verdict takes `verdict_s` from the
        last reduction on, and each device waits for it behind its early forwards (`early_parts`).
        `streams` are those that were simulated."""
        program, end_s = self._program, self._end_s
        node_of = {i: n for n, i in enumerate(program.instructions, start=1) if i is not None}
        of_stages = program.num_stages * len(TimeSlot)
        reduced = (
            end_s[n]
            for n, (_, _, index) in enumerate(program.steps, start=1)
            if 0 <= (at := index - program.once) < of_stages
            if at % len(TimeSlot) == TimeSlot.REDUCE
        )
        known_s = max(reduced, default=0.0) + verdict_s
        waits = [0.0]
        for stream, early in zip(streams, early_parts(streams), strict=True):
            computes = (node_of[i] for i in stream[early.count :] if i.action in _COMPUTES)
            if node := next(computes, 0):
                waits.append(known_s - _start_s(program, end_s, node))
        return max(self.period_s, *waits)

    @property
    def bubble_fraction(self) -> float:
        """Part of the devices' seconds in the pipeline that no compute fills, in [0, 1]."""
        available_s = len(self.busy_s) * self.pipeline_s
        if available_s == 0:
            return 0.0
        return max(0.0, 1.0 - sum(self.busy_s) / available_s)  # rounding may leave -1e-16

    def validated_bubble(self, period_s: float) -> float:
        """`bubble_fraction` of steps that follow each other so, without the reductions and
        optimizer steps of the device that takes longest."""
        once_s = self.step_time_s - self.pipeline_s
        available_s = len(self.busy_s) * (period_s - once_s)
        return max(0.0, 1.0 - sum(self.busy_s) / available_s) if available_s > 0 else 0.0

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All computes, sends and reductions, by start."""
        program, end_s, events = self._program, self._end_s, list[Event]()
        last = program.once + program.num_stages * len(TimeSlot)
        optimizers = range(program.once + TimeSlot.OPTIMIZER, last, len(TimeSlot))
        for n, instruction in enumerate(program.instructions, start=1):
            if instruction is None:
                continue
            event = event_of(instruction, start_s=_start_s(program, end_s, n), end_s=end_s[n])
            if program.steps[n - 1][2] in optimizers:
                event = replace(event, track="compute", name="optimizer")
            events.append(event)
        return tuple(sorted(events, key=attrgetter("start_s", "stage", "track")))

    def chrome_trace(self) -> dict[str, Any]:
        """The step in Chrome's trace event format, one process per device."""
        device_of: dict[int | None, int] = {
            stage: d for d, stages in enumerate(self.stages_of) for stage in stages
        }
        events = [(device_of[event.stage], event) for event in self.events]
        return chrome_trace(self.stages_of, range(len(self.stages_of)), events)


def chrome_trace(
    stages_of: Sequence[Sequence[int]],
    processes: Sequence[int],
    events: Iterable[tuple[int, Event]],
) -> dict[str, Any]:
    """Events in Chrome's trace event format: one thread per track of a process.

    `stages_of` are the stages of each device, `processes` the device of each process, `events` in
    the order of their starts, each with its process. The result is ready for `json.dump` and opens
    in Perfetto or chrome://tracing. Where devices own several stages, the events say which one they
    are of.
    """
    alone = all(len(stages) == 1 for stages in stages_of)
    threads: dict[tuple[int, str], int] = {}
    trace: list[dict[str, Any]] = []
    for process, device in enumerate(processes):
        of_stages = ", ".join(map(str, stages_of[device]))
        label = f"stage {of_stages}" if alone else f"device {device}: stages {of_stages}"
        trace.append(_trace_label("process_name", label, pid=process, tid=0))
    for process, event in events:
        key = (process, event.track)
        if key not in threads:
            threads[key] = len(threads)
            trace.append(_trace_label("thread_name", event.track, pid=process, tid=threads[key]))
        of_all = alone or event.stage is None
        trace.append(
            {
                "ph": "X",
                "name": event.name if of_all else f"{event.name} of stage {event.stage}",
                "cat": event.track,
                "pid": process,
                "tid": threads[key],
                "ts": event.start_s * 1e6,  # the format counts in microseconds
                "dur": (event.end_s - event.start_s) * 1e6,
                "args": {} if event.microbatch is None else {"microbatch": event.microbatch},
            }
        )
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def simulate(
    streams: Streams,
    times: Sequence[StageTimes],
    transfer_s: Mapping[tuple[int, int], float],
    slices: Sequence[SliceTimes] = (),
) -> Timeline:
    """The timeline of a schedule's streams, one per device.

    `times` are those of each stage, the means of token `slices` where these have times of their
    own. `transfer_s` is the seconds of one micro-batch's activations
    from a source to a destination stage; its gradients take the same on the way back, and the two
    directions do not share a channel. Raises ValueError when devices wait for each other for ever,
    when the two ends of a channel disagree, or when a time is missing or not a number of seconds.
    """
    program = program_of(streams, len(slices))
    seconds = _seconds(program, times, transfer_s)
    of_slices = (_seconds(program, *slice_times) for slice_times in slices)
    end_s = _play(program, [*chain(*of_slices), *seconds])
    return Timeline(
        stages_of=program.stages_of,
        step_time_s=max(end_s),
        pipeline_s=max((end_s[n] for n in program.last_computes), default=0.0),
        busy_s=tuple(
            sum(count * seconds[index] for index, count in counts.items())
            for counts in program.computes
        ),
        span_s=tuple(
            end_s[last] - _start_s(program, end_s, first)
            for first, last in zip(program.first_computes, program.last_nodes, strict=True)
        ),
        _program=program,
        _end_s=end_s,
    )


def step_times(
    streams: Streams,
    *,
    forward_s: Floats,
    backward_s: Floats,
    weight_s: Floats,
    reduce_s: Floats,
    optimizer_s: Floats,
    transfer_s: Mapping[tuple[int, int], float],
) -> Floats:
    """(N,): `Timeline.step_time_s` of N pipelines at once, as `simulate` finds it, where nothing
    overlaps: of seconds of their stages, (N, stages) each, as in `StageTimes`."""
    program = program_of(streams)
    once = reduce_s, optimizer_s
    slots = np.stack(_by_slot(forward_s, forward_s, backward_s, weight_s, *once), axis=2)
    count = len(slots)
    seconds = [*np.ascontiguousarray(slots.reshape(count, -1).T)]
    seconds += [np.full(count, transfer_s[edge]) for edge in program.edges]
    seconds.append(np.zeros(count))  # NOTHING
    table = np.zeros((1 + len(program.steps), count))
    ends = [*table]
    for end_s, (first, second, index) in zip(ends[1:], program.steps, strict=True):
        np.maximum(ends[first], ends[second], out=end_s)
        end_s += seconds[index]
    steps: Floats = table.max(axis=0)
    return steps


def _by_slot(forward: T, overlapped: T, backward: T, weight: T, reduce: T, optimizer: T) -> list[T]:
    """Seconds of a stage in the order of `TimeSlot`."""
    return [forward, overlapped, backward, backward - weight, weight, reduce, optimizer]


def _seconds(
    program: Program, times: Sequence[StageTimes], transfer_s: Mapping[tuple[int, int], float]
) -> list[float]:
    """Seconds that the steps of the program index."""
    if len(times) != program.num_stages:
        raise ScheduleError(
            f"times has {len(times)} entries for {program.num_stages} stages; give one each"
        )
    for (source, destination), value in transfer_s.items():
        _check_seconds(value, what=f"transfer_s[{source}, {destination}]")
    seconds: list[float] = []
    for stage in times:
        passes = stage.forward_s, stage.forward_s - stage.overlap_s, stage.backward_s
        seconds += _by_slot(*passes, stage.weight_s, stage.reduce_s, stage.optimizer_s)
    for edge, instruction in program.edges.items():
        if edge not in transfer_s:
            raise ScheduleError(
                f"transfer_s has no entry {edge}, which {instruction} of stage {instruction.stage} "
                f"needs; it has {sorted(transfer_s)}"
            )
        seconds.append(transfer_s[edge])
    return [*seconds, 0.0]


def _play(program: Program, seconds: Sequence[float]) -> list[float]:
    """Seconds at which each node ends. Pricing a plan costs this loop, hence no call in it."""
    end_s = [0.0]
    append = end_s.append
    for first, second, index in program.steps:
        a, b = end_s[first], end_s[second]
        append((a if a > b else b) + seconds[index])
    return end_s


def _start_s(program: Program, end_s: Sequence[float], n: int) -> float:
    if n == 0:
        return 0.0
    first, second, _ = program.steps[n - 1]
    return max(end_s[first], end_s[second])


def event_of(instruction: Instruction, *, start_s: float, end_s: float) -> Event:
    """An instruction on the track that shows it."""
    action, track = instruction.action, "compute"
    if action in SENDS:
        direction = "F" if action is Action.SEND_ACTIVATION else "B"
        track = f"send{direction}->{instruction.peer}"
    elif action is Action.REDUCE_GRADIENTS:
        track = "reduce"
    return Event(
        stage=instruction.stage,
        track=track,
        name=str(instruction),
        start_s=start_s,
        end_s=end_s,
        microbatch=None if action is Action.REDUCE_GRADIENTS else instruction.microbatch,
    )


def _trace_label(kind: str, name: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _check_seconds(value: float, *, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ScheduleError(f"{what}={value}: need a finite number of seconds, at least 0")


# --- compiled schedules ---------------------------------------------------------------------------

# Instruction streams compiled to arithmetic, so that pricing one plan costs a loop over numbers.
#
# A compute waits for the one before it on its device and for its messages, a message for the
# compute that made it and for the one before it on its channel, whatever the seconds:
#
#     end(n) = max(end(a), end(b)) + seconds of n                        for nodes n = 1, 2, ..
#
# with the two predecessors a, b < n, node 0 being the start of the step. A compute that waits for
# more than one message gets a node without seconds for each of the others. Compiling runs the
# streams one by one, each until it waits for a message that has not been sent, which is linear in
# the number of instructions and finds every fault of the streams: deadlocks, messages that nobody
# receives, ends of a channel that disagree.
#
# A channel leads from a device to a device and carries one message at a time, in the order sent, be
# they activations or gradients and whichever stages they belong to.


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
    with the first instruction that needs it; then a zero. Those of what happens `once` a step begin
    there. `instructions` are those of the steps,
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
    once: int = 0

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages_of))


@lru_cache(maxsize=64)
def program_of(streams: Streams, slices: int = 0) -> Program:
    """The program of the streams, compiled once. Where `slices` have seconds of their own, those of
    each come one after the other, before the means, which what happens once has."""
    if not slices:
        return _Compiler(streams).run()
    program = program_of(streams)
    width = program.num_stages * len(TimeSlot) + len(program.edges) + 1
    once = slices * width

    def place(index: int, instruction: Instruction | None) -> int:
        if instruction is None:
            return index
        if instruction.action is Action.REDUCE_GRADIENTS:
            return once + index
        return width * (instruction.microbatch % slices) + index

    steps = zip(program.steps, program.instructions, strict=True)
    return replace(program, steps=tuple((a, b, place(n, of)) for (a, b, n), of in steps), once=once)


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


# --- schedules of users ---------------------------------------------------------------------------

TRIED = ((2, 3), (2, 8), (4, 4), (4, 9))  # devices and micro-batches of a new schedule


def register_schedule(name: str, record: Schedule) -> None:
    """Add a pipeline schedule: `Overrides(schedule=name)` takes it, a free search tries it unless
    its record says otherwise, and plans with it run. Ranks that run such a plan register it, too.

    A few pipelines are simulated: each stage runs the forward of every micro-batch and, after it,
    its backward (as two halves where the record splits it), no device waits for ever, and none
    holds more micro-batches than the record's `in_flight`. Raises ValueError for a name that is
    taken, or is none, and for a record that is none, or whose orders are wrong.
    """
    place = "register_schedule"
    if not isinstance(name, str) or not name.isidentifier() or name in SCHEDULES:
        raise ScheduleError.refused(f"{place}: name", name, legal="a new identifier")
    if not isinstance(record, Schedule):
        what = f" is {shown(record)}"
        raise ScheduleError(what, place=f"{place}: record", legal="a meshwright.Schedule")
    _TABLE[name] = record
    try:
        for slices in (1, 2, 3) if record.sliced else (1,):
            for p, m in TRIED:
                if record.runs(m, p):
                    stages = p * (record.stages_per_device or 2)
                    _check_streams(Pipeline(name, stages, m * slices, p, slices))
    except Exception as error:  # whatever its functions do
        del _TABLE[name]
        raise ScheduleError(
            f": {type(error).__name__}: {error}",
            place=f"{place}: {name}",
            legal="a record whose orders run every micro-batch on each stage once",
            way_out="mend its order, placement or in_flight"
            + ", or say sliced=False" * record.sliced,
        ) from error
    finally:  # of a record of that name that was refused before
        for remembered in (compute_orders, _build, _moments):
            remembered.cache_clear()


def _check_streams(pipeline: Pipeline) -> None:
    """Raise `ScheduleError` unless the streams of a pipeline run all that there is to run, and hold
    what the schedule's record says."""
    record, passes = pipeline.record, pipeline.num_microbatches // pipeline.record.copies
    copies = record.pipelines(pipeline.num_stages)
    sends = dict.fromkeys((edge for copy in copies for edge in pairwise(copy)), 0.0)
    streams = build_schedule(pipeline, sends)
    unit = StageTimes(forward_s=1.0, backward_s=2.0, reduce_s=0.0, optimizer_s=0.0, weight_s=1.0)
    simulate(streams, [unit] * pipeline.num_stages, sends)
    whole, halves = (Action.BACKWARD,), (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
    for stages, stream in zip(pipeline.placed, streams, strict=True):
        for stage in stages:
            ran = defaultdict[int, list[Action]](list)
            held = most = 0
            for i in stream:
                if i.stage == stage and i.action in (Action.FORWARD, *whole, *halves):
                    ran[i.microbatch].append(i.action)
                    held += (i.action is Action.FORWARD) - (i.action in (whole[0], halves[1]))
                    most = max(most, held)
            legal = [
                [Action.FORWARD, *whole],
                *[[Action.FORWARD, *halves]] * record.splits_backward,
            ]
            for microbatch, actions in ran.items():
                if actions not in legal:
                    run = ", ".join(actions)
                    raise ScheduleError(f"stage {stage} runs {run} of micro-batch {microbatch}")
            if len(ran) != passes:
                raise ScheduleError(f"stage {stage} runs {len(ran)} of {passes} micro-batches")
            if most > (said := in_flight(pipeline, stage)):
                raise ScheduleError(
                    f"stage {stage} holds {most} micro-batches, its in_flight {said}"
                )
