"""The training step of a running plan: global batch in, mean loss out, gradients in `.grad`."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Action, Early
from meshwright.executor import ranks
from meshwright.executor.backward import WeightGradientQueue
from meshwright.executor.devices import random_states
from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.host_values import read
from meshwright.executor.lowering import backend_of
from meshwright.executor.parameters import (
    LossScale,
    Memories,
    Reducer,
    StepGuard,
    StepInBackward,
    UndoableStep,
    WeightGather,
    WholeTensors,
    accumulate_grads,
    check_sharding,
    collect_gradients,
    local_of,
    norm_share,
    reduce_in_optimizers,
    refresh_frozen,
    shard_gradients,
    sum_tied_gradients,
    write_weights,
)
from meshwright.executor.runtime.late import LateSteps
from meshwright.executor.runtime.state import RankState
from meshwright.executor.runtime.step import (
    PendingScalar,
    Step,
    Steps,
    unobserved,
    with_backward_done,
)
from meshwright.executor.stages import (
    BatchShape,
    Builder,
    BuiltStage,
    CheckedPlan,
    EarlyForwards,
    Given,
    Keep,
    LoweredStage,
    Observer,
    Phase,
    PipelineRun,
    RunStage,
    UserModel,
    add_totals,
    check_evaluable,
    check_steps_alone,
    follow,
    look_ups_named,
    replicated,
)
from meshwright.planner.plan import Plan, PlanError, crossings, stages_of_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a plan's run: `compile` its blocks (True, or a backend), on a `device` (None: this
    rank's), and whether replicas are compared with rank 0's in place of being made equal;
    `pipeline` runs the instructions of each step; `replica` is its number among those that train
    apart, which draw other dropout masks."""

    compile: bool | str = False
    device: torch.device | None = None
    check_replicas: bool = False
    replica: int = 0
    pipeline: Callable[..., PipelineRun] = PipelineRun


# the plan for batches of another shape than planned, the first of which is given
AtShape = Callable[[BatchShape, Any], CheckedPlan]


