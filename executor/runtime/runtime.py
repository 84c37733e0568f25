"""The training step of a running plan: global batch in, mean loss out, gradients in `.grad`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Action, Instruction, build_schedule, stages_of_devices
from meshwright.costmodel.sharding import Assignment, FactorTable, RowUse, loss_is_summed, row_use
from meshwright.executor.backward import WeightGradientQueue
from meshwright.executor.lowering import backend_of, row_weight
from meshwright.executor.parameters import (
    LossScale,
    Reducer,
    StepGuard,
    WeightGather,
    accumulate_grads,
    check_sharding,
    collect_gradients,
    reduce_in_optimizers,
    refresh_frozen,
    shard_gradients,
    sum_tied_gradients,
)
from meshwright.executor.ranks import (
    BatchCheck,
    Place,
    check_equal,
    device_here,
    join_groups,
    make_equal,
    progress,
    single_process,
    stage_meshes,
    world_size,
)
from meshwright.executor.runtime.evaluation import check_evaluable
from meshwright.executor.runtime.state import RankState
from meshwright.executor.stages import (
    Batches,
    Builder,
    BuiltStage,
    Observer,
    Phase,
    PipelineRun,
    Rows,
    RunStage,
    UserModel,
    add_totals,
    replicated,
)
from meshwright.planner.plan import Plan, PlanError, check_runs, crossings, stages_of_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run: `compile` its blocks (True, or a backend), on a `device` (None: this
    rank's), and whether replicas are compared with rank 0's in place of being made equal."""

    compile: bool | str = False
    device: torch.device | None = None
    check_replicas: bool = False


