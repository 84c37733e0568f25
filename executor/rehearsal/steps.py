"""One rank's part of a rehearsal, in a world where nobody else is.

torch's "fake" process group takes the rank's part in collectives; fake tensors have shapes, dtypes
and memory. The optimizer makes its states; then a step is taken as it would be any time later, with
clipping and the optimizer's step, a checkpoint is planned as far as that goes before the first
file, and an evaluation is run where the model has one. The recorder (`record.py`) writes it down.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.costmodel.schedules import Action, Instruction
from meshwright.executor import stand_in
from meshwright.executor.checkpoint import planned_save
from meshwright.executor.devices import HOST, has_streams
from meshwright.executor.errors import RehearsalError
from meshwright.executor.host_values import noting_unrun
from meshwright.executor.parameters import clip_
from meshwright.executor.ranks import progress
from meshwright.executor.rehearsal.events import Event, Kind, RankLog
from meshwright.executor.rehearsal.optimizers import MakeOptimizer, line_of, made_of, step
from meshwright.executor.rehearsal.record import Recorder
from meshwright.executor.rehearsal.result import BATCH, GRADIENTS, STATES, WEIGHTS
from meshwright.executor.runtime import RunOptions, Runtime
from meshwright.executor.stages import CheckedPlan, Observer, Pass, Phase, PipelineRun, RunStage

RECEIVES = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)


def rank_log(
    checked: CheckedPlan,
    model: nn.Module,
    batch: Callable[[], Any],
    optimizer: MakeOptimizer,
    *,
    rank: int,
    evaluates: bool,
    recorder: Callable[[], Recorder] = Recorder,
    repeats: bool = True,
) -> RankLog:
    """The log of one rank, on a recorder's kind of device; where it `repeats`, micro-batches that
    do the same are run once."""
    made = recorder()
    known = made.known or stand_in.Known()
    mode = made.fakes or stand_in.KnownFakes(known.results)
    # slices are not alike, and passes that are left to the next step are not of this one
    repeats = repeats and not checked.plan.slices and checked.plan.record.flushes
    pipeline = partial(RepeatingRun, repeats=Repeats(made)) if repeats else PipelineRun
    options = RunOptions(device=made.device, pipeline=pipeline)
    on = stand_in.standing_in() if has_streams(made.device) else nullcontext()
    with on, _standing_for(rank, checked.plan.num_ranks), known.layouts.of_rank():
        try:
            # autograd's threads are one per device that it found when it ran first
            threads = torch.autograd.set_multithreading_enabled(False)
            unrun = noting_unrun(made.unrun)
            with threads, unrun, stand_in.parts_on_demand(), made.following_resizes(), mode, made:
                with stand_in.MovingData() if has_streams(made.device) else nullcontext():
                    runtime = Runtime(checked, valueless(model, mode), options=options)
                run_steps(runtime, batch, optimizer, made, evaluates=evaluates)
        except DataDependentOutputException as error:
            raise RehearsalError(
                f"rehearse: {progress.activity.raised or 'the optimizer'} reads the value of a "
                f"tensor{line_of(error)} ({error}), and in a rehearsal tensors have none",
                way_out="rehearse another optimizer (optimizer=), or make that part a leaf",
            ) from error
        except NotSteadyError:
            runtime = None
        except RuntimeError as error:
            if not stand_in.mixes_devices(error):
                raise
            raise RehearsalError(
                f"a tensor was left on another device: {getattr(error, 'func', '')} {error}",
                place=f"rehearse: rank {rank}, {progress.activity}, block {made.block or '(none)'}",
                way_out="make it on the device of what it meets",
            ) from error
    if runtime is None:
        again = partial(rank_log, checked, model, batch, optimizer, rank=rank, recorder=recorder)
        return again(evaluates=evaluates, repeats=False)
    return made.log(rank)


def run_steps(
    runtime: Runtime,
    batch: Callable[[], Any],
    optimizer: MakeOptimizer,
    recorder: Recorder,
    *,
    evaluates: bool,
) -> None:
    """Rehearsed steps of a runtime, with all that a real run does, so that the logs are equal."""
    parameters = list(runtime.parameters())
    held = [p.stored for p in runtime.stage_parameters] + [
        p.leaf.detach() for p in runtime.stage_parameters
    ]
    recorder.memory.name(map(_local, held), WEIGHTS)
    steps = made_of(optimizer, [p for p in parameters if p.requires_grad])
    for stage in runtime.stages.values():
        _note_blocks(stage.program, recorder)
    inputs = batch()
    recorder.memory.name(
        (x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)), BATCH
    )
    _make_states(steps, parameters)
    recorder.memory.name(map(_local, _states(steps)), STATES)
    for _ in range(runtime.plan.staleness):  # until gradients come
        runtime.train_step(inputs, _observer(runtime, recorder))
        step(steps)
        steps.zero_grad()
    recorder.memory.begin()
    recorder.flops.clear()
    begin = len(recorder.events)
    with recorder.pricing():
        in_backward = steps if runtime.plan.optimizer_in_backward else None
        runtime.train_step(inputs, _observer(runtime, recorder), optimizer=in_backward)
        recorder.wait()
    recorder.memory.name((_local(p.grad) for p in parameters if p.grad is not None), GRADIENTS)
    if in_backward is None:
        clip_(runtime.stage_parameters, runtime.place, 1.0)
        with recorder.pricing():
            step(steps)
    recorder.memory.end()
    of_step, recorder.step = recorder.flops.copy(), (begin, len(recorder.events))
    recorder.saved = planned_save(runtime, steps)
    if evaluates:
        runtime.eval_step(inputs, _observer(runtime, recorder))
        recorder.wait()
    while runtime.drain(_observer(runtime, recorder)) is not None:
        pass
    recorder.flops = of_step


def _make_states(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Have an optimizer make its states, as its first step does."""
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    step(optimizer)
    optimizer.zero_grad()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    states = (x for state in optimizer.state.values() for x in state.values())
    return (x for x in states if isinstance(x, torch.Tensor))


