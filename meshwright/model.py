"""ParallelModel: a model, the plan for it, and (under torchrun) the plan running."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.costmodel.operators import Problem
from meshwright.decision import Decision, Request
from meshwright.executor.checkpoint import Saving, checkpoint, hand_over, take_over, weights
from meshwright.executor.errors import StateError
from meshwright.executor.parameters import WholeTensors, clip_
from meshwright.executor.ranks import launch, progress
from meshwright.executor.rehearsal import MakeOptimizer, Rehearsal
from meshwright.executor.runtime import MeasuredStep, RunOptions, Runtime, timed_step
from meshwright.executor.stages import CheckedPlan, check_trains
from meshwright.monitor import MetricsLogger, Monitor, Predicted
from meshwright.planner.batch import batch_rows
from meshwright.planner.overrides import Overrides
from meshwright.profiles.inputs import MeshwrightError
from meshwright.rehearsing import rehearse_plan, with_rehearsal
from meshwright.shapes import OtherShapes
from meshwright.traced import TracedModel
from meshwright.world import one_at_a_time, why_not_here


class ParallelModel:
    """What `auto_parallelize` returns.

    `plan`, `report` and `prediction` are always there; the rest needs the plan's ranks to be
    running (torchrun), or a plan of one rank.
    """

    def __init__(
        self, decision: Decision, problem: Problem, request: Request, traced: TracedModel
    ) -> None:
        self.plan = decision.plan
        self.report = decision.report
        self.prediction = decision.prediction
        self._decision = decision
        self._problem = problem
        self._request = request
        self._traced = traced
        self._why_not = why_not_here(decision.plan, problem.cluster)
        self._runtime: Runtime | None = None
        self._monitor: Monitor | None = None
        self._saving: Saving | None = None

    @one_at_a_time()
    def replan(
        self,
        overrides: Overrides | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        time_limit_s: float | None = None,
        executable: bool | None = None,
    ) -> ParallelModel:
        """Plan again with other overrides, in place of those given before; the rest as in
        `auto_parallelize`, `executable` as it was. The traced model and what was priced for it are
        used again.

        What was trained goes on: weights, buffers, the count of steps, and the states of the
        `optimizer` that is given, which then trains under the new plan; this one runs no more.
        Where ranks are running, all of them call this together. Raises as `auto_parallelize` does.
        """
        from meshwright.plan_search import search_plan  # a rank with a plan file loads no search

        self._check_optimizer(optimizer)
        request = replace(
            self._request,
            overrides=overrides or Overrides(),
            time_limit_s=time_limit_s,
            executable=self._request.executable if executable is None else executable,
        )
        decision = search_plan(self._problem, request, self._traced.phases_s, self._decision)
        new = ParallelModel(decision, self._problem, request, self._traced)
        if self._runtime is not None and not new._why_not:
            left = hand_over(self._runtime, new.plan, optimizer)
            take_over(new.runtime, left, optimizer)
        return new.started()

    def _check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Raise ValueError for an optimizer of another model."""
        if optimizer is not None and not self._why_not:
            check_trains(optimizer, self.runtime.model)

    def started(self) -> ParallelModel:
        """This model, lowered where ranks are running: process groups are made by all of them
        together."""
        if launch.running():
            assert self.runtime is not None
        return self

    @one_at_a_time()
    def rehearse(self, *, every: bool = False, optimizer: MakeOptimizer | None = None) -> Rehearsal:
        """Run the plan's own steps for one rank of each kind, or for `every` rank, on this process
        and on tensors without values: no weight is made, nothing is sent, nothing changes here.

        Returns what does not match between ranks (nothing, if the plan can't hang), each kind's
        peak bytes beside the price's, FLOPs and bytes sent; `str()` of it is a table. `optimizer`
        makes one of a rank's parameters; by default torch's of the planned name. Ranks of GPUs
        are rehearsed on a device that stands for one. The report has the table from then on, and
        its verdict on memory (`prediction.memory_verdict`) rests on the rehearsed peak. Raises
        ValueError in a process of a run, for a plan that can't run, for operators and optimizers
        that read values of tensors, and for operators that mix tensors of the host with those of
        the device.
        """
        found = rehearse_plan(
            self._checked(),
            self._problem,
            self._traced,
            optimizer=optimizer,
            every=every,
            prediction=self.prediction,
            compiled=bool(self._request.compile),
        )
        margin = self._request.memory_margin
        self._decision = with_rehearsal(self._decision, found, self._problem, margin)
        self.report, self.prediction = self._decision.report, self._decision.prediction
        return found

    @one_at_a_time()
    def _checked(self) -> CheckedPlan:
        """The plan, checked on the graph of its micro-batch."""
        plan, traced = self.plan, self._traced
        graph, factors = traced.in_microbatches(plan.microbatch_rows, plan.global_batch_size)
        return CheckedPlan.of(plan, graph, factors, traced.run_use)

    def _lowered(self) -> Runtime:
        """The plan's part of this rank."""
        plan, traced, checked = self.plan, self._traced, self._checked()
        if self._request.tf32:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        return Runtime(
            checked,
            traced.model,
            options=RunOptions(
                compile=self._request.compile,
                device=torch.device("cpu") if self._problem.cluster.backend == "gloo" else None,
                check_replicas=self._request.check_replicas,
            ),
            at_shape=OtherShapes(plan, self._problem, traced),
        )

    @property
    def runtime(self) -> Runtime:
        """This rank's running part; RuntimeError, with what to launch, where none can run."""
        if self._runtime is None:
            if self._why_not:
                raise StateError(self._why_not)
            self._runtime = self._lowered()
            groups, here = self.plan.devices, launch.rank()
            group = next(k for k, ranks in enumerate(groups) if here in ranks)
            progress.predicted_peak_bytes = self.prediction.peak_memory_bytes[group]
        return self._runtime

    def train_step(self, batch: Any, targets: Any = None) -> torch.Tensor:
        """One forward and backward over a global batch; the mean loss (fp32 scalar), on every rank.

        `batch` has the structure of `example_inputs` with `global_batch_size` rows; `targets` may
        be given apart. Every rank gives the same whole batch, and reads its rows of it. Other sizes
        than planned, and fewer rows, are traced and lowered once a shape. Numbers in the batch
        may differ from step to step, unless the forward's course depends on them (ValueError, as
        for attributes of the model that were changed since it was planned). Gradients are added to
        `.grad`: zero them before, step your optimizer after. Where any of them on any rank is not
        finite, all are dropped (`skipped_steps`).
        """
        self._traced.check_unchanged(training=True)
        runtime, given = self.runtime, _with_targets(batch, targets)
        return self.monitor.train_step(
            lambda watch: runtime.train_step(given, observe=watch), lambda: batch_rows(given)
        )

    @property
    def monitor(self) -> Monitor:
        """What this rank measures of its steps; `monitor.told` is how far they are from what was
        predicted, after 20 of them."""
        if self._monitor is None:
            rank = launch.rank()
            predicted = Predicted.of(self.report, rank)
            self._monitor = Monitor(predicted, self.runtime.place.device, rank, self._guard_numbers)
        return self._monitor

    def _guard_numbers(self) -> dict[str, float]:
        scale = self.runtime.loss_scale
        own = {} if scale is None else {"loss_scale": scale.value}
        return {"skipped_steps": self.skipped_steps, **own}

    def metrics(self, *, grad_norm: bool = False) -> dict[str, float]:
        """Numbers of the last step, by name: `step`, `loss`, `train_step_s`, `step_time_s` once the
        next has begun, `rows_per_s`, `tokens_per_s`, `mfu`, `peak_memory_bytes`, `skipped_steps`,
        `loss_scale` in fp16, `grad_norm` after `clip_grad_norm_`; of some steps `forward_s`,
        `backward_s`, `reduction_s` and `waiting_s` of this rank; each beside `predicted_...`.

        Empty before the first step. Waits for the loss. With `grad_norm` the norm is taken now,
        without clipping, and this is collective: call it between `train_step` and `zero_grad`.
        """
        if grad_norm:
            self.clip_grad_norm_(math.inf)
        return self.monitor.metrics()

    def log_to(self, logger: MetricsLogger, *, every: int = 1) -> None:
        """Hand the metrics of every so manyth step to a logger on rank 0, when the step is over: at
        the next `train_step`, and at the end of the process.

        `meshwright.monitor` has loggers of JSON lines, TensorBoard and Weights & Biases; any
        function of a mapping of numbers is one. Raises ValueError for an `every` below 1.
        """
        self.monitor.log_to(logger, every)

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
        return timed_step(self.runtime, _with_targets(batch, targets), path, self.report.timeline)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output in its current mode (call `model.eval()` before), without
        gradients. Collective, with the same arguments on every rank: where ranks hold parts, the
        whole weights are gathered on each of them for it."""
        return self.runtime.forward(*args, **kwargs)

    def eval_step(self, batch: Any, targets: Any = None) -> torch.Tensor:
        """The mean loss of a global batch (fp32 scalar), on every rank: forward only, without
        dropout. Weights, buffers and gradients stay as they are. ValueError for models with batch
        norm, which is planned with the batch's own statistics. Collective."""
        self._traced.check_unchanged(training=False)
        return self.runtime.eval_step(_with_targets(batch, targets))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the user's FQNs: the model's own objects where every rank holds
        the whole model, else DTensors on the stage's (dp, tp) mesh."""
        return self.runtime.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """For any torch optimizer. Norms and means of a parameter are those of the whole; one that
        needs whole matrices has `whole_tensor_optimizer`."""
        return (p for _, p in self.named_parameters())

    def whole_tensor_optimizer(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """`optimizer_class(params, **options)` on whole tensors, for optimizers that can't work on
        parts of a matrix (Shampoo, K-FAC, Muon).

        `params` are of `named_parameters()`, or torch's groups of them; None means all that train.
        Each tensor is gathered to one owner among its ranks, stepped there, and sent back: every
        rank keeps the states of its share, and each element crosses the links three times a step.
        Its `state_dict` is collective; a checkpoint takes it as `extra=`.
        """
        runtime = self.runtime
        chosen = [p for p in self.parameters() if p.requires_grad] if params is None else params
        held, place = runtime.stage_parameters, runtime.place
        return WholeTensors(optimizer_class, chosen, held=held, place=place, options=options)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This stage's parameters (DTensors) and buffers by FQN, tied names included."""
        return self.runtime.state_dict()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state as CPU tensors, for `model.load_state_dict`. Collective."""
        return self.runtime.full_state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's parts from a whole state dict by FQN."""
        self.runtime.load_state_dict(state)

    def init_weights(self, seed: int = 0) -> None:
        """Initialise a model that is on meta as `model.to_empty(device="cpu")`, `torch.manual_seed`
        and `model.apply` of the modules' own initialisers do on one device (not as the constructor,
        which draws in its own order), whatever the plan: one module whole at a time, each rank
        keeping its part. ValueError where nothing is on meta; it names tensors without an
        initialiser.
        """
        weights.init_weights(self.runtime, seed)

    def load_weights(self, path: str | Path) -> None:
        """Read weights from a `torch.save` file, safetensors (a file, or a folder with an index) or
        a DCP folder, each rank only its part. ValueError for missing or misshapen names and for
        names of files outside the folder, RuntimeError for a file that is damaged or would run
        code.
        """
        weights.load_weights(self.runtime, path)

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

    def save_checkpoint(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> Saving:
        """Write parameters, buffers, optimizer states, the number of steps, seed and loss scale to
        a folder that all ranks see. Collective.

        A checkpoint already at `path`, which may be a link, is replaced when the new one is
        complete; killed at any point, one of the two is there. Where the folder holds what no save
        wrote, ValueError names it. `extra` are your own objects with `state_dict()`, the same
        on all ranks, such as `{"scheduler": scheduler}`. Asynchronous, it returns when the state is
        copied to the host: training may go on, `.wait()` on what is returned says that it is on the
        disk, and the next save or load, and the end of the process, wait for it. An error in the
        background is raised by `.wait()` or the next save.
        """
        self._check_optimizer(optimizer)
        if self._saving is not None:
            before, self._saving = self._saving, None
            before.wait()
        self._saving = checkpoint.save(
            self.runtime, path, optimizer, extra=extra, asynchronous=asynchronous
        )
        return self._saving

    def load_checkpoint(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Read what `save_checkpoint` wrote, under this plan or another. Collective.

        The optimizer may be new; its class must be the one that was saved, its groups may be in any
        order. What is read is verified by its checksums; older checkpoints, without, are warned
        about. Raises FileNotFoundError, ValueError (another model or optimizer) or RuntimeError (a
        damaged file, or one that would run code), the same on all ranks.
        """
        self._check_optimizer(optimizer)
        checkpoint.load(self.runtime, path, optimizer, extra=extra)


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


def _with_targets(batch: Any, targets: Any) -> Any:
    if targets is None:
        return batch
    if isinstance(batch, Mapping):
        return {**batch, "targets": targets}
    return (*_tuple(batch), targets)


def _tuple(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
