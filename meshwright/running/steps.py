"""Steps of a running plan, what they return and what is measured of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.executor.devices import Clock
from meshwright.executor.parameters import clip_
from meshwright.executor.ranks import launch
from meshwright.executor.runtime import MeasuredStep, timed_step
from meshwright.monitor import BatchSize, MetricsLogger, Monitor, Predicted, TokenCount, logger_for
from meshwright.planner.batch import batch_rows
from meshwright.profiles.inputs import MeshwrightError
from meshwright.running.planned import PlannedModel


class Steps(PlannedModel):
    """A planned model that is trained."""

    _monitor: Monitor | None = None

    def train_step(self, batch: Any, targets: Any = None, *, local: bool = False) -> torch.Tensor:
        """One forward and backward over a global batch; the mean loss (fp32 scalar), on every rank.

        `batch` has the structure of `example_inputs` with `global_batch_size` rows; `targets` may
        be given apart. Every rank gives the same whole batch, and reads its rows of it; or, all
        ranks alike, with `local` only its own rows, those of `data_parallel.rows`. Other sizes
        than planned, and fewer rows, are traced and lowered once a shape. Numbers in the batch
        may differ from step to step, unless the forward's course depends on them (ValueError, as
        for attributes of the model that were changed since it was planned). Gradients are added to
        `.grad`: zero them before, step your optimizer after. Where any of them on any rank is not
        finite, all are dropped (`skipped_steps`).
        """
        self._traced.check_unchanged(training=True)
        self._traced.check_batch(batch)
        runtime, given = self.runtime, with_targets(batch, targets)
        return self.monitor.train_step(
            lambda watch: runtime.train_step(given, observe=watch, local=local),
            lambda: self._size(given, local),
        )

    def _size(self, given: Any, local: bool) -> BatchSize:
        """The size of the global batch that is given, or of which a rank's own rows are, as far as
        it knows."""
        return self._tokens.size(given, self._global_rows(given) if local else batch_rows(given))

    @cached_property
    def _tokens(self) -> TokenCount:
        return TokenCount.of(self._problem)

    @property
    def monitor(self) -> Monitor:
        """What this rank measures of its steps; `monitor.told` is how far they are from what was
        predicted, after 20 of them."""
        if self._monitor is None:
            runtime, rank = self.runtime, launch.rank()
            self._monitor = Monitor(
                Predicted.of(self.report, rank),
                Clock(runtime.place.device),
                rank,
                lambda: runtime.steps,
                self._guard_numbers,
            )
        return self._monitor

    def _guard_numbers(self) -> dict[str, float]:
        scale = self.runtime.loss_scale
        own = {} if scale is None else {"loss_scale": scale.value}
        return {"skipped_steps": self.skipped_steps, **own}

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
        if batch is None:
            batch = repeated(self._traced.example, self.plan.global_batch_size)
        self._traced.check_unchanged(training=True)
        self._traced.check_batch(batch)
        return timed_step(self.runtime, with_targets(batch, targets), path, self.report.timeline)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the whole model, every element counted once: the
        norm before, equal on all ranks. Collective.
        """
        runtime = self.runtime
        norm = clip_(runtime.stage_parameters, runtime.place, max_norm, norm_type)
        self.monitor.note(grad_norm=norm)
        return norm

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite on some rank: they left `.grad` as it was, None
        after `zero_grad()`, so that an optimizer does nothing. (After
        `zero_grad(set_to_none=False)` it still applies momentum and weight decay.)"""
        return self.runtime.guard.skipped_steps


def repeated(example: Any, rows: int) -> Any:
    """A sample batch, repeated to `rows` rows."""
    sample = batch_rows(example)

    def repeat(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_meta:
            raise MeshwrightError(
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
