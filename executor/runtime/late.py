"""Steps of a pipeline that is never flushed: their gradients come some steps late.

A call of `train_step` runs the forwards of its batch, and behind each the backward of the
micro-batch that went through a while ago; the last backwards of a stage are left to the calls that
follow (`orders.pipedream`). As soon as the gradients of a step are whole on a stage, they are
reduced there and lie aside until they are due: at the end of a call, `Pipeline.late` steps behind
their own. Weights come in versions.

What all ranks together have of a step is summed by one all-reduce of

    (loss, ranks with a gradient that is not finite, the notes on its batch),

which each rank begins when its part of the step is done, and which is waited for at the end of the
call in which the first stage is done with it: no rank waits there for another one's forwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.costmodel.schedules import Action, Instruction
from meshwright.executor import ranks
from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.host_values import read
from meshwright.executor.parameters import StageParameter, accumulate_grads, local_of
from meshwright.executor.runtime.step import Step
from meshwright.executor.stages import (
    Given,
    Observer,
    Phase,
    PipelineRun,
    RunStage,
    Unflushed,
    key_of,
    look_ups_named,
)

log = logging.getLogger(__name__)

_MADE = count()  # on all ranks alike
DRAINING = "call `while result.drain() is not None:` with the optimizer's step before"


@dataclass(slots=True, kw_only=True)
class ReducedStep:
    """A step whose gradients are whole on this rank, until they are delivered; what all ranks have
    of it is summed while there is `work`."""

    gradients: list[tuple[StageParameter, torch.Tensor | None]]
    numbers: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """The numbers, when all ranks have them."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.numbers