class Runtime(RankState):
    """One rank of a running plan. Built collectively: every rank of the plan constructs it at the
    same time."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        table: FactorTable,
        assignments: list[dict[str, Assignment]],
        model: nn.Module,
        *,
        use: RowUse | None = None,
        options: RunOptions | None = None,
    ) -> None:
        """`use` is what the loss makes of rows, read from the graph if it is None. Weights and
        buffers are made equal to rank 0's, or compared with them (ValueError)."""
        options = options or RunOptions()
        check_runs(plan)
        device = options.device or device_here()
        backend = backend_of(options.compile, device.type)
        progress.stages = _stages_of_ranks(plan)
        place = _join_plan(plan, graph, table, assignments, device)
        use = row_use(graph, table) if use is None else use
        user = UserModel(model)
        if place.mesh is not None and options.check_replicas:
            check_equal(user.originals)
        elif place.mesh is not None:
            make_equal(user.originals, place.device)
        builder = Builder(plan, graph, table, assignments, user, place, use=use, backend=backend)
        stages: dict[int, BuiltStage] = {k: builder.stage(k) for k in place.stages}
        shared = tuple(builder.shared.values())
        super().__init__(plan, graph, place, user, stages, shared)
        whole = replicated(plan)
        user.hold(graph, self.stage_parameters, self.held_buffers, place, whole=whole)
        self.weight_gradients = builder.weight_gradients or WeightGradientQueue()
        self.tied_layouts = builder.tied
        self.reducers = {k: Reducer(stage.parameters, place) for k, stage in stages.items()}
        self.shared_reducer = Reducer(shared, place)
        first = {p.fqn: min(k for k in p.shared_stages if k in stages) for p in shared}
        self.gathers: dict[int, WeightGather] = {}
        for k, stage in stages.items():
            parameters = [*(p for p in shared if first[p.fqn] == k), *stage.parameters]
            self.gathers[k] = WeightGather(parameters, place, stage.reader)
            stage.program.ready = self.gathers[k].wait
        self.reads = {k: stage.reads for k, stage in stages.items()}
        self.stream = self._stream()
        # stage -> the micro-batch of its last backward
        self.last = {
            i.stage: i.microbatch for i in self.stream if i.action is Action.REDUCE_GRADIENTS
        }
        self.guard = StepGuard(place=place, scale=LossScale() if plan.precision == "fp16" else None)
        self.steps = 0
        self.seed = _shared_seed(place)
        self.batches = Batches(plan, graph, place, use.filling)
        self.batch_check = BatchCheck()
        self.retired = False  # by a plan that took the model over
        if place.mesh is not None:
            reduce_in_optimizers()

    def _stream(self) -> tuple[Instruction, ...]:
        """This rank's instructions of a step, in order."""
        counts = {"num_stages": len(self.plan.stages), "num_devices": len(self.plan.devices)}
        placed = stages_of_devices(self.plan.schedule, **counts)
        streams = build_schedule(
            self.plan.schedule,
            num_microbatches=self.plan.num_microbatches,
            edges=crossings(self.plan, self.graph).keys(),
            **counts,
        )
        return streams[placed.index(self.place.stages)]

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of fp16; None in other precisions."""
        return self.guard.scale

    @progress.during("preparing the step", waits=True, is_step=True)
    def train_step(self, batch: Any, observe: Observer | None = None) -> torch.Tensor:
        """Forward and backward of one global batch; returns the mean loss on every rank.

        Gradients are added to `.grad` if all of them are finite, on every rank, and dropped
        otherwise. `observe` runs each instruction and phase in the runtime's stead.
        """
        self._check_ready()
        if not torch.is_grad_enabled():
            raise ValueError(
                "train_step under no_grad or inference_mode makes no gradients; use eval_step for "
                "the loss alone"
            )
        inputs = self._checked(batch)
        self.follow_buffers()
        for reducer in (*self.reducers.values(), self.shared_reducer):
            reducer.begin()
        observed = observe or _unobserved
        observed(Phase.REFRESH, self._gather_weights)
        seed = self._step_seed()
        run = PipelineRun(
            {k: self._run_stage(k, inputs) for k in self.stages},
            self.stream,
            rng=lambda k: (seed, k * self.plan.microbatch_rows),
            scale=self.guard.seed / self.plan.num_microbatches,
            weight_gradients=self.weight_gradients,
            observe=observe,
        )
        losses = run.run()
        progress.enter("reducing gradients", waits=True)
        with torch.no_grad():
            observed(Phase.REDUCE, self._finish_gradients)
            observed(Phase.DELIVER, self._accumulate_grads)
            self.settle_buffers()
            self.steps += 1
            loss = self._mean_loss(losses)
        loss.backward = _backward_is_done  # type: ignore[method-assign]
        return loss

    @progress.during("evaluating a batch", waits=True)
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The mean loss of one global batch on every rank, without dropout; nothing is changed."""
        self._check_ready()
        check_evaluable(self.graph)
        inputs = self._checked(batch)
        self.follow_buffers()
        forward = (Action.FORWARD, Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
        with torch.no_grad(), self._evaluating():
            self._gather_weights()
            run = PipelineRun(
                {k: self._run_stage(k, inputs) for k in self.stages},
                [i for i in self.stream if i.action in forward],
                rng=lambda k: (0, 0),
                scale=1.0,
                weight_gradients=self.weight_gradients,
            )
            return self._mean_loss(run.run())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output in its current mode, without gradients. Collective: where this
        rank holds a part, the whole weights are gathered for it."""
        self._check_ready()
        if self.user.whole:
            with torch.no_grad():
                return self.model(*args, **kwargs)
        state = {name: x.to(self.place.device) for name, x in self.everything().items()}
        with torch.no_grad(), self.user.filled(state) as model:
            return model(*args, **kwargs)

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

    def _checked(self, batch: Any) -> dict[str, torch.Tensor]:
        """The inputs by value name, the same on all ranks. Raises ValueError on all alike."""
        paths, device = list(self.graph.inputs.values()), self.place.device
        try:
            inputs = self.batches.checked(batch)
        except ValueError:
            with suppress(ValueError):  # this rank's own says more
                self.batch_check.check(paths, None, device)
            raise
        by_path = {path: inputs[name] for name, path in self.graph.inputs.items()}
        self.batch_check.check(paths, by_path, device)
        return inputs

    def _check_ready(self) -> None:
        """Raise ValueError where there are no weights, `requires_grad` was changed or a parameter
        replaced, or another plan has taken the model over."""
        if self.retired:
            raise ValueError(
                "this plan was replaced by replan(), which took the model over: use its result"
            )
        if not self.loaded:
            raise ValueError(
                "the model is on the meta device: it has no weights to train; call init_weights, "
                "load_weights, load_state_dict or load_checkpoint first"
            )
        changed = [p.fqn for p in self.stage_parameters if p.api.requires_grad != p.trainable]
        if changed:
            raise ValueError(
                f"requires_grad of {changed[:3]} (of {len(changed)}) was changed after planning: "
                "freeze or thaw the model's parameters before auto_parallelize, which plans with it"
            )
        self.user.check_places(self.stage_parameters)

    def _run_stage(self, k: int, inputs: Mapping[str, torch.Tensor]) -> RunStage:
        stage = self.stages[k]
        rows = self.batches.rows(inputs, stage.data, self.reads[k])
        add_totals(stage.totals, stage.program.tensors, rows)
        return RunStage(
            program=stage.program,
            channels=stage.channels,
            beside=stage.beside,
            reducer=self.reducers[k],
            inputs=rows.__getitem__,
            counts=self._loss_rows(stage, rows),
            last=self.last[k],
        )

    def _gather_weights(self) -> None:
        """Start the all-gathers and casts of the weights that the optimizer updated."""
        refresh_frozen(self.stage_parameters, written_only=True)
        for gather in self.gathers.values():
            gather.begin()

    def _finish_gradients(self) -> None:
        """Wait until gradients are reduced over all axes and stages, and sharded as `stored`."""
        self.shared_reducer.flush()
        for reducer in (*self.reducers.values(), self.shared_reducer):
            reducer.finish()
        collect_gradients(self.stage_parameters, self.place)
        sum_tied_gradients(self.stage_parameters, self.place, self.tied_layouts)
        shard_gradients(self.stage_parameters, self.place)

    def _accumulate_grads(self) -> None:
        """Add the gradients to `.grad`, if all of them are finite."""
        if self.guard.admit(self.stage_parameters):
            accumulate_grads(self.stage_parameters)

    def _loss_rows(self, stage: BuiltStage, inputs: Rows) -> dict[str, torch.Tensor]:
        """Per loss, its rows over the whole global batch, divided by the number of micro-batches:
        the denominator that makes Σ over micro-batches and ranks the mean over the batch."""
        if stage.counts is None:
            return {}
        device = self.place.device
        totals = {n: torch.zeros((), dtype=torch.int64, device=device) for n in stage.losses}
        with torch.no_grad():
            for microbatch in inputs:
                values = {**stage.program.tensors, **microbatch}
                results = stage.counts.module(*[values[n] for n in stage.counts.arguments])
                targets = dict(zip(stage.counts.outputs, results, strict=True))
                for name, (target, ignored, weight) in stage.losses.items():
                    found = row_weight(targets[target], ignored, targets.get(weight or ""))
                    totals[name] = totals[name] + found
        for name, (target, *_) in stage.losses.items():
            if self.place.data.size > 1 and stage.data.states[target].sharded:
                dist.all_reduce(totals[name], group=self.place.data.group)
        return {name: total / self.plan.num_microbatches for name, total in totals.items()}

    def _mean_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean over micro-batches and data ranks, broadcast from the last stage."""
        place = self.place
        total = torch.zeros((), dtype=torch.float32, device=place.device)
        last = len(self.plan.stages) - 1
        if losses:
            total = (
                torch.stack([x.float().reshape(()) for x in losses]).sum()
                / self.plan.num_microbatches
            )
            if place.data.size > 1 and loss_is_summed(self.stages[last].data, self.graph):
                dist.all_reduce(total, group=place.data.group)
        if place.mesh is not None and last > 0:
            dist.broadcast(total, src=place.meshes[last].ranks[0])
        return total

    def _step_seed(self) -> int:
        return random.Random(self.seed * 1_000_003 + self.steps).getrandbits(31)


def _backward_is_done(*args: object, **kwargs: object) -> None:
    """What `backward()` of a step's loss does, by habit."""
    raise RuntimeError(
        "loss.backward(): train_step has run the backward already, and added the gradients to "
        ".grad; drop this line, and step the optimizer"
    )


def _unobserved(what: Instruction | Phase, run: Callable[[], None]) -> None:
    run()


def _join_plan(
    plan: Plan,
    graph: Graph,
    table: FactorTable,
    assignments: list[dict[str, Assignment]],
    device: torch.device,
) -> Place:
    """Make this process' groups for a plan, together with all other ranks. Raises PlanError, on all
    alike and before any group is made, for a plan of another number of ranks."""
    meshes = stage_meshes(plan, graph, table, assignments)
    check_sharding(plan, meshes)
    if plan.num_ranks == 1 and world_size() == 1:
        return single_process(device, meshes)
    if world_size() != plan.num_ranks:
        raise PlanError(
            f"plan: made for {plan.num_ranks} ranks, but {world_size()} are running; launch "
            f"{plan.num_ranks} with torchrun, take a plan file for {world_size()} ranks, or plan "
            f"again for a cluster of {world_size()} devices"
        )
    edges = [e for e in crossings(plan, graph) if meshes[e[0]].ranks != meshes[e[1]].ranks]
    tied = sorted({o for o in stages_of_parameters(plan, graph).values() if len(o) > 1})
    return join_groups(meshes, device, edges, tied)


def _stages_of_ranks(plan: Plan) -> dict[int, list[int]]:
    """Rank -> the stages that it runs."""
    stages: dict[int, list[int]] = {}
    for k, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            stages.setdefault(rank, []).append(k)
    return stages


def _shared_seed(place: Place) -> int:
    """Rank 0's torch seed, on every rank: the root of all dropout masks."""
    seed = torch.tensor(torch.initial_seed() & 0x7FFFFFFF, device=place.device)
    if place.mesh is not None:
        dist.broadcast(seed, src=0)
    return int(seed)
