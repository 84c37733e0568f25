"""Micro-batches in the middle of a step do what those before them did: written down, not run again.

What a micro-batch's forward, backward or weight half does to other ranks and to memory is recorded
where the executor runs it: for the first micro-batches of a stage, and for the last, whose backward
reduces. Where two in a row are found to be equal (the same messages, the same allocations and
releases, the same work), those between are written to the log as repetitions of them; where they
differ, all are run. A stage of the same rank whose first micro-batch did what that of another did
repeats the other's. Messages between stages, and whatever happens between steps, are the executor's
throughout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.costmodel.schedules import Action, Instruction
from meshwright.executor.ranks import progress
from meshwright.executor.rehearsal.events import Event, Kind
from meshwright.executor.rehearsal.record import Recorder
from meshwright.executor.stages import Pass, PipelineRun, RunStage

LEARNED = 3  # micro-batches of a stage that are run: one like no other, and two to compare
FORWARD = (Action.FORWARD,)
BACKWARD = (Action.BACKWARD, Action.BACKWARD_INPUT)

What = tuple[bool, Action, int]  # whether gradients are made, action, stage
Unit = tuple[int, int]  # stage, micro-batch
Span = tuple[int, int, Unit, Action]  # of allocations by number, and who made them
_NO_SPAN: Span = (0, 0, (-1, -1), Action.FORWARD)


class NotSteadyError(Exception):
    """A micro-batch's forward was repeated, and its backward can't be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allocation:
    """An allocation as an instruction refers to it: the `place`-th of an `action`, so many `stages`
    and micro-batches (`later`) from its own; or, without an action, the one with the number
    `place`, which outlives it; or, without a place, one that others release."""

    action: Action | None = None
    stages: int = 0
    later: int = 0
    place: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A tensor that is handed on, in memory of its own (`place` among the allocations), or in that
    of something `given`, by position, or in that of `kept`."""

    place: int | None
    given: int | None
    kept: torch.Tensor | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What an instruction did: events, with the position of their block; changes of memory, the
    bytes of its allocations, numbered from `start`, and their `places` among the blocks that were
    `entered`, each after so many changes; FLOPs by operator; what it hands on, and what of the
    given (by position) is held afterwards."""

    start: int
    events: tuple[tuple[Event, int | None], ...]
    changes: tuple[tuple[_Allocation, int], ...]
    sizes: tuple[int, ...]
    flops: Mapping[str, int]
    places: tuple[int, ...]
    entered: tuple[tuple[int | None, int], ...]
    made: tuple[_Made, ...]
    holds: frozenset[int]

    @property
    def told(self) -> tuple[tuple[Event, int | None], ...]:
        """The events without what only an estimate needs."""
        return tuple((e, k) for e, k in self.events if e.kind not in (Kind.WORK, Kind.AWAIT))

    def like(self, other: _Record) -> bool:
        """Whether both did the same, each for its micro-batch and stage."""
        own, theirs = (replace(r, start=0, made=(), events=r.told) for r in (self, other))
        return own == theirs


