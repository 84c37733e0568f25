"""Optimizer steps that are validated afterwards, so that a pipeline's ranks have no common end.

Clipping by the norm of all gradients, and the rule that a step without finite gradients is none,
need those of every rank: a rank that waited for them would wait for the last stage. So it steps its
optimizer with the gradients as they are, keeps a copy of what that changed, and begins the next
step. What all ranks together have is on its way in one all-reduce of three numbers,

    (loss, ranks with a gradient that is not finite, Σ |g|² / copies),

the *verdict*. It is waited for before the first backward of the next step
(`costmodel/schedules/early.py`), or before anything else that reads or writes the state (`settle`).
Where it does not hold, all ranks put weights and states back, step again with clipped gradients (or
without any), and make the forwards again that read the wrong weights. Weights, states and losses
are those of clipping first, whatever the verdicts.

After a verdict that did not hold the next one probably doesn't, either: that step waits for its own
at once, as does the first, until one holds. So do steps with another optimizer than the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.costmodel.schedules import Early
from meshwright.executor.devices import random_states
from meshwright.executor.errors import StateError
from meshwright.executor.parameters import WholeTensors, accumulate_grads, local_of, norm_share
from meshwright.executor.ranks import launch, progress
from meshwright.executor.runtime.losses import PendingScalar
from meshwright.executor.stages import EarlyForwards, Observer, PipelineRun

if TYPE_CHECKING:
    from meshwright.executor.runtime.runtime import Runtime

ROOM = 1e-6  # that clipping adds to a norm, as torch's does


@dataclass(slots=True, kw_only=True)
class Verdict:
    """Three numbers of one step, summed over all ranks: on their way while there is `work`."""

    numbers: torch.Tensor
    work: dist.Work | None
    max_norm: float | None

    def wait(self) -> torch.Tensor:
        """The numbers, when all ranks have ended their backwards."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.numbers

    @property
    def finite(self) -> bool:
        """Whether all gradients on all ranks are."""
        return not self.wait()[1]

    @property
    def coefficient(self) -> torch.Tensor:
        """Factor of gradients by clipping."""
        if self.max_norm is None:
            return torch.ones(())
        return (self.max_norm / (self.norm() + ROOM)).clamp(max=1.0)

    @property
    def holds(self) -> bool:
        """Whether the gradients were right as they are."""
        return self.finite and float(self.coefficient) == 1.0

    def loss(self) -> torch.Tensor:
        return self.wait()[0].float()

    def norm(self) -> torch.Tensor:
        """The norm of all gradients; 0 where they are dropped."""
        root = (self.wait()[2] ** 0.5).float()
        return root if self.finite else torch.zeros_like(root)


class Validation:
    """The steps of a runtime that are validated afterwards."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.group: Any = None
        self.outstanding: tuple[Verdict, UndoableStep] | None = None
        self.sure = False  # the last verdict held
        self.repeats = False  # the next step's early forwards run twice, on all ranks
        self.optimizer: torch.optim.Optimizer | None = None  # of the last step
        self.ahead_steps = 0  # that were made before their verdict was known
        self.undone_steps = 0  # of them

    @progress.during("preparing the step", waits=True, is_step=True)
    def step(
        self,
        batch: Any,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None,
        observe: Observer | None = None,
        local: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step, the optimizer's included: the loss and the norm of the gradients, which are
        waited for when they are read. Collective."""
        if isinstance(optimizer, WholeTensors):
            raise StateError(
                " sends whole tensors to their owners in each step, which is not undone",
                place="train_step: optimizer",
                legal="an optimizer over result.parameters()",
                way_out="take a plan without post_validation",
            )
        step, losses = self.runtime.passes(batch, observe, local=local)
        optimizer.zero_grad()
        with torch.no_grad():
            verdict = self._delivered(max_norm, step.own_loss(losses))
        undoable = UndoableStep.of(optimizer)
        ahead = self.sure and optimizer is self.optimizer
        self.optimizer = optimizer
        if ahead:
            undoable.step()
            self.ahead_steps += 1
            self.outstanding = verdict, undoable
        else:
            self._conclude(verdict, undoable, stepped=False)
        return PendingScalar.of(verdict.loss), PendingScalar.of(verdict.norm)

    def _delivered(self, max_norm: float | None, loss: torch.Tensor) -> Verdict:
        """Give the gradients to `.grad`, and start the sum of what all ranks have of them."""
        runtime, parameters = self.runtime, self.runtime.stage_parameters
        bad = runtime.guard.not_finite(parameters)
        runtime.guard.unscale(parameters)
        accumulate_grads(parameters, runtime.place.device)
        share = torch.zeros(())
        if max_norm is not None:
            held = [(p, local_of(p.api.grad)) for p in parameters if p.api.grad is not None]
            share = norm_share(held, runtime.place)
        numbers = torch.stack([x.detach().double().cpu().reshape(()) for x in (loss, bad, share)])
        runtime.settle_buffers()
        runtime.steps += 1
        work = None
        if runtime.place.mesh is not None:
            if self.group is None:
                timeout = timedelta(seconds=launch.timeout_s())
                self.group = dist.new_group(backend="gloo", timeout=timeout)
            work = dist.all_reduce(numbers, group=self.group, async_op=True)
        return Verdict(numbers=numbers, work=work, max_norm=max_norm)

    def settle(self) -> None:
        """Wait for the verdict that is outstanding, if any, and do what it asks for."""
        if self.outstanding is not None:
            with progress.during("waiting for the last step's verdict", waits=True):
                self._settle()

    def _settle(self) -> None:
        if self.outstanding is not None:
            (verdict, step), self.outstanding = self.outstanding, None
            self._conclude(verdict, step, stepped=True)

    def _conclude(self, verdict: Verdict, step: UndoableStep, *, stepped: bool) -> None:
        """Do what a verdict asks for, of a step that was made already or not."""
        finite, self.sure = verdict.finite, verdict.holds
        if not stepped:
            self._mend(verdict)
            step.optimizer.step()
        elif not self.sure:
            with step.own_gradients():
                step.undo()
                self._mend(verdict)
                step.step_again()
            self.repeats, self.undone_steps = True, self.undone_steps + 1
        step.forget()
        if not finite:
            self.runtime.guard.say_skipped(None)
        self.runtime.guard.conclude(finite)

    def _mend(self, verdict: Verdict) -> None:
        """Drop or clip the gradients, if a verdict asks for it."""
        if not verdict.finite:
            for p in self.runtime.stage_parameters:
                p.api.grad = None
        elif not verdict.holds:
            self._clip(verdict.coefficient)

    @torch.no_grad()
    def _clip(self, coefficient: torch.Tensor) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for p in self.runtime.stage_parameters:
            if p.api.grad is not None:
                gradient = local_of(p.api.grad)
                by_device.setdefault(gradient.device, []).append(gradient)
        for device, here in by_device.items():
            torch._foreach_mul_(here, coefficient.to(device))

    def early(self, part: Early | None) -> EarlyForwards | None:
        """Part of a step that runs before its weights are known to hold; None where they are.
        Buffers and random states that forwards write are kept for the second time."""
        if part is None or not (self.repeats or self.outstanding):
            return None
        runtime, device = self.runtime, self.runtime.place.device
        buffers = [(b.whole, b.whole.clone()) for b in runtime.held_buffers.values() if b.updated]
        put_back = random_states(device)

        def holds(run: PipelineRun) -> bool:
            self._settle()
            run.scale = runtime.guard.seed / runtime.plan.num_microbatches
            repeats, self.repeats = self.repeats, False
            if repeats:
                for buffer, before in buffers:
                    buffer.copy_(before)
                put_back()
                runtime.read_state()
            return not repeats

        return EarlyForwards(part=part, holds=holds)