def _observer(runtime: Runtime, recorder: Recorder) -> Observer:
    """Runs instructions and phases, and writes down where they wait for receives."""

    def observe(what: Instruction | Phase, run: Callable[[], None]) -> None:
        older = 0 if runtime.late is None else runtime.late.posted_before(what)
        run()
        recorder.enter("")
        if isinstance(what, Phase):
            recorder.wait(older=older)
        elif what.action in RECEIVES:
            channels = runtime.planned.stages[what.stage].channels(what).values()
            recorder.wait(sum(len(channel.incoming) for channel in channels), older)

    return observe


def _note_blocks(program: Any, recorder: Recorder) -> None:
    """Have the recorder know which block's forward runs."""
    ready = program.ready

    def noted(block: str) -> None:
        recorder.enter(block)
        if ready is not None:
            ready(block)

    program.ready = noted


def _local(x: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local.detach()


# --- a world that is not there --------------------------------------------------------------------


@contextmanager
def _standing_for(rank: int, world: int) -> Iterator[None]:
    """This process is one rank of a world in which nobody else is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    activity, stages = progress.activity, progress.stages
    progress.activity = type(progress)().activity
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        progress.activity, progress.stages = activity, stages


def valueless(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model whose parameters and buffers are fake tensors on the CPU, tied as they
    were; those on meta are like any others."""
    copies: dict[int, Any] = {}
    for x in (*model.parameters(), *model.buffers()):
        with mode:
            empty = torch.empty(x.shape, dtype=x.dtype, device=HOST)
            if isinstance(x, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=x.requires_grad)
        copies[id(x)] = empty
    return copy.deepcopy(model, copies)


# --- repeated stages ------------------------------------------------------------------------------

# Micro-batches in the middle of a step do what those before them did: written down, not run again.
#
# What a micro-batch's forward, backward or weight half does to other ranks and to memory is
# recorded where the executor runs it: for the first micro-batches of a stage, and for the last,
# whose backward reduces. Where two in a row are found to be equal (the same messages, the same
# allocations and releases, the same work), those between are written to the log as repetitions of
# them; where they differ, all are run. A stage of the same rank whose first micro-batch did what
# that of another did repeats the other's. Messages between stages, and whatever happens between
# steps, are the executor's throughout.


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
    """Record of an instruction: events, with the position of their block; changes of memory, the
    bytes of its allocations, numbered from `start`, and their `places` among the blocks that were
    `entered`, each after so many changes; FLOPs by operator; its outputs, and the inputs (by
    position) that are held afterwards."""

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
        ours, theirs = (replace(r, start=0, made=(), events=r.told) for r in (self, other))
        return ours == theirs


class Repeats:
    """Records of a rank's instructions, over its rehearsal."""

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
        """Record of an instruction that can be written down without running it; else None."""
        if what not in self.steady and what in self.first:
            for other, record in list(self.steady.items()):
                if other[:2] == what[:2] and self.first[other].like(self.first[what]):
                    self.steady[what] = record
                    break
        return self.steady.get(what)

    @contextmanager
    def recording(
        self, instruction: Instruction, blocks: Sequence[str], operands: list[torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        """Record what happens inside, where what is handed on is put into the list. `blocks` are
        the stage's; empties `given`, which is used up."""
        recorder, memory, what = self.recorder, self.recorder.memory, _what(instruction)
        places = {memory.number(x): k for k, x in enumerate(operands)}
        operands.clear()
        recorder.flush()
        start, events, changes = len(memory.sizes), len(recorder.events), len(memory.changes)
        flops, entered = recorder.flops.copy(), len(memory.entered)
        results: list[torch.Tensor] = []
        yield results
        recorder.flush()
        self._note(instruction, start, len(memory.sizes))
        if what in self.steady:
            return
        at = {name: k for k, name in enumerate(blocks)}
        record = _Record(
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
            made=tuple(self._made(x, start, places) for x in results),
            holds=frozenset(k for number, k in places.items() if number in memory.held),
        )
        if what in self.latest and self.latest[what].like(record):
            self.steady[what] = record
        self.first.setdefault(what, record)
        self.latest[what] = record

    def again(
        self,
        record: _Record,
        instruction: Instruction,
        blocks: Sequence[str],
        operands: Sequence[torch.Tensor],
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
        handed = {output.place: output.dtype for output in record.made}
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
        return [_tensor(x, operands, memories) for x in record.made]

    def _note(self, instruction: Instruction, start: int, stop: int) -> None:
        unit = instruction.stage, instruction.microbatch
        self.spans.append((start, stop, unit, instruction.action))
        self.starts[instruction.action, unit] = start

    def _allocation(self, number: int, instruction: Instruction) -> _Allocation:
        """An allocation as others like this instruction would refer to it."""
        k = bisect_right(self.spans, number, key=lambda span: span[0]) - 1
        is_recorded = k >= 0 and number < self.spans[k][1]
        start, _, (stage, microbatch), action = self.spans[k] if is_recorded else _NO_SPAN
        if number in self.recorder.memory.held and microbatch != instruction.microbatch:
            return _Allocation(place=number)
        if not is_recorded:
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

    def _made(self, x: torch.Tensor, start: int, places: Mapping[int, int]) -> _Made:
        number = self.recorder.memory.number(x)
        is_recorded, place = number >= start, places.get(number)
        return _Made(
            place=number - start if is_recorded else None,
            given=place,
            kept=None if is_recorded or place is not None else x.detach(),
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
            results = self.repeats.again(record, instruction, self.blocks[s], [*received.values()])
            names = self.stages[s].program.graphs.kept
            return Pass(received=received, produced=dict(zip(names, results, strict=True)))
        operands = [*self.activations.get(unit, {}).values()]
        with self.repeats.recording(instruction, self.blocks[s], operands) as results:
            done = super().run_forward(instruction)
            results += done.produced.values()
        return done

    def run_backward(self, instruction: Instruction) -> dict[str, torch.Tensor]:
        unit = s, _ = instruction.stage, instruction.microbatch
        operands = [*self.passes[unit].received.values(), *self.gradients.get(unit, {}).values()]
        if unit in self.repeated:
            record, done = self._known(instruction), self.passes.pop(unit)
            results = self.repeats.again(record, instruction, self.blocks[s], operands)
            self.gradients.pop(unit, None)
            self.put_off[unit] = [operands[k] for k in record.holds]
            names = self.stages[s].program.differentiable(done)
            return dict(zip(names, results, strict=True))
        with self.repeats.recording(instruction, self.blocks[s], operands) as results:
            grads = super().run_backward(instruction)
            results += grads.values()
        return grads

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
    needed = {(k, stage.last) for k, stage in stages.items()}
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
                    needed.add((i.stage, i.microbatch))
                runs[i.stage] += 1
    return needed if any(i.action in BACKWARD for i in stream) else set()


def _name(blocks: Sequence[str], position: int | None) -> str:
    return "" if position is None else blocks[position]


def _what(instruction: Instruction) -> What:
    return torch.is_grad_enabled(), instruction.action, instruction.stage


def _own(allocation: _Allocation, instruction: Instruction) -> bool:
    """Whether an instruction made the allocation itself."""
    key = instruction.action, 0, 0
    return (allocation.action, allocation.stages, allocation.later) == key


def _tensor(
    output: _Made, operands: Sequence[torch.Tensor], memories: Mapping[int | None, torch.Tensor]
) -> torch.Tensor:
    if output.kept is not None:
        return output.kept
    of = operands[output.given] if output.given is not None else memories[output.place]
    return of.detach().as_strided(output.shape, output.stride, output.offset).data  # of no base