class Runtime(RankState):
    """One rank of a running plan. Built collectively: every rank of the plan constructs it at the
    same time."""

    def __init__(
        self,
        checked: CheckedPlan,
        model: nn.Module,
        *,
        options: RunOptions | None = None,
        at_shape: AtShape | None = None,
    ) -> None:
        """Weights and buffers are made equal to rank 0's, or compared with them (ValueError).
        `at_shape` gives the plan for batches of another shape; without it they are refused."""
        options = options or RunOptions()
        plan, graph = checked.plan, checked.graph
        device = options.device or ranks.device_here()
        backend = backend_of(options.compile, device.type)
        ranks.progress.stages, ranks.progress.dispensable = stages_of_ranks(plan), frozenset()
        ranks.progress.replica_size = plan.num_ranks
        place = self._joined(checked, device)
        user = UserModel(model)
        several = ranks.world_size() > 1
        if several and options.check_replicas:
            ranks.check_equal(user.originals)
        elif several:
            ranks.make_equal(user.originals, place.device)
        self.builder = builder = Builder(checked, user, place, backend=backend)
        stages: dict[int, BuiltStage] = {k: builder.stage(k) for k in place.stages}
        shared = tuple(builder.shared.values())
        super().__init__(plan, graph, place, user, stages, shared)
        is_replicated = replicated(plan)
        user.hold(graph, self.stage_parameters, self.held_buffers, place, whole=is_replicated)
        self.weight_gradients = builder.weight_gradients or WeightGradientQueue()
        self.flow = builder.flow
        self.tied_layouts = builder.tied
        self.late = None if plan.record.flushes else LateSteps(self)
        self.reducers = {k: Reducer(stage.parameters, place) for k, stage in stages.items()}
        self.shared_reducer = Reducer(shared, place)
        reducers = (*self.reducers.values(), self.shared_reducer)
        self.memories = Memories(m for reducer in reducers for m in reducer.memories)
        self.planned = Step.of(checked, place, {k: s.lowered for k, s in stages.items()})
        in_turn = list(dict.fromkeys(i.stage for i in self.planned.stream))
        first = {p.fqn: next(k for k in in_turn if k in p.shared_stages) for p in shared}
        self.gathers: dict[int, WeightGather] = {}
        for k, stage in stages.items():
            parameters = [*(p for p in shared if first[p.fqn] == k), *stage.parameters]
            self.gathers[k] = gather = WeightGather(parameters, place, stage.reader)
            stage.program.ready, stage.program.away = gather.wait, gather.away
        self.lowered = Steps(self.planned)
        self.at_shape = at_shape
        self.guard = StepGuard(place=place, scale=LossScale() if plan.precision == "fp16" else None)
        self.pipeline, self.replica = options.pipeline, options.replica
        self.validation = Validation(self)
        self.steps = 0
        self.loads = 0  # times that all tensors were given other values
        self.seed = shared_seed(place)
        self.batch_check = ranks.BatchCheck()
        self.share = (0, 1)  # of the batch, where each rank runs a plan of its own
        self.retired = False  # by a plan that took the model over
        if place.mesh is not None:
            reduce_in_optimizers()

    def _joined(self, checked: CheckedPlan, device: torch.device) -> ranks.Place:
        """This rank's place in the plan. Collective."""
        return join_plan(checked, device)

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of fp16; None in other precisions."""
        return self.guard.scale

    def all_loaded(self) -> None:
        """Take note that all tensors are new; what compressed sums remember is of others."""
        super().all_loaded()
        self.memories.clear()
        self.loads += 1

    @ranks.progress.during(ranks.PREPARING, waits=True, is_step=True)
    def train_step(
        self,
        batch: Any,
        observe: Observer | None = None,
        *,
        local: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one global batch, or of this rank's share of it (`local`);
        returns the mean loss on every rank.

        Gradients are added to `.grad` if all of them are finite, on every rank, and dropped
        otherwise; but an `optimizer` steps in the backward, whatever they are. `observe` runs each
        instruction and phase in the runtime's stead.
        """
        self.validation.settle()
        if self.late is not None:
            return with_backward_done(self._late_step(self.late, batch, observe, local=local))
        stepping = None if optimizer is None else self._in_backward(optimizer)
        step, losses = self.passes(batch, observe, local=local, stepping=stepping)
        with torch.no_grad():
            (observe or unobserved)(Phase.DELIVER, partial(self._accumulate_grads, step))
            self.settle_buffers()
            self.steps += 1
            loss = step.mean_loss(losses)
        return with_backward_done(loss)

    def _late_step(
        self, late: LateSteps, batch: Any, observe: Observer | None, *, local: bool
    ) -> torch.Tensor:
        """A step whose gradients come late: the loss of the newest one that is done with."""
        self._check_trains()
        late.check_feeds()
        step, inputs = self._prepared(batch, local)
        late.check_step(step)
        self.follow_buffers()
        late.turn()
        (observe or unobserved)(Phase.REFRESH, self._gather_weights)
        loss = late.train(step, inputs, observe)
        with torch.no_grad():
            self.settle_buffers()
        self.steps += 1
        return loss

    def drain(self, observe: Observer | None = None) -> torch.Tensor | None:
        """A step without a batch: backwards that are outstanding, and `.grad` of what is due; the
        newest loss, None where nothing is outstanding. Collective."""
        return None if self.late is None else self.late.drain(observe)

    @property
    def outstanding(self) -> bool:
        """Whether gradients of steps that were made have not come yet."""
        return self.late is not None and self.late.outstanding

    def check_drained(self, who: str) -> None:
        """Raise ValueError where gradients are outstanding, which `who` would lose."""
        if self.late is not None:
            self.late.check_drained(who)

    def _in_backward(self, optimizer: torch.optim.Optimizer) -> StepInBackward:
        """An optimizer that is stepped in the backward of the next step."""
        follow(optimizer)
        check_steps_alone(optimizer)
        optimizer.zero_grad()
        return StepInBackward(optimizer, self.place.device)

    def passes(
        self,
        batch: Any,
        observe: Observer | None,
        *,
        local: bool,
        stepping: StepInBackward | None = None,
    ) -> tuple[Step, list[torch.Tensor]]:
        """Forward, backward and reduction: the step and, on last stages, losses by micro-batch."""
        self._check_trains()
        step, inputs = self._prepared(batch, local)
        self.follow_buffers()
        for reducer in (*self.reducers.values(), self.shared_reducer):
            reducer.begin(stepping)
        self.flow.begin()
        observed = observe or unobserved
        write_weights(self.stage_parameters, self.graph)
        observed(Phase.REFRESH, self._gather_weights)
        seed, (share, shares) = self.step_seed(), self.share
        run = self.pipeline(
            {k: self.run_stage(step, k, inputs) for k in self.stages},
            step.stream,
            rng=lambda k: (seed, (k * shares + share) * step.plan.microbatch_rows),
            scale=self.guard.seed / step.plan.num_microbatches,
            weight_gradients=self.weight_gradients,
            observe=observe,
            around=self.validation.early(step.early),
        )
        with look_ups_named():
            losses = run.run()
        ranks.progress.enter("reducing gradients", waits=True)
        with torch.no_grad():
            observed(Phase.REDUCE, self.finish_gradients)
        return step, losses

    def read_state(self) -> None:
        """Within a step: read weights and buffers again, which were written since it began."""
        for gather in self.gathers.values():
            gather.finish()
        self.follow_buffers()
        self._gather_weights()

    def eval_step(
        self, batch: Any, observe: Observer | None = None, *, local: bool = False
    ) -> torch.Tensor:
        """The mean loss of one global batch on every rank, without dropout; nothing is changed.
        `observe` runs each instruction in the runtime's stead."""
        return self.evaluate(batch, observe=observe, local=local)[0]

    @ranks.progress.during(ranks.EVALUATING, waits=True)
    def evaluate(
        self,
        batch: Any,
        values: Collection[str] = (),
        *,
        keep: Callable[[Step], Keep] | None = None,
        observe: Observer | None = None,
        local: bool = False,
        lower: Callable[[Step], Step] | None = None,
    ) -> tuple[torch.Tensor, Step]:
        """`eval_step`, with the step that was run: it hands the `values` of the graph that it
        makes, as they are on this rank, to what `keep` makes for it. `lower` gives a step of its
        own in place of that for the batch's shape."""
        self.validation.settle()
        self._check_ready()
        step, inputs = self._prepared(batch, local)
        check_evaluable(step.graph, step.plan.num_microbatches)
        if lower is not None or values or step.plan.slices:
            step = lower(step) if lower is not None else self._keeping(step, frozenset(values))
            for k, stage in self.stages.items():
                stage.program.take(step.stages[k].graphs)
        self.follow_buffers()
        forward = (Action.FORWARD, Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
        if self.late is not None:
            self.late.turn()
        with torch.no_grad(), self._evaluating():
            self._gather_weights()
            run = self.pipeline(
                {k: self.run_stage(step, k, inputs) for k in self.stages},
                [i for i in step.stream if i.action in forward],
                rng=lambda k: (0, 0),
                scale=1.0,
                weight_gradients=self.weight_gradients,
                observe=observe,
                keep=None if keep is None else keep(step),
            )
            with look_ups_named():
                return step.mean_loss(run.run()), step

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        programs = [stage.program for stage in self.stages.values()]
        for program in programs:
            program.train(False)
        try:
            yield
        finally:
            for program in programs:
                program.train(True)
                for module in program.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # no backward does: weights may be written before the next

    def _prepared(self, batch: Any, local: bool) -> tuple[Step, Given]:
        """The step for a batch, which the programs run from now on, and its inputs: the same on all
        ranks, or those of this rank's share. Raises ValueError on all alike."""
        batches, data = self.planned.batches, self.place.rows
        check = partial(
            self.batch_check.check,
            list(self.graph.inputs.values()),
            device=self.place.device,
            share=(data.rank, data.size) if local else (0, 1),
            rows={self.graph.inputs[name] for name in self.graph.batched} if local else (),
        )
        try:
            inputs = Given(self._checked(batch, local), local)
            shape = batches.shape(inputs)
        except ValueError:
            with suppress(ValueError):  # this rank's own says more
                check(None)
            raise
        tensors = inputs.tensors or {}
        known = {p: tensors[name] for name, p in self.graph.inputs.items() if name in tensors}
        check(known, rows_in_all=shape.rows)
        try:
            step = self._step_at(shape, batch, inputs)
        except ValueError as error:
            raise batches.unlike(inputs, str(error)) from error
        for k, stage in self.stages.items():
            stage.program.take(step.stages[k].graphs)
        ranks.progress.enter("starting the step", waits=True)
        return step, step.batches.filled(inputs)

    def _checked(self, batch: Any, local: bool) -> Mapping[str, torch.Tensor] | None:
        """The inputs of a batch; None where it may be left out, and is."""
        if batch is None and local and not self.planned.reads_data:
            return None
        if batch is None:
            reads = "reads data" if local else "gives no batch"
            raise BatchError(
                f"it is None, and this rank {reads}",
                place="batch",
                way_out="with local=True, ranks may leave it out whose result.data_parallel.reads "
                "is False",
            )
        return self.planned.batches.checked(batch)

    def _step_at(self, shape: BatchShape, batch: Any, inputs: Given) -> Step:
        """The step for a batch, lowered for the first of its shape and values. Collective then."""
        if (step := self.lowered.serving(shape, inputs)) is not None:
            return step
        if self.at_shape is None:
            raise StateError("plan for this batch", place="batch", way_out="plan for it")
        with ranks.progress.lowering(), self.user.as_passed():
            checked = self.at_shape(shape, batch)
        lowering = self.builder.at(checked)
        stages = {k: lowering.stage(k) for k in self.stages}
        self._check_same_tensors(checked.graph, stages)
        return self.lowered.add(Step.of(checked, self.place, stages), inputs)

    def _keeping(self, step: Step, values: frozenset[str]) -> Step:
        """The step, lowered once more so that it hands these values on."""
        key = step.batches, values
        if key not in self.lowered.handing:
            checked = step.checked.whole
            lowering = self.builder.at(checked, values)
            stages = {k: lowering.stage(k) for k in self.stages}
            self.lowered.hand_on(key, Step.of(checked, self.place, stages))
        return self.lowered.handing[key]

    def _check_same_tensors(self, graph: Graph, stages: Mapping[int, LoweredStage]) -> None:
        """Raise ValueError unless stages read the weights, buffers and inputs of the planned."""
        same = graph.inputs == self.graph.inputs and graph.batched == self.graph.batched
        for k, stage in stages.items():
            planned = self.stages[k].lowered
            same &= (stage.stored, stage.buffers) == (planned.stored, planned.buffers)
        if not same:
            raise StateError(
                "with this shape the model reads other inputs, or weights in other parts, than "
                "planned",
                place="batch",
                way_out="plan for this batch",
            )

    def _check_trains(self) -> None:
        """`_check_ready`, and ValueError where no gradients are made."""
        self._check_ready()
        if not torch.is_grad_enabled():
            raise StateError(
                " under no_grad or inference_mode makes no gradients",
                place="train_step",
                legal="grad enabled",
                way_out="use eval_step for the loss alone",
            )

    def _check_ready(self) -> None:
        """Raise ValueError where there are no weights, `requires_grad` was changed or a parameter
        replaced, or another plan has taken the model over."""
        if self.retired:
            raise StateError(
                "this plan was replaced by replan(), which took the model over",
                way_out="use its result",
            )
        if not self.loaded:
            raise StateError(
                "the model is on the meta device: it has no weights to train",
                way_out="call init_weights, load_weights, load_state_dict or load_checkpoint first",
            )
        changed = [p.fqn for p in self.stage_parameters if p.api.requires_grad != p.trainable]
        if changed:
            raise StateError(
                f"requires_grad of {changed[:3]} (of {len(changed)}) was changed after planning",
                way_out="freeze or thaw the model's parameters before auto_parallelize, which "
                "plans with it",
            )
        self.user.check_places(self.stage_parameters)

    def run_stage(self, step: Step, k: int, inputs: Given) -> RunStage:
        lowered, program = step.stages[k], self.stages[k].program
        rows = step.batches.rows(inputs, lowered.outer[0], step.reads[k])
        add_totals(lowered.totals, program.tensors, rows)
        return RunStage(
            program=program,
            lowered=lowered,
            reducer=self.reducers[k],
            inputs=rows.__getitem__,
            counts=step.loss_rows(k, program.tensors, rows),
            last=step.last[k],
        )

    def _gather_weights(self) -> None:
        """Start the all-gathers and casts of weights."""
        refresh_frozen(self.stage_parameters)
        for gather in self.gathers.values():
            gather.begin()

    def finish_gradients(self) -> None:
        """Wait until gradients are reduced over all axes and stages, and sharded as `stored`."""
        self.shared_reducer.flush()
        for reducer in (*self.reducers.values(), self.shared_reducer):
            reducer.finish()
        collect_gradients(self.stage_parameters, self.place)
        sum_tied_gradients(self.stage_parameters, self.place, self.tied_layouts)
        shard_gradients(self.stage_parameters, self.place)

    def _accumulate_grads(self, step: Step) -> None:
        """Add the gradients that there are to `.grad`, if all of them are finite."""
        told = [*self.batch_check.riding, *step.arrived(self.flow)]
        admitted = self.guard.admit(self.stage_parameters, told)
        try:
            self.batch_check.conclude(told[: ranks.RIDING], self.place.device)
        except BatchError:  # of all ranks
            self.memories.clear()
            raise
        if not admitted:
            self.memories.clear()
        else:
            absent = step.absent(told[ranks.RIDING :])
            for p in [p for p in self.stage_parameters if p.value in absent]:
                p.gradient = None
            accumulate_grads(self.stage_parameters, self.place.device)

    def step_seed(self) -> int:
        apart = self.replica * 1_000_003**2
        return random.Random(self.seed * 1_000_003 + self.steps + apart).getrandbits(31)


# --- joined passes --------------------------------------------------------------------------------

# What the ranks of a plan agree on before it runs: process groups, stages, the seed.


def join_plan(checked: CheckedPlan, device: torch.device) -> ranks.Place:
    """Make this process' groups for a plan, together with all other ranks. Raises PlanError, on all
    alike and before any group is made, for a plan of another number of ranks."""
    plan, graph = checked.plan, checked.graph
    meshes = ranks.stage_meshes(plan, graph, checked.factors, checked.assignments)
    check_sharding(plan, meshes)
    running = ranks.world_size()
    if plan.num_ranks == 1 and running == 1:
        return ranks.single_process(device, meshes)
    if running != plan.num_ranks:
        raise PlanError(
            f"made for {plan.num_ranks} ranks, but {running} are running",
            place="plan",
            way_out=f"launch {plan.num_ranks} with torchrun, take a plan file for {running} "
            f"ranks, or plan again for a cluster of {running} devices",
        )
    edges = [e for e in crossings(plan, graph) if meshes[e[0]].ranks != meshes[e[1]].ranks]
    tied = sorted({o for o in stages_of_parameters(plan, graph).values() if len(o) > 1})
    return ranks.join_groups(meshes, device, edges, tied)


def stages_of_ranks(plan: Plan) -> dict[int, list[int]]:
    """Rank -> the stages that it runs."""
    stages: dict[int, list[int]] = {}
    for k, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            stages.setdefault(rank, []).append(k)
    return stages


def shared_seed(place: ranks.Place) -> int:
    """Rank 0's torch seed, on every rank: the root of all dropout masks."""
    seed = torch.tensor(torch.initial_seed() & 0x7FFFFFFF, device=place.device)
    if place.mesh is not None:
        dist.broadcast(seed, src=0)
    shared: int = read(seed, lambda: 0)
    return shared


# --- validation of steps --------------------------------------------------------------------------

# Optimizer steps that are validated afterwards, so that a pipeline's ranks have no common end.
#
# Clipping by the norm of all gradients, and the rule that a step without finite gradients is none,
# need those of every rank: a rank that waited for them would wait for the last stage. So it steps
# its optimizer with the gradients as they are, keeps a copy of what that changed, and begins the
# next step. What all ranks together have is on its way in one all-reduce of three numbers,
#
#     (loss, ranks with a gradient that is not finite, Σ |g|² / copies),
#
# the *verdict*, with the notes of leaves on gradients that they did not give beside. It is waited
# for before the first backward of the next step (`costmodel/schedules/early.py`), or before
# anything else that reads or writes the state (`settle`). Where it does not hold, all ranks put
# weights and states back, step again with the gradients that there are, clipped, or without any,
# and make the forwards again that read the wrong weights. Weights, states and losses are those of
# clipping first, whatever the verdicts.
#
# After a verdict that did not hold the next one probably doesn't, either: that step waits for its
# own at once, as does the first, until one holds. So do steps with another optimizer than the last
# one.


ROOM = 1e-6  # that clipping adds to a norm, as torch's does


@dataclass(slots=True, kw_only=True)
class Verdict:
    """Numbers of one step, summed over all ranks: on their way while there is `work`. After the
    first three, those of its batch, which `batches` compares, and those that `step.absent` reads.
    """

    step: Step
    batches: ranks.BatchCheck
    numbers: torch.Tensor
    work: dist.Work | None
    max_norm: float | None

    def wait(self) -> torch.Tensor:
        """The numbers, when all ranks have ended their backwards."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.batches.conclude(self.numbers[3 : 3 + ranks.RIDING].tolist())
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
    def absent(self) -> frozenset[str]:
        """Parameters without a gradient, by value."""
        return self.step.absent(self.wait()[3 + ranks.RIDING :].tolist())

    @property
    def holds(self) -> bool:
        """Whether the gradients were right as they are."""
        return self.finite and float(self.coefficient) == 1.0 and not self.absent

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

    @ranks.progress.during(ranks.PREPARING, waits=True, is_step=True)
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
            verdict = self._delivered(step, max_norm, step.own_loss(losses))
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

    def _delivered(self, step: Step, max_norm: float | None, loss: torch.Tensor) -> Verdict:
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
        told = [*runtime.batch_check.riding, *step.arrived(runtime.flow)]
        numbers = torch.cat((numbers, numbers.new_tensor(told)))
        runtime.settle_buffers()
        runtime.steps += 1
        work = None
        if runtime.place.mesh is not None:
            if self.group is None:
                timeout = timedelta(seconds=ranks.launch.timeout_s())
                self.group = dist.new_group(backend="gloo", timeout=timeout)
            work = dist.all_reduce(numbers, group=self.group, async_op=True)
        return Verdict(
            step=step, batches=runtime.batch_check, numbers=numbers, work=work, max_norm=max_norm
        )

    def settle(self) -> None:
        """Wait for the verdict that is outstanding, if any, and do what it asks for."""
        if self.outstanding is not None:
            with ranks.progress.during("waiting for the last step's verdict", waits=True):
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
        parameters = self.runtime.stage_parameters
        absent = verdict.absent if verdict.finite else frozenset(p.value for p in parameters)
        for p in [p for p in parameters if p.value in absent]:
            p.api.grad = None
        if verdict.finite:
            self._clip(verdict.coefficient)

    @torch.no_grad()
    def _clip(self, coefficient: torch.Tensor) -> None:
        if coefficient == 1:
            return
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