# --- undoable optimizers --------------------------------------------------------------------------

# An optimizer's step that can be undone: weights and states put back, and the step made again.


Options = list[dict[str, Any]]  # of each group of an optimizer, parameters apart


@dataclass(slots=True, kw_only=True)
class UndoableStep:
    """One step of an optimizer on the gradients that are there. `options` are learning rates and
    the like of this step, whatever a schedule makes of them; `tensors` what `step` changed, each
    with its copy, and `states` what there was of each parameter; `gradients` those of this step,
    with the version of their memory."""

    optimizer: torch.optim.Optimizer
    options: Options
    left: Options = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    states: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    gradients: dict[torch.Tensor, tuple[torch.Tensor, int]] = field(default_factory=dict)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> UndoableStep:
        return UndoableStep(optimizer=optimizer, options=_options(optimizer))

    def step(self) -> None:
        """Step, and keep a copy of the weights and states of all that has a gradient."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p in held:
            if p.grad is None:
                continue
            self.gradients[p] = p.grad, local_of(p.grad)._version
            state = self.optimizer.state.get(p, {})
            for x in (p, *state.values()):
                if isinstance(x, torch.Tensor):
                    self.tensors.append((x, local_of(x.detach()).clone()))
            self.states[p] = {
                name: x if isinstance(x, torch.Tensor) else copy.deepcopy(x)
                for name, x in state.items()
            }
        self.optimizer.step()
        self.left = _options(self.optimizer)

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Context in which parameters have the gradients of this step, whatever they have now.
        Raises StateError where those were written since."""
        now = {p: p.grad for p in self.gradients}
        for p, (gradient, version) in self.gradients.items():
            if local_of(gradient)._version != version:
                raise StateError(
                    " were written before their step was validated, which may have to be made "
                    "again with them",
                    place="gradients of the last train_step",
                    legal="gradients that stay, or that are let go (zero_grad's set_to_none=True)",
                    way_out="drop what writes them (train_step(..., optimizer=) zeroes and clips), "
                    "or call result.settle() before",
                )
            p.grad = gradient
        try:
            yield
        finally:
            for p, theirs in now.items():
                if theirs is not self.gradients[p][0]:
                    p.grad = theirs

    @torch.no_grad()
    def undo(self) -> None:
        """Put back what was kept."""
        self.optimizer.state.update(self.states)
        here = [local_of(x.detach()) for x, _ in self.tensors]
        if here:
            torch._foreach_copy_(here, [before for _, before in self.tensors])

    def step_again(self) -> None:
        """Step with the options of this step; what a schedule made of them since stays."""
        now = _options(self.optimizer)
        _write(self.optimizer, self.options)
        self.optimizer.step()
        newer = [
            {name: x for name, x in gradient.items() if name not in was or not _same(x, was[name])}
            for gradient, was in zip(now, self.left, strict=True)
        ]
        _write(self.optimizer, newer)

    def forget(self) -> None:
        """Let go of the copies."""
        self.tensors, self.states, self.gradients = [], {}, {}


def _options(optimizer: torch.optim.Optimizer) -> Options:
    return [
        {
            name: x.clone() if isinstance(x, torch.Tensor) else copy.copy(x)
            for name, x in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _write(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Set options of each group; tensors in place, as a schedule holds them."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, x in values.items():
            if isinstance(x, torch.Tensor) and isinstance(group[name], torch.Tensor):
                group[name].copy_(x)
            else:
                group[name] = x


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
