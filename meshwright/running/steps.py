"""Steps of a running plan, what they return and what is measured of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.costmodel.operators import Problem
from meshwright.executor.devices import Clock
from meshwright.executor.errors import BatchError, OptimizerError, StateError
from meshwright.executor.parameters import clip_, name_of
from meshwright.executor.runtime import MeasuredStep, Stopwatch, timed_step
from meshwright.monitor import BatchSize, MetricsLogger, Monitor, Predicted, TokenCount, logger_for
from meshwright.planner.batch import batch_rows
from meshwright.planner.plan import Plan, sized
from meshwright.planner.pricing import Evaluator
from meshwright.profiles.inputs import ArgumentError, shown
from meshwright.profiles.inputs.limits import checked_booleans, is_number
from meshwright.running.planned import PlannedModel, after_meeting, in_replica

log = logging.getLogger(__name__)


class Steps(PlannedModel):
    """A planned model that is trained."""

    _monitor: Monitor | None = None
    _stepped: bool = False  # by an optimizer that was given

    @checked_booleans
    @after_meeting
    @in_replica
    def train_step(
        self,
        batch: Any,
        targets: Any = None,
        *,
        local: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        max_grad_norm: float | None = None,
    ) -> torch.Tensor:
        """One forward and backward over a global batch; the mean loss (fp32 scalar), on every rank.

        `batch` has the structure of `example_inputs` with `global_batch_size` rows; `targets` may
        be given apart. Every rank gives the same whole batch, and reads its rows of it; or, all
        ranks alike, with `local` only its own rows, those of `data_parallel.rows`. Other sizes
        than planned, and fewer rows, are traced and lowered once a shape. Numbers in the batch
        may differ from step to step, unless the forward's course depends on them (ValueError, as
        for attributes of the model that were changed since it was planned). Gradients are added to
        `.grad`: zero them before, step your optimizer after. Where any of them on any rank is not
        finite, all are dropped (`skipped_steps`).

        With an `optimizer` the step is a whole one: gradients are zeroed, and clipped to
        `max_grad_norm` (None doesn't), and the optimizer is stepped; a learning-rate schedule is
        yours to step then. A plan with `post_validation` wants its steps so: this rank may be a
        step ahead of others, of whose gradients it learns in the next step, and puts its own right
        then. The loss is waited for when it is read; whatever else reads or writes the model's
        state here (`settle()` does nothing else) waits for the step, and all ranks call it alike.
        A plan with `optimizer_in_backward` makes no other steps: each parameter is stepped as its
        gradient is whole, which is let go then, so that nothing is clipped, dropped or left in
        `.grad`, and hooks of the optimizer's step run once a parameter. One with parameter
        `servers` makes no others, either: every rank gives the same batch and its own optimizer, of
        which those of the servers step. A worker returns the mean loss of its own rows, a server
        the mean of those that it was told in this round.

        Replicas that train apart take their own rows of the batch, and return the mean loss over
        those. A meeting that is due is at the start of the next call, when the optimizer has
        stepped, or in `meet()`: nothing else that is called between two steps has one.

        Of a pipeline with `staleness` s the gradients are those of s steps ago, or of fewer on some
        stages, and so is the loss: that of the batch given s calls ago, NaN before there is one, so
        that reading it waits for nobody. What is outstanding then comes by `drain`.
        """
        self._traced.check_unchanged(training=True)
        self._traced.check_batch(batch)
        check_step(optimizer, max_grad_norm)
        check_in_backward(self.plan, optimizer, max_grad_norm, "train_step")
        inputs = with_targets(batch, targets)
        inputs = inputs if local else self._rows_here(inputs)
        if optimizer is not None:
            return self._whole_step(inputs, optimizer, max_grad_norm, local=local)
        return self._step(inputs, local=local)

    def _step(
        self, inputs: Any, *, local: bool, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.Tensor:
        """A measured step of the runtime, in which an optimizer may step."""
        runtime = self._going_on if self.plan.is_served else self.runtime
        return self.monitor.train_step(
            lambda watch: runtime.train_step(
                inputs, observe=watch, local=local, optimizer=optimizer
            ),
            lambda: self._size(inputs, local),
        )

    def _whole_step(
        self, inputs: Any, optimizer: torch.optim.Optimizer, max_norm: float | None, *, local: bool
    ) -> torch.Tensor:
        """A step with the optimizer's; the first one says where another was planned with."""
        if not self._stepped:
            self._stepped = True
            if self._speaks and (said := other_than_counted(optimizer, self.plan, self._problem)):
                log.warning("%s", said)
        if self.plan.optimizer_in_backward or self.plan.is_served:
            return self._step(inputs, local=local, optimizer=optimizer).detach()
        if not self.plan.post_validation:
            optimizer.zero_grad()
            loss = self._step(inputs, local=local)
            if max_norm is not None:
                self.clip_grad_norm_(max_norm)
            optimizer.step()
            return loss.detach()
        validation, norms = self._going_on.validation, list[torch.Tensor]()

        def run(watch: Stopwatch | None) -> torch.Tensor:
            loss, norm = validation.step(
                inputs, optimizer, max_norm=max_norm, observe=watch, local=local
            )
            norms.append(norm)
            return loss

        loss = self.monitor.train_step(run, lambda: self._size(inputs, local))
        if max_norm is not None:
            self.monitor.note(grad_norm=norms[0])
        return loss

    def drain(
        self, optimizer: torch.optim.Optimizer | None = None, *, max_grad_norm: float | None = None
    ) -> torch.Tensor | None:
        """A `train_step` without a batch, of a plan with `staleness`: runs backwards that are
        outstanding, adds the gradients that are due to `.grad`, steps an `optimizer` that is given
        as `train_step` does, and returns the loss of the newest batch that is done with. None, and
        nothing is done, where nothing is outstanding (always, under other plans). Collective.

            while result.drain(optimizer) is not None:
                pass
        """
        check_step(optimizer, max_grad_norm)
        if not self.plan.staleness or self.plan.is_served:
            return None
        if optimizer is not None and self.runtime.outstanding:
            optimizer.zero_grad()
        loss = self.runtime.drain()
        if loss is not None and optimizer is not None:
            if max_grad_norm is not None:
                self.clip_grad_norm_(max_grad_norm)
            optimizer.step()
        return loss

    @in_replica
    def settle(self) -> None:
        """Wait until the last step is validated, where the plan does so afterwards: parameters and
        optimizer states are those of the step then. Collective."""
        assert self.runtime is not None

    def _size(self, inputs: Any, local: bool) -> BatchSize:
        """The size of the global batch that is given, or of which a rank's own rows are, as far as
        it knows."""
        rows = self._global_rows(inputs) if local else batch_rows(inputs) * self.plan.replicas
        return self._tokens.size(inputs, rows)

    @property
    def _speaks(self) -> bool:
        """Whether this rank says what is said once for all."""
        return self._going_on.place.rank == 0 and (self._world is None or self._world.number == 0)

    @cached_property
    def _tokens(self) -> TokenCount:
        return TokenCount.of(self._problem)

    @property
    def monitor(self) -> Monitor:
        """Measurements of this rank's steps; `monitor.told` is their deviation from the prediction,
        after 20 of them."""
        if self._monitor is None:
            runtime = self._going_on
            rank = runtime.place.rank
            self._monitor = Monitor(
                Predicted.of(self.report, rank),
                Clock(runtime.place.device),
                rank if self._world is None else self._world.rank,
                lambda: runtime.steps,
                self._guard_numbers,
            )
        return self._monitor

    def _guard_numbers(self) -> dict[str, float]:
        guard = self._going_on.guard
        numbers = {} if guard.scale is None else {"loss_scale": guard.scale.value}
        return {"skipped_steps": guard.skipped_steps, **numbers}

    @checked_booleans
    def metrics(self, *, grad_norm: bool = False) -> dict[str, float]:
        """Numbers of the last step, by name: `step` of the training, `loss`; this rank's seconds,
        `train_step_s`, `between_s` before it since the step before (the optimizer, the input; of
        that `input_s` in a `data_loader`) and `step_time_s`, both; by that `rows_per_s`,
        `tokens_per_s` and `mfu` of the global batch; `peak_memory_bytes` of this rank (on GPUs also
        `reserved_memory_bytes`, `allocation_retries`), `skipped_steps`, `loss_scale` in fp16,
        `grad_norm` after `clip_grad_norm_`; of some steps the terms of `train_step_s`: `forward_s`,
        `backward_s`, `reduction_s`, `waiting_s`. What was predicted is beside as `predicted_...`.

        Empty before the first step. Waits for the step, and for no other rank: one rank may ask
        alone. With `grad_norm` the norm is taken now, without clipping, and this is collective:
        call it between `train_step` and `zero_grad`.
        """
        if grad_norm:
            self.clip_grad_norm_(math.inf)
        return self.monitor.metrics()

    def log_to(self, logger: MetricsLogger | str | Path, *, every: int = 1) -> None:
        """Hand the metrics of every so manyth step to a logger on rank 0, when the step is over: at
        the next `train_step`, at a `replan`, and at the end of the process.

        A path that ends in .jsonl gets a JSON object a step. `meshwright.monitor` has loggers of
        TensorBoard and Weights & Biases; any function of a mapping of numbers is one. Call it on
        all ranks alike. Raises ValueError for an `every` below 1 and for another path.
        """
        self.monitor.log_to(logger_for(logger), every)

    def timeline(self, path: str | Path, batch: Any = None, targets: Any = None) -> MeasuredStep:
        """One training step as `train_step` makes it, timed: written to `path` as a Chrome trace of
        all ranks, with the names of the simulated one (`report.trace`). Collective.

        Without a batch, `example_inputs` are repeated to `global_batch_size` rows; on meta they
        can't be (ValueError). Gradients are added to `.grad` as by any step. The first steps also
        connect the ranks and compile, so call it after a few. Returns the loss and the times
        against those predicted; `str()` of it is a table.
        """
        if self.plan.outer_loop is not None:
            raise StateError(
                ": replicas that train apart have no step of all ranks",
                place="timeline",
                legal="a plan without an outer loop",
                way_out="run plan.of_one_replica on the ranks of one",
            )
        if batch is None:
            batch = repeated(self._traced.example, self.plan.global_batch_size)
        self.without_servers("timeline")
        self._traced.check_unchanged(training=True)
        self._traced.check_batch(batch)
        return timed_step(self.runtime, with_targets(batch, targets), path, self.report.timeline)

    @in_replica
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the whole model, every element counted once: the
        norm before, equal on all ranks. Collective.
        """
        self.without_servers("clip_grad_norm_")
        runtime = self.runtime
        norm = clip_(runtime.stage_parameters, runtime.place, max_norm, norm_type)
        self.monitor.note(grad_norm=norm)
        return norm

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite on some rank: they left `.grad` as it was, None
        after `zero_grad()`, so that an optimizer does nothing. (After
        `zero_grad(set_to_none=False)` it still applies momentum and weight decay.)"""
        runtime = self._going_on if self.plan.is_served else self.runtime  # no rank waits there
        return runtime.guard.skipped_steps


def check_step(optimizer: Any, max_grad_norm: Any) -> None:
    """Raise ValueError for what steps nothing, and for a norm that is none."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f" is a {type(optimizer).__name__}, {shown(optimizer)}",
            place="train_step: optimizer",
            legal="an optimizer of torch, or None",
            way_out="make one over result.parameters()",
        )
    norm = max_grad_norm
    if norm is None:
        return
    if optimizer is None or not (norm == math.inf or (is_number(norm) and norm >= 0)):
        raise ArgumentError(
            f"={shown(norm)}" + " without an optimizer" * (optimizer is None),
            place="train_step: max_grad_norm",
            legal="a number from 0, or None, beside an optimizer",
            way_out="give optimizer=, or clip by clip_grad_norm_ yourself",
        )


def check_in_backward(plan: Plan, optimizer: Any, max_norm: float | None, who: str) -> None:
    """Raise ValueError for a step that a plan with `optimizer_in_backward`, or with parameter
    servers, does not make."""
    given = optimizer is not None and max_norm is None
    if given or not (plan.optimizer_in_backward or plan.is_served):
        return
    if plan.is_served:
        raise OptimizerError(
            ", and the optimizers of parameter servers step each gradient as it comes",
            place=f"{who}: optimizer={'None' if optimizer is None else 'given'}, "
            f"max_grad_norm={shown(max_norm)}",
            legal="an optimizer on every rank, and max_grad_norm=None",
            way_out="give it so, or plan without servers",
        )
    what = "optimizer=None" if optimizer is None else f"max_grad_norm={shown(max_norm)}"
    why = "leaves" if optimizer is None else "clips by the norm of"
    raise OptimizerError(
        f" {why} all gradients, and the plan lets each go in the backward (optimizer_in_backward)",
        place=f"{who}: {what}",
        legal="an optimizer, and max_grad_norm=None",
        way_out="give it so, or plan with Overrides(optimizer_in_backward=False)",
    )


def repeated(example: Any, rows: int) -> Any:
    """A sample batch, repeated to `rows` rows."""
    sample = batch_rows(example)

    def repeat(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_meta:
            raise BatchError(
                " are on the meta device, without values",
                place="example inputs",
                legal="a batch with values",
                way_out="pass batch=",
            )
        if not x.dim() or x.shape[0] != sample:
            return x
        return x.repeat(-(-rows // sample), *[1] * (x.dim() - 1))[:rows]

    return pytree.tree_map(repeat, dict(example) if isinstance(example, Mapping) else example)


def with_targets(batch: Any, targets: Any) -> Any:
    """A batch with the targets that were given apart, if any."""
    if targets is None:
        return batch
    if isinstance(batch, Mapping):
        return {**batch, "targets": targets}
    return (*_tuple(batch), targets)


def _tuple(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


# --- counts ---------------------------------------------------------------------------------------

# The optimizer that steps, and the one that the plan was made for.


DIFFERS = 0.01  # of the planned peak: less is not said


def other_than_counted(
    optimizer: torch.optim.Optimizer, plan: Plan, problem: Problem
) -> str | None:
    """Warning about an optimizer whose step takes other memory than was planned with; None where
    there is nothing to say."""
    name = name_of(optimizer)
    if name is None:
        return (
            f"the plan counts an optimizer like {problem.optimizer!r}; what "
            f"{type(optimizer).__name__} keeps and makes is not known: rehearse(optimizer=) tells"
        )
    if name == problem.optimizer:
        return None
    planned, here = (
        Evaluator(replace(problem, optimizer=counted)).price(plan).prediction.fullest_bytes
        for counted in (problem.optimizer, name)
    )
    if abs(here - planned) <= DIFFERS * planned:
        return None
    return (
        f"planned with optimizer={problem.optimizer!r}, a peak of {sized(planned)}; this one is "
        f"{name!r}, {sized(here)}: plan with optimizer={name!r} to have it counted"
    )