class LateSteps:
    """The steps of a runtime whose pipeline is not flushed: `calls` so far, `fed` of them with a
    batch, counted since none was outstanding."""

    def __init__(self, runtime: Any) -> None:
        """`runtime` is the Runtime that makes this."""
        self.runtime = runtime
        self.pipeline = pipeline = runtime.plan.pipeline
        (self.stage,) = runtime.stages
        self.late = pipeline.late(self.stage)
        counts = pipeline.num_microbatches, pipeline.num_stages
        self.alike = pipeline.record.is_evenly_late(*counts)
        program = runtime.stages[self.stage].program
        modules = (program, *program.blocks)
        count = pipeline.versions(self.stage)
        self.versions = Versions(modules, runtime.stage_parameters, count)
        # its ranks come at any time, or not at all to those of a pipeline that is never drained
        self.group = ranks.gloo_group(f"gradients that come late {next(_MADE)}")
        self._rest()

    def _rest(self) -> None:
        """Nothing is outstanding."""
        self.calls = self.fed = 0
        self.step: Step | None = None
        self.run: PipelineRun | None = None
        self.riding: dict[int, list[float]] = {}
        self.reduced: dict[int, ReducedStep] = {}

    @property
    def outstanding(self) -> bool:
        """Whether gradients of a step that was made are not delivered yet, on some rank."""
        return self.fed > 0

    def check_drained(self, who: str) -> None:
        """Raise ValueError where gradients are outstanding."""
        if self.outstanding:
            raise StateError(
                f": gradients of the last step{'s' * (self.pipeline.staleness > 1)} have not come "
                "yet",
                place=who,
                legal="a pipeline that is drained",
                way_out=DRAINING,
            )

    def check_feeds(self) -> None:
        """Raise ValueError for a batch in the midst of draining, which leaves a gap behind it."""
        if self.calls > self.fed > 0:
            raise StateError(
                ": the pipeline is drained in part, and goes on when all of it is",
                place="train_step",
                legal="a pipeline that is drained, or of which nothing is",
                way_out=DRAINING,
            )

    def check_step(self, step: Step) -> None:
        """Raise ValueError for a batch of another shape than that of which passes are under way."""
        if self.outstanding and step is not self.step:
            raise BatchError(
                ": it has another shape than the last one, of which passes are under way",
                place="batch",
                legal="batches of one shape",
                way_out=DRAINING,
            )
        if step.plan.num_microbatches != self.pipeline.num_microbatches:
            raise BatchError(
                f": it would be {step.plan.num_microbatches} micro-batches, and a pipeline that is "
                f"not flushed takes {self.pipeline.num_microbatches} a step",
                place="batch",
                legal="global batches of as many rows as planned",
                way_out="drop the last batch of an epoch, or pad it",
            )

    def turn(self) -> None:
        """Take the version of the weights that the next forwards read, an evaluation's too."""
        self.versions.take(self.calls)

    def train(self, step: Step, inputs: Given, observe: Observer | None) -> torch.Tensor:
        """A call with a batch, whose weights are there; the loss of the newest step that is done
        with, NaN before there is one."""
        runtime = self.runtime
        self.step = step
        self.riding[self.calls] = [*runtime.batch_check.riding]
        self.fed = self.calls + 1
        return self._call({self.stage: runtime.run_stage(step, self.stage, inputs)}, observe)

    def drain(self, observe: Observer | None = None) -> torch.Tensor | None:
        """A call without one; None where nothing was outstanding."""
        if not self.outstanding:
            return None
        assert self.run is not None
        loss = self._call(self.run.stages, observe)
        if self.calls - self.pipeline.staleness >= self.fed:
            self._rest()
        return loss

    def _call(self, stages: dict[int, RunStage] | Any, observe: Observer | None) -> torch.Tensor:
        runtime, step = self.runtime, self.step
        assert step is not None
        if self.calls == 0:
            for reducer in runtime.reducers.values():
                reducer.begin()
        seed, count = runtime.step_seed(), self.pipeline.num_microbatches
        run = runtime.pipeline(
            stages,
            [i for i in step.stream if self._is_due(i)],
            rng=lambda k: (seed, k * step.plan.microbatch_rows),
            scale=1.0 / count,
            weight_gradients=runtime.weight_gradients,
            observe=observe,
            around=Unflushed(
                before=self.run,
                count=count,
                take=lambda k: self.versions.take(self.calls + k // count),
                reduced=self._reduced,
                ahead=self._ahead(step.stream),
            ),
        )
        self.run = run
        with look_ups_named():
            run.run()
        with torch.no_grad():
            loss = self._concluded()
            self._deliver()
        self.calls += 1
        return loss

    # --- instructions ---

    def _is_due(self, i: Instruction) -> bool:
        """Whether the step of an instruction was made."""
        count = self.pipeline.num_microbatches
        number = self.calls * count + i.microbatch
        return bool(0 <= number < self.fed * count)

    def _ahead(self, stream: Sequence[Instruction]) -> list[Instruction]:
        """Receives of the next calls, of what is sent in this one, counted from its first
        micro-batch: a peer is up to as many micro-batches ahead as there are stages between."""
        pipeline, m = self.pipeline, self.pipeline.num_microbatches
        received = [i for i in stream if i.action is Action.RECV_GRADIENT]
        from_peers = {i.peer: i for i in received if i.peer is not None}
        return [
            receive
            for k in range(m - pipeline.left(self.stage), m)
            for peer, i in from_peers.items()
            if k < m - pipeline.left(peer)
            if self._is_due(receive := replace(i, microbatch=k))
        ]

    def posted_before(self, what: Instruction | Phase) -> int:
        """Receives that this rank has posted, and not waited for, before that of an instruction."""
        posted = [] if self.run is None else [*self.run.posted.values()]
        if self.run is not None and isinstance(what, Instruction):
            keys = [*self.run.posted]
            if (key := key_of(what)) in keys:
                posted = posted[: keys.index(key)]
        return sum(len(works) for by_name in posted for works in by_name.values())

    # --- gradients ---

    def _reduced(self, run: PipelineRun, i: Instruction) -> None:
        """Put the gradients of a step aside, and begin with those of the next one."""
        runtime, parameters = self.runtime, self.runtime.stage_parameters
        number = self.calls + i.microbatch // self.pipeline.num_microbatches
        step = self.step
        assert step is not None
        with torch.no_grad():
            runtime.finish_gradients()
            bad = runtime.guard.not_finite(parameters)
            loss = step.own_loss(run.losses)
            numbers = torch.stack([x.detach().double().cpu().reshape(()) for x in (loss, bad)])
            numbers = torch.cat((numbers, numbers.new_tensor(self.riding.pop(number))))
            work = None
            if self.group is not None:
                work = dist.all_reduce(numbers, group=self.group, async_op=True)
            gradients = [(p, p.gradient) for p in parameters]
            for p in parameters:
                p.gradient = None
        for reducer in runtime.reducers.values():
            reducer.begin()
        self.reduced[number] = ReducedStep(gradients=gradients, numbers=numbers, work=work)

    def _concluded(self) -> torch.Tensor:
        """The loss of the step that all ranks are done with at the end of this call, and what is to
        be said of it."""
        device = self.runtime.place.device
        if not 0 <= (number := self.calls - self.pipeline.staleness) < self.fed:
            return torch.full((), math.nan, device=device)
        numbers = self.reduced[number].wait()
        loss, bad, *riding = read(numbers, lambda: [0.0] * (2 + ranks.RIDING))
        guard = self.runtime.guard
        if bad and self.alike:
            guard.say_skipped(None)
        elif bad and not guard.warned:
            guard.warned = True
            if not self.runtime.place.rank:
                log.warning(
                    "gradients of a step are not finite, and were delivered all the same: stages "
                    "step those of different batches (said once)"
                )
        guard.conclude(not (bad and self.alike))
        self.runtime.batch_check.conclude(riding)
        if not self.reduced[number].gradients:
            del self.reduced[number]
        return torch.full((), loss, device=device)

    def _deliver(self) -> None:
        """Add the gradients that are due to `.grad`; where they are due on all ranks at once, only
        if all of them are finite. Where none are due, zeros that were left there are let go."""
        if not 0 <= (number := self.calls - self.late) < self.fed:
            self._let_zeros_go()
            return
        reduced = self.reduced[number]
        if not (self.alike and read(reduced.wait()[1], lambda: 0.0)):
            sums = [p.gradient for p, _ in reduced.gradients]  # of the next step, so far
            for p, gradient in reduced.gradients:
                p.gradient = gradient
            accumulate_grads([p for p, _ in reduced.gradients], self.runtime.place.device)
            for (p, _), gradient in zip(reduced.gradients, sums, strict=True):
                p.gradient = gradient
        reduced.gradients = []
        if number <= self.calls - self.pipeline.staleness:
            del self.reduced[number]

    def _let_zeros_go(self) -> None:
        """Have no `.grad` where all are zero on this rank, as `zero_grad(set_to_none=False)` leaves
        them: an optimizer would step momentum and weight decay with them."""
        held = [p.api for p in self.runtime.stage_parameters if p.api.grad is not None]
        if not held:
            return
        summed = torch.stack([local_of(p.grad).detach().abs().sum().double() for p in held]).sum()
        if not read(summed, lambda: 1.0):
            for p in held:
                p.grad = None


# --- versions of weights --------------------------------------------------------------------------

# Autograd holds leaves by reference, and views of them by their memory: a backward reads what lies
# in a leaf's memory then. So each version has leaves of its own, which no optimizer steps, and the
# blocks of the stage have those of the step whose forward or backward they run (what runs again in
# a backward reads them, too). With v versions, step t has those of number t mod v, which the step
# t - v is done with.


class Versions:
    """Leaves of a stage's trained parameters, by version."""

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[StageParameter], count: int
    ) -> None:
        """`modules` read the parameters as attributes. One version is what there is already."""
        self.count = count
        self.parameters = [p for p in parameters if p.trainable] if count > 1 else []
        readers: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in modules:
            for name, leaf in module.named_parameters(recurse=False):
                readers.setdefault(id(leaf), []).append((module, name))
        self.readers = [readers.get(id(p.leaf), []) for p in self.parameters]
        for p in self.parameters:
            p.versions = tuple(nn.Parameter(torch.empty_like(p.leaf)) for _ in range(count))
        self.current = -1
        self.take(0)

    def take(self, step: int) -> None:
        """Have the leaves of a step, by number from 0."""
        version = step % self.count
        if version == self.current:
            return
        self.current = version
        for p, places in zip(self.parameters, self.readers, strict=True):
            p.leaf = p.versions[version]
            for module, name in places:
                setattr(module, name, p.leaf)