class Repeats:
    """What the instructions of a rank did, over its rehearsal."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.first: dict[What, _Record] = {}
        self.latest: dict[What, _Record] = {}
        self.steady: dict[What, _Record] = {}
        self.spans: list[Span] = []  # of this step, ascending
        self.starts: dict[tuple[Action, Unit], int] = {}  # number of the first allocation

    def begin(self) -> None:
        """Before the instructions of a step."""
        self.spans.clear()
        self.starts.clear()

    def known(self, what: What) -> _Record | None:
        """What an instruction does, if that can be written down without running it."""
        if what not in self.steady and what in self.first:
            for other, record in list(self.steady.items()):
                if other[:2] == what[:2] and self.first[other].like(self.first[what]):
                    self.steady[what] = record
                    break
        return self.steady.get(what)

    @contextmanager
    def recording(
        self, instruction: Instruction, blocks: Sequence[str], given: list[torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        """Record what happens inside, where what is handed on is put into the list. `blocks` are
        the stage's; empties `given`, which is used up."""
        recorder, memory, what = self.recorder, self.recorder.memory, _what(instruction)
        places = {memory.number(x): k for k, x in enumerate(given)}
        given.clear()
        recorder.flush()
        start, events, changes = len(memory.sizes), len(recorder.events), len(memory.changes)
        flops, entered = recorder.flops.copy(), len(memory.entered)
        made: list[torch.Tensor] = []
        yield made
        recorder.flush()
        self._note(instruction, start, len(memory.sizes))
        if what in self.steady:
            return
        at = {name: k for k, name in enumerate(blocks)}
        found = _Record(
            start=start,
            events=tuple(
                (replace(e, where="", block=""), at.get(e.block)) for e in recorder.events[events:]
            ),
            changes=tuple(
                (self._allocation(number, instruction), change)
                for number, change in memory.changes[changes:]
            ),
            sizes=tuple(size for (size,) in memory.sizes[start:]),
            flops=dict(recorder.flops - flops),
            places=tuple(place - entered for place in memory.places[start:]),
            entered=tuple((at.get(b), n - changes) for b, n in memory.entered[entered:]),
            made=tuple(self._made(x, start, places) for x in made),
            holds=frozenset(k for number, k in places.items() if number in memory.held),
        )
        if what in self.latest and self.latest[what].like(found):
            self.steady[what] = found
        self.first.setdefault(what, found)
        self.latest[what] = found

    def again(
        self,
        record: _Record,
        instruction: Instruction,
        blocks: Sequence[str],
        given: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Write down that an instruction does what was recorded; returns what it hands on."""
        recorder, memory = self.recorder, self.recorder.memory
        recorder.flush()
        where = str(progress.activity)
        for event, k in record.events:
            recorder.events.append(replace(event, where=where, block=_name(blocks, k)))
        recorder.flops.update(record.flops)
        start, stop = len(memory.sizes), len(memory.sizes) + len(record.sizes)
        kinds = memory.kinds[record.start : record.start + len(record.sizes)]
        memory.sizes += [[size] for size in record.sizes]
        memory.kinds += kinds
        memory.places += [len(memory.entered) + place for place in record.places]
        self._note(instruction, start, stop)
        entering = deque(record.entered)
        handed = {made.place: made.dtype for made in record.made}
        memories: dict[int | None, torch.Tensor] = {}
        for k, (allocation, change) in enumerate(record.changes):
            while entering and entering[0][1] <= k:
                memory.enter(_name(blocks, entering.popleft()[0]))
            place = allocation.place
            if place in handed and place is not None and _own(allocation, instruction):
                dtype = handed[place]  # memory sees this one
                x = torch.empty(change // dtype.itemsize, dtype=dtype, device=recorder.device)
                memories[place] = x
                memory.name([x], kinds[place])
            elif (number := self._number(allocation, instruction)) is not None:
                memory.changes.append((number, change))
        for block, _ in entering:
            memory.enter(_name(blocks, block))
        return [_tensor(x, given, memories) for x in record.made]

    def _note(self, instruction: Instruction, start: int, stop: int) -> None:
        unit = instruction.stage, instruction.microbatch
        self.spans.append((start, stop, unit, instruction.action))
        self.starts[instruction.action, unit] = start

    def _allocation(self, number: int, instruction: Instruction) -> _Allocation:
        """An allocation as others like this instruction would refer to it."""
        k = bisect_right(self.spans, number, key=lambda span: span[0]) - 1
        found = k >= 0 and number < self.spans[k][1]
        start, _, (stage, microbatch), action = self.spans[k] if found else _NO_SPAN
        if number in self.recorder.memory.held and microbatch != instruction.microbatch:
            return _Allocation(place=number)
        if not found:
            return _Allocation()
        return _Allocation(
            action=action,
            stages=stage - instruction.stage,
            later=microbatch - instruction.microbatch,
            place=number - start,
        )

    def _number(self, allocation: _Allocation, instruction: Instruction) -> int | None:
        """The allocation that is meant by this instruction; None for what tensors release."""
        if allocation.action is None:
            return allocation.place
        assert allocation.place is not None
        action, stage = allocation.action, instruction.stage + allocation.stages
        of = self.steady.get((torch.is_grad_enabled(), action, stage))
        if of is not None and any(x.place == allocation.place for x in of.made):
            return None
        start = self.starts[action, (stage, instruction.microbatch + allocation.later)]
        return start + allocation.place

    def _made(self, x: torch.Tensor, start: int, given: Mapping[int, int]) -> _Made:
        number = self.recorder.memory.number(x)
        own, place = number >= start, given.get(number)
        return _Made(
            place=number - start if own else None,
            given=place,
            kept=None if own or place is not None else x.detach(),
            shape=tuple(x.shape),
            stride=tuple(x.stride()),
            offset=int(x.storage_offset()),
            dtype=x.dtype,
        )


class RepeatingRun(PipelineRun):
    """A step in which micro-batches that are known are not run again."""

    def __init__(self, *args: Any, repeats: Repeats, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.repeats = repeats
        self.needed = _needed(self.stream, self.stages)
        self.repeated: set[Unit] = set()
        self.blocks = {
            k: [block.lowered.name for block in stage.program.blocks]
            for k, stage in self.stages.items()
        }

    def run(self) -> list[torch.Tensor]:
        self.repeats.begin()
        return super().run()

    def run_forward(self, instruction: Instruction) -> Pass:
        unit = s, _ = instruction.stage, instruction.microbatch
        record = None if unit in self.needed else self.repeats.known(_what(instruction))
        if record is not None:
            self.repeated.add(unit)
            received = self.activations.pop(unit, {})
            made = self.repeats.again(record, instruction, self.blocks[s], [*received.values()])
            names = self.stages[s].program.graphs.kept
            return Pass(received=received, produced=dict(zip(names, made, strict=True)))
        given = [*self.activations.get(unit, {}).values()]
        with self.repeats.recording(instruction, self.blocks[s], given) as made:
            done = super().run_forward(instruction)
            made += done.produced.values()
        return done

    def run_backward(self, instruction: Instruction) -> dict[str, torch.Tensor]:
        unit = s, _ = instruction.stage, instruction.microbatch
        given = [*self.passes[unit].received.values(), *self.gradients.get(unit, {}).values()]
        if unit in self.repeated:
            record, done = self._known(instruction), self.passes.pop(unit)
            made = self.repeats.again(record, instruction, self.blocks[s], given)
            self.gradients.pop(unit, None)
            self.put_off[unit] = [given[k] for k in record.holds]
            names = self.stages[s].program.differentiable(done)
            return dict(zip(names, made, strict=True))
        with self.repeats.recording(instruction, self.blocks[s], given) as made:
            found = super().run_backward(instruction)
            made += found.values()
        return found

    def run_weight(self, instruction: Instruction) -> None:
        unit = s, _ = instruction.stage, instruction.microbatch
        if unit in self.repeated:
            self.repeats.again(self._known(instruction), instruction, self.blocks[s], [])
            self.put_off.pop(unit)
            return
        with self.repeats.recording(instruction, self.blocks[s], []):
            super().run_weight(instruction)

    def _known(self, instruction: Instruction) -> _Record:
        record = self.repeats.known(_what(instruction))
        if record is None:
            raise NotSteadyError(str(instruction))
        return record


def _needed(stream: Sequence[Instruction], stages: Mapping[int, RunStage]) -> set[Unit]:
    """The micro-batches that are run in any case, where there are backwards: of each stage the
    first, and the one whose backward is the last of the step; and the next ones of the stage that
    comes first, in forwards and in backwards, of those with the same graphs."""
    found = {(k, stage.last) for k, stage in stages.items()}
    graphs = {
        k: tuple(id(block.lowered.module) for block in stage.program.blocks)
        for k, stage in stages.items()
    }
    for actions in (FORWARD, BACKWARD):
        learning: dict[tuple[int, ...], int] = {}
        runs: Counter[int] = Counter()
        for i in stream:
            if i.action in actions:
                learner = learning.setdefault(graphs[i.stage], i.stage)
                if runs[i.stage] < (LEARNED if i.stage == learner else 1):
                    found.add((i.stage, i.microbatch))
                runs[i.stage] += 1
    return found if any(i.action in BACKWARD for i in stream) else set()


def _name(blocks: Sequence[str], position: int | None) -> str:
    return "" if position is None else blocks[position]


def _what(instruction: Instruction) -> What:
    return torch.is_grad_enabled(), instruction.action, instruction.stage


def _own(allocation: _Allocation, instruction: Instruction) -> bool:
    """Whether an instruction made the allocation itself."""
    own = instruction.action, 0, 0
    return (allocation.action, allocation.stages, allocation.later) == own


def _tensor(
    made: _Made, given: Sequence[torch.Tensor], memories: Mapping[int | None, torch.Tensor]
) -> torch.Tensor:
    if made.kept is not None:
        return made.kept
    of = given[made.given] if made.given is not None else memories[made.place]
    return of.detach().as_strided(made.shape, made.stride, made.offset).data  # of no base
