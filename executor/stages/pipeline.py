"""Runs a rank's instruction stream: the same one that the simulator prices.

Receives are posted ahead of the instruction that needs them, sends are started and left to finish;
a stage waits only for its own next message. Stages of one rank hand tensors to each other without
one. Where the weights may turn out to be wrong (`EarlyForwards`), a stream begins anew before its
first backward.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from meshwright.costmodel.schedules import Action, Early, Instruction
from meshwright.costmodel.target import POSTED_AHEAD
from meshwright.executor.backward import WeightGradientQueue, accumulate
from meshwright.executor.host_values import is_sent
from meshwright.executor.parameters import Reducer
from meshwright.executor.ranks import progress
from meshwright.executor.stages.lowered import LoweredStage
from meshwright.executor.stages.stage import KeptByBlock, Pass, StageProgram
from meshwright.executor.transfers import handed, release

WAITING = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT, Action.REDUCE_GRADIENTS)  # for others

Key = tuple[Action, int, int | None, int]  # (receive action, stage, peer, micro-batch)
Unit = tuple[int, int]  # (stage, micro-batch, or slice of all slices of all micro-batches)


class Phase(StrEnum):
    """Parts of a step outside its instruction stream."""

    REFRESH = "refresh"
    REDUCE = "reduce"
    DELIVER = "deliver"


Observer = Callable[[Instruction | Phase, Callable[[], None]], None]  # (what, runs it)
Keep = Callable[[int, int, Mapping[str, torch.Tensor]], None]  # (stage, micro-batch, its values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """A stage for one step, `lowered` for its batch; `last` is the unit of the step's last backward
    here."""

    program: StageProgram
    lowered: LoweredStage
    reducer: Reducer
    inputs: Callable[[int], Mapping[str, torch.Tensor]]
    counts: Mapping[str, torch.Tensor]
    last: int

    @property
    def beside(self) -> Mapping[int, tuple[str, ...]]:
        """The values that stages of this rank read, by stage."""
        return self.lowered.beside

    @property
    def slices(self) -> int:
        """Parts in which a micro-batch goes through."""
        return len(self.lowered.parts)

    def take(self, unit: int) -> int:
        """Run the graphs of this unit from now on; returns its micro-batch."""
        microbatch, part = divmod(unit, self.slices)
        self.program.take(self.lowered.parts[part].graphs)
        return microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyForwards:
    """The `part` of a rank's stream that runs before `holds` is asked, once, whether the weights
    that it read were right; if not, which `holds` mends, it runs again."""

    part: Early
    holds: Callable[[PipelineRun], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unflushed:
    """Surroundings of a step of `count` micro-batches that goes on with passes which the one
    `before` left, and leaves some itself: `take` has the weights of a micro-batch, `reduced` gets
    the gradients of a step behind the last of its backwards, `ahead` are receives of later steps,
    of what is sent until the end of this one."""

    before: PipelineRun | None
    count: int
    take: Callable[[int], None]
    reduced: Callable[[PipelineRun, Instruction], None]
    ahead: Sequence[Instruction]


class PipelineRun:
    """One training step of the stages of one rank."""

    def __init__(
        self,
        stages: Mapping[int, RunStage],
        stream: Sequence[Instruction],
        *,
        rng: Callable[[int], tuple[int, int]],
        scale: float,
        weight_gradients: WeightGradientQueue,
        observe: Observer | None = None,
        keep: Keep | None = None,
        around: EarlyForwards | Unflushed | None = None,
    ) -> None:
        """`scale` multiplies the loss of a micro-batch; `observe` runs each instruction; `keep` is
        handed what stages make of each micro-batch. `around` it are steps that are to be
        validated, so that early forwards may run twice, or passes of others, where no step ends
        with a flush."""
        self.stages = stages
        self.stream = stream
        self.rng = rng
        self.scale = scale
        self.weight_gradients = weight_gradients
        self.observe = observe
        self.keep = keep
        self.early = around if isinstance(around, EarlyForwards) else None
        self.unflushed = around if isinstance(around, Unflushed) else None
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.leaving: list[torch.Tensor] = []  # of which all messages were begun
        self._begin()
        if self.unflushed is not None:
            self._go_on(self.unflushed)

    def _begin(self) -> None:
        self.passes: dict[Unit, Pass] = {}
        self.activations: dict[Unit, dict[str, torch.Tensor]] = {}
        self.gradients: dict[Unit, dict[str, torch.Tensor]] = {}
        self.input_gradients: dict[Unit, dict[str, torch.Tensor]] = {}
        self.put_off: dict[Unit, list[Any]] = {}
        self.kept: dict[Unit, KeptByBlock] = {}  # of earlier slices, by micro-batch
        self.posted: dict[Key, dict[str, list[Any]]] = {}
        self.handed: dict[Unit, list[torch.Tensor]] = {}  # outputs that are to be sent alone
        self.losses: list[torch.Tensor] = []
        self.coming: deque[Instruction] = deque()
        readers = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.SEND_ACTIVATION)
        self.read = Counter((i.stage, i.microbatch) for i in self.stream if i.action in readers)
        sends = (i for i in self.stream if i.action is Action.SEND_ACTIVATION)
        self.sends = Counter((i.stage, i.microbatch) for i in sends)

    def _go_on(self, unflushed: Unflushed) -> None:
        """Take over what the step before left, its micro-batches counted from this one's first, and
        hold passes for the steps behind."""
        ending = {(i.stage, i.microbatch) for i in self.stream if i.action is Action.BACKWARD}
        begun = ((i.stage, i.microbatch) for i in self.stream if i.action is Action.FORWARD)
        self.read.update(unit for unit in begun if unit not in ending)
        if (before := unflushed.before) is None:
            return
        less = unflushed.count
        self.passes = {(s, k - less): x for (s, k), x in before.passes.items()}
        self.gradients = {(s, k - less): x for (s, k), x in before.gradients.items()}
        self.posted = {(a, s, j, k - less): x for (a, s, j, k), x in before.posted.items()}
        self.leaving = before.leaving
        self.unflushed = replace(unflushed, before=None)  # which would keep all that were

    def _is_last(self, stage: RunStage, unit: int) -> bool:
        """Whether a unit is the one of its step's last backward."""
        if self.unflushed is not None:
            return unit % self.unflushed.count == stage.last % self.unflushed.count
        return unit == stage.last

    def _take(self, stage: RunStage, unit: int) -> int:
        if self.unflushed is not None:
            self.unflushed.take(unit)
        return stage.take(unit)

    def run(self) -> list[torch.Tensor]:
        """Execute the stream; returns the micro-batches' losses (of the last stage) in order."""
        count = 0
        if self.early is not None:
            count = self.early.part.count
            self._play(self.stream[:count])
            progress.enter("waiting for the last step's verdict", waits=True)
            if not self.early.holds(self):
                self._drop(self.early.part)
                self._begin()
                self._play(self.stream[:count])
        self._play(self.stream[count:])
        for following in () if self.unflushed is None else self.unflushed.ahead:
            if key_of(following) not in self.posted:
                self._post(following)
        progress.enter("finishing sends", waits=True)
        for work, _ in self.sending:
            work.wait()
        return self.losses

    def _drop(self, part: Early) -> None:
        """Take what others have sent, or will have, of what they made of wrong weights."""
        taken = {i for i in self.stream[: part.count] if i.action is Action.RECV_ACTIVATION}
        for instruction in part.arriving:
            if instruction in taken:
                continue
            for channel in self.stages[instruction.stage].lowered.channels(instruction).values():
                channel.finish(channel.post())

    def _play(self, stream: Sequence[Instruction]) -> None:
        receives = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)
        posted = self.posted.keys()  # by the step before
        self.coming.extend(i for i in stream if i.action in receives and key_of(i) not in posted)
        handlers: dict[Action, Callable[[Instruction], None]] = {
            Action.FORWARD: self._forward,
            Action.BACKWARD: self._backward,
            Action.BACKWARD_INPUT: self._backward,
            Action.BACKWARD_WEIGHT: self.run_weight,
            Action.SEND_ACTIVATION: self._send,
            Action.RECV_ACTIVATION: self._receive,
            Action.SEND_GRADIENT: self._send,
            Action.RECV_GRADIENT: self._receive,
            Action.REDUCE_GRADIENTS: self._reduce,
        }
        for instruction in stream:
            handler = handlers[instruction.action]
            progress.enter(
                instruction.action.value,
                stage=instruction.stage,
                microbatch=instruction.microbatch,
                waits=instruction.action in WAITING,
            )
            if self.observe is None:
                handler(instruction)
            else:
                self.observe(instruction, partial(handler, instruction))

    # --- compute ---

    def _forward(self, instruction: Instruction) -> None:
        unit = s, k = instruction.stage, instruction.microbatch
        stage, done = self.stages[s], self.run_forward(instruction)
        if self.read[unit]:
            self.passes[unit] = done
        if self.keep is not None:
            self.keep(s, k, done.produced)
        if (loss := stage.program.graphs.loss) is not None:
            self.losses.append(done.produced[loss].detach())
        for name, x in done.produced.items() if self.sends[unit] else ():
            if name != loss:
                done.produced[name] = handed(x)
                self.handed.setdefault(unit, []).append(done.produced[name])
        for target, names in stage.beside.items():
            into = self.activations.setdefault((target, k), {})
            into |= {name: done.produced[name].detach() for name in names}

    def run_forward(self, instruction: Instruction) -> Pass:
        """The forward of a micro-batch, or of a slice."""
        unit = s, _ = instruction.stage, instruction.microbatch
        stage, received = self.stages[s], self.activations.pop(unit, {})
        k = self._take(stage, instruction.microbatch)
        kept = self.kept.setdefault((s, k), {}) if stage.slices > 1 else None
        return stage.program.run(stage.inputs(k), received, stage.counts, self.rng(k), kept)

    def _backward(self, instruction: Instruction) -> None:
        s, k = instruction.stage, instruction.microbatch
        grads = self.run_backward(instruction)
        beside = {name: j for j, other in self.stages.items() for name in other.beside.get(s, ())}
        for name, source in beside.items():
            if name in grads:
                _add(self.gradients.setdefault((source, k), {}), name, grads[name])
        if sent := {n: x for n, x in grads.items() if n not in beside}:
            self.input_gradients[s, k] = sent

    def run_backward(self, instruction: Instruction) -> dict[str, torch.Tensor]:
        """The whole backward, or all of it but the weight gradients that can be put off; returns
        gradients of what was received."""
        unit = s, k = instruction.stage, instruction.microbatch
        stage, done = self.stages[s], self.passes.pop(unit)
        is_full, last = instruction.action is Action.BACKWARD, self._is_last(stage, k)
        stage.reducer.before_backward(last=last, whole=is_full)
        output_grads = self.gradients.pop(unit, {})
        microbatch = self._take(stage, k)
        grads = stage.program.backward(done, output_grads, self.scale, last=last)
        if k % stage.slices == 0:  # no slice before it reads what was kept
            self.kept.pop((s, microbatch), None)
        taken = self.weight_gradients.take()
        if is_full:
            accumulate(taken, stage.reducer.take_gradient)
            if not last:
                stage.reducer.after_backward()
        else:
            self.put_off[unit] = taken
        return grads

    def run_weight(self, instruction: Instruction) -> None:
        """The weight gradients that were put off."""
        unit = s, k = instruction.stage, instruction.microbatch
        stage = self.stages[s]
        last = k == stage.last
        stage.reducer.before_backward(last=last, whole=False)
        accumulate(self.put_off.pop(unit), stage.reducer.take_gradient)
        if not last:
            stage.reducer.after_backward()

    def _reduce(self, instruction: Instruction) -> None:
        self.stages[instruction.stage].reducer.flush()
        if self.unflushed is not None:
            self.unflushed.reduced(self, instruction)

    # --- messages ---

    def _send(self, instruction: Instruction) -> None:
        unit = instruction.stage, instruction.microbatch
        channels = self.stages[instruction.stage].lowered.channels(instruction)
        if instruction.action is Action.SEND_ACTIVATION:
            source = self.passes[unit].produced
            self.read[unit] -= 1
            self.sends[unit] -= 1
            if not self.read[unit]:  # in an evaluation
                del self.passes[unit]
        else:
            source = self.input_gradients.get(unit, {})
        self.sending = [(work, x) for work, x in self.sending if not is_sent(work)]
        self.leaving = [x for x in self.leaving if not release(x)]
        for name, channel in channels.items():
            self.sending += channel.send(source[name])
        if instruction.action is Action.SEND_GRADIENT:
            unsent = {name: x for name, x in source.items() if name not in channels}
            self.input_gradients[unit] = unsent
        elif not self.sends[unit]:
            self.leaving += self.handed.pop(unit, [])

    def _receive(self, instruction: Instruction) -> None:
        self._post_ahead(instruction)
        unit = instruction.stage, instruction.microbatch
        posted = self.posted.pop(key_of(instruction))
        channels = self.stages[instruction.stage].lowered.channels(instruction)
        store = self.activations if instruction.action is Action.RECV_ACTIVATION else self.gradients
        into = store.setdefault(unit, {})
        for name, works in posted.items():
            _add(into, name, channels[name].finish(works))

    def _post_ahead(self, upto: Instruction) -> None:
        """Post this receive and the next few, in stream order."""
        while self.coming and (key_of(upto) not in self.posted or len(self.posted) <= POSTED_AHEAD):
            self._post(self.coming.popleft())

    def _post(self, receive: Instruction) -> None:
        channels = self.stages[receive.stage].lowered.channels(receive)
        self.posted[key_of(receive)] = {n: channel.post() for n, channel in channels.items()}


def _add(into: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> None:
    into[name] = into[name] + x if name in into else x


def key_of(i: Instruction) -> Key:
    """Key of a receive among those that are posted."""
    return i.action, i.stage, i.peer, i.microbatch
