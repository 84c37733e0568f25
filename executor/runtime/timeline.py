"""Chrome trace of a measured step, with the tracks and names of the simulated one.

Each rank records when its instructions begin and end, then rank 0 puts them on one clock and one
trace, a process per rank under the name of its device group. Events are those of the simulator:

    F, B, I, W   from the start of the computation to its end. A message that has not come yet is
                 waited for before, so that waiting is a gap. The first F of a step also waits for
                 the weights that ZeRO gathers
    send         from the moment it is posted, or the end of the one before it, until the receiver
                 has it. A receiver that computes meanwhile takes it late: an upper bound
    reduce       from the last backward of its stage, or the end of the one before it, until the
                 next begins, the last until all gradients are there: what the backward has not
                 hidden

and two on the compute track that the simulation does not place in time: "refresh", which starts
ZeRO's all-gathers and casts the weights, and "deliver", which adds the gradients to `.grad`. The
optimizer's step is the user's, and not measured.

On the GPU, times are those of the stream: CUDA events are recorded between kernels and read after
the step, so that measuring waits for nothing. Clock offsets are taken by rank 0: of `ROUNDS` round
trips to a rank the fastest gives its offset, exact to half of its duration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.schedules import Action, Event, Instruction, chrome_trace, event_of
from meshwright.executor.devices import Clock
from meshwright.executor.ranks import run_on_first
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.runtime.state import group_of
from meshwright.executor.stages import Phase
from meshwright.profiles.inputs import check_writable, write_text

PLACE = "timeline: path"
ROUNDS = 8  # round trips per clock offset
COMPUTES = (Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
RECEIVE_OF = {
    Action.SEND_ACTIVATION: Action.RECV_ACTIVATION,
    Action.SEND_GRADIENT: Action.RECV_GRADIENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step without its optimizer, measured or predicted.

    `step_s` is from the first event to the last, `pipeline_s` from the first event to the end of
    the last computation, `busy_s` the time that each device group (its busiest rank) computes, by
    its name in the trace.
    """

    step_s: float
    pipeline_s: float
    busy_s: Mapping[str, float]

    @property
    def bubbles(self) -> dict[str, float]:
        """The bubble fraction of each device group, in [0, 1]: its idle part of `pipeline_s`."""
        return {name: max(0.0, 1 - busy / self.pipeline_s) for name, busy in self.busy_s.items()}

    @property
    def bubble_fraction(self) -> float:
        """The mean bubble fraction of the device groups."""
        return sum(self.bubbles.values()) / len(self.busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A timed step: its loss, measured and predicted times. `str()` is a table of both."""

    loss: torch.Tensor
    measured: StepTimes
    predicted: StepTimes

    def __str__(self) -> str:
        measured, predicted = self.measured, self.predicted
        rows = [("bubble", measured.bubble_fraction, predicted.bubble_fraction)]
        bubbles = measured.bubbles.items()
        rows += [(f"  {name}", bubble, predicted.bubbles[name]) for name, bubble in bubbles]
        return "\n".join(
            [
                f"step without optimizer: {measured.step_s * 1e3:.3g} ms, predicted "
                f"{predicted.step_s * 1e3:.3g} ms",
                *(f"{name}: {bubble:.1%}, predicted {other:.1%}" for name, bubble, other in rows),
            ]
        )


def step_times(trace: Mapping[str, Any]) -> StepTimes:
    """The times of a step from its Chrome trace, simulated or measured."""
    names: dict[int, str] = {}
    busy_us: dict[int, float] = {}
    first, last, last_compute = float("inf"), 0.0, 0.0
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
            busy_us[event["pid"]] = 0.0
        if event["ph"] != "X" or event["name"].startswith("optimizer"):
            continue
        end = event["ts"] + event["dur"]
        first, last = min(first, event["ts"]), max(last, end)
        if event["cat"] == "compute" and "microbatch" in event["args"]:
            busy_us[event["pid"]] += event["dur"]
            last_compute = max(last_compute, end)
    busy_s: dict[str, float] = {}
    for pid, name in names.items():
        busy_s[name] = max(busy_s.get(name, 0.0), busy_us[pid] / 1e6)
    return StepTimes(
        step_s=(last - first) / 1e6, pipeline_s=(last_compute - first) / 1e6, busy_s=busy_s
    )


# --- on each rank ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An instruction or phase that a rank ran, in seconds of its own clock. `targets` are the ranks
    that a send goes to."""

    what: Instruction | Phase
    start_s: float
    end_s: float
    targets: tuple[int, ...] = ()


RankTiming = tuple[float, Sequence[Span]]  # of a rank: its clock's offset in seconds, its spans


class Stopwatch:
    """Observer of a step that records when each instruction and phase begins and ends, by a clock
    of its own, for which it waits for the device, or by one that runs already."""

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self.records: list[tuple[Instruction | Phase, Any, Any]] = []
        self.clock = clock or Clock(device)

    def __call__(self, what: Instruction | Phase, run: Callable[[], None]) -> None:
        start = self.clock.now()
        run()
        self.records.append((what, start, self.clock.now()))

    def read(self) -> list[tuple[Instruction | Phase, float, float]]:
        """The (what, start, end) records in seconds of this rank's clock. Waits for the GPU."""
        whats, starts, ends = zip(*self.records, strict=True) if self.records else ((), (), ())
        seconds = map(self.clock.seconds, (starts, ends))
        return list(zip(whats, *seconds, strict=True))

    def durations(self) -> list[tuple[Instruction | Phase, float]]:
        """The seconds of each record. Waits for the GPU."""
        between = self.clock.between
        return [(what, between(start, end)) for what, start, end in self.records]


def timed_step(
    runtime: Runtime, batch: Any, path: str | Path, simulated: Mapping[str, Any]
) -> MeasuredStep:
    """Run one training step, and write the trace of all ranks from rank 0. Collective.

    `simulated` is the trace of the simulated step. Raises OSError, on all ranks and before the
    step, where rank 0 can't write to `path`.
    """
    group = group_of(runtime)
    run_on_first(group, lambda: check_writable(path, PLACE))
    if group is not None:
        dist.barrier(group)
    watch = Stopwatch(runtime.place.device)
    loss = runtime.train_step(batch, observe=watch)
    spans = [
        Span(what=what, start_s=start, end_s=end, targets=_targets(runtime, what))
        for what, start, end in watch.read()
    ]
    timings = _gathered((_offset_s(group), spans), group)

    def write() -> StepTimes:
        trace = _trace(runtime, timings)
        write_text(path, json.dumps(trace), PLACE)
        return step_times(trace)

    measured = run_on_first(group, write)
    return MeasuredStep(loss=loss, measured=measured, predicted=step_times(simulated))


def _gathered(timing: RankTiming, group: dist.ProcessGroup | None) -> list[RankTiming]:
    """All ranks' timings, on rank 0."""
    if group is None:
        return [timing]
    timings: list[Any] = [None] * dist.get_world_size(group)
    first = dist.get_rank(group) == 0
    dist.gather_object(timing, timings if first else None, group=group)
    return timings


def _targets(runtime: Runtime, what: Instruction | Phase) -> tuple[int, ...]:
    """The ranks that a send goes to."""
    if not isinstance(what, Instruction) or what.action not in RECEIVE_OF:
        return ()
    channels = runtime.planned.stages[what.stage].channels(what)
    return tuple(
        dict.fromkeys(piece.target for channel in channels.values() for piece in channel.outgoing)
    )


def _offset_s(group: dist.ProcessGroup | None) -> float:
    """Seconds to add to this rank's clock to get rank 0's. Collective: rank 0 asks one rank after
    the other."""
    if group is None:
        return 0.0
    buffer = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank(group) == 0:
        for rank in range(1, dist.get_world_size(group)):
            trips = []
            for _ in range(ROUNDS):
                asked = time.perf_counter()
                dist.send(buffer, rank, group=group)
                dist.recv(buffer, rank, group=group)
                answered = time.perf_counter()
                trips.append((answered - asked, (asked + answered) / 2 - float(buffer)))
            dist.send(torch.tensor([min(trips)[1]], dtype=torch.float64), rank, group=group)
        return 0.0
    for _ in range(ROUNDS):
        dist.recv(buffer, 0, group=group)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), 0, group=group)
    dist.recv(buffer, 0, group=group)
    return float(buffer)


# --- on rank 0 ------------------------------------------------------------------------------------


def _trace(runtime: Runtime, timings: Sequence[RankTiming]) -> dict[str, Any]:
    """All ranks' spans as a Chrome trace that begins at zero."""
    stages, groups = runtime.plan.stages, runtime.plan.devices
    stages_of = [[k for k, stage in enumerate(stages) if stage.ranks == ranks] for ranks in groups]
    group_of = {rank: g for g, ranks in enumerate(groups) for rank in ranks}
    origin_s = min(offset + span.start_s for offset, spans in timings for span in spans)
    ended_s = {
        (rank, span.what): offset + span.end_s - origin_s
        for rank, (offset, spans) in enumerate(timings)
        for span in spans
    }
    events = [
        (rank, event)
        for rank, (offset, spans) in enumerate(timings)
        for event in rank_events(spans, offset - origin_s, ended_s)
    ]
    processes = [group_of[rank] for rank in range(len(timings))]
    return chrome_trace(stages_of, processes, sorted(events, key=lambda item: item[1].start_s))


def rank_events(
    spans: Sequence[Span], shift_s: float, ended_s: Mapping[tuple[int, Any], float]
) -> list[Event]:
    """The trace events of one rank, its clock shifted by `shift_s`. `ended_s` gives the end of each
    (rank, instruction) on the common clock: a send ends when it is received."""
    events: list[Event] = []
    free_s: dict[str, float] = {}  # track -> the end of its last send
    for span in spans:
        what, start_s, end_s = span.what, span.start_s + shift_s, span.end_s + shift_s
        if isinstance(what, Phase):
            if what is not Phase.REDUCE:
                events.append(
                    Event(
                        stage=None,
                        track="compute",
                        name=what.value,
                        start_s=start_s,
                        end_s=end_s,
                        microbatch=None,
                    )
                )
        elif what.action in RECEIVE_OF:
            received = _receive_of(what)
            posted = event_of(what, start_s=start_s, end_s=end_s)
            start_s = max(start_s, free_s.get(posted.track, start_s))
            end_s = max(start_s, end_s, *(ended_s[rank, received] for rank in span.targets))
            free_s[posted.track] = end_s
            events.append(replace(posted, start_s=start_s, end_s=end_s))
        elif what.action in COMPUTES:
            events.append(event_of(what, start_s=start_s, end_s=end_s))
    return [*events, *_reductions(spans, shift_s)]


def _receive_of(send: Instruction) -> Instruction:
    """The receive that matches a send."""
    assert send.peer is not None
    return Instruction(
        action=RECEIVE_OF[send.action], stage=send.peer, microbatch=send.microbatch, peer=send.stage
    )


def _reductions(spans: Sequence[Span], shift_s: float) -> list[Event]:
    """The gradient reductions of a rank's stages: each ends where the next begins, the last with
    the phase that waits for all."""
    started = [
        (span.what, span.start_s + shift_s)
        for span in spans
        if isinstance(span.what, Instruction) and span.what.action is Action.REDUCE_GRADIENTS
    ]
    (end_s,) = (span.end_s + shift_s for span in spans if span.what is Phase.REDUCE)
    ends = [*(start_s for _, start_s in started[1:]), end_s]
    return [
        event_of(what, start_s=start_s, end_s=end_s)
        for (what, start_s), end_s in zip(started, ends, strict=True)
    ]
