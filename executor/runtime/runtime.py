"""Runtime: the plan executed. Global batch in, mean loss out, gradients in `.grad`."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules.schedule import (
    Action,
    Instruction,
    build_schedule,
    stages_of_devices,
)
from meshwright.costmodel.sharding.data_axis import loss_is_summed
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Assignment
from meshwright.executor.lowering.compile import backend_of
from meshwright.executor.lowering.deferred import Later
from meshwright.executor.lowering.reshard import all_gather, local_part
from meshwright.executor.parameters.gradients import Reducer, deliver, exchange_tied, lay_out
from meshwright.executor.parameters.loss_scale import LossScale, StepGuard
from meshwright.executor.parameters.parameters import StageParameter, load, settle
from meshwright.executor.parameters.refresh import Refresh
from meshwright.executor.parameters.zero3 import collect
from meshwright.executor.ranks import background
from meshwright.executor.ranks.agree import gloo_group, told_by
from meshwright.executor.ranks.launch import device_here
from meshwright.executor.ranks.meshes import Place
from meshwright.executor.ranks.watch import progress
from meshwright.executor.runtime.evaluating import check_evaluable
from meshwright.executor.runtime.place import place_of, stages_of_ranks
from meshwright.executor.stages.batches import Batches, Rows
from meshwright.executor.stages.build import Builder, BuiltStage
from meshwright.executor.stages.pipeline import Observer, Phase, PipelineRun, RunStage
from meshwright.planner.plan.check import check_runs
from meshwright.planner.plan.flow import crossings
from meshwright.planner.plan.plan import Plan


class Runtime:
    """One rank of a running plan. Built collectively: every rank of the plan constructs it at the
    same time.

    `stages` are those of this rank, by number; `held` all its parameters in the order of the
    forward, each once.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        table: FactorTable,
        assignments: list[dict[str, Assignment]],
        model: nn.Module,
        *,
        compile: bool | str = False,
        device: torch.device | None = None,
    ) -> None:
        check_runs(plan)
        device = device or device_here()
        backend = backend_of(compile, device.type)
        self.plan, self.graph = plan, graph
        self._model = _kept(model)
        progress.stages = stages_of_ranks(plan)
        self.place = place_of(plan, graph, table, assignments, device)
        builder = Builder(plan, graph, table, assignments, model, self.place, backend)
        self.stages: dict[int, BuiltStage] = {k: builder.stage(k) for k in self.place.stages}
        self.later, self.tied = builder.later or Later(), builder.tied
        shared = tuple(builder.shared.values())
        own = tuple(p for stage in self.stages.values() for p in stage.parameters)
        self.held: tuple[StageParameter, ...] = (*own, *shared)
        self.reducers = {
            k: Reducer(stage.parameters, self.place) for k, stage in self.stages.items()
        }
        self.common = Reducer(shared, self.place)
        first = {p.fqn: min(k for k in p.shared_stages if k in self.stages) for p in shared}
        self.refreshes = {
            k: Refresh(
                [*(p for p in shared if first[p.fqn] == k), *stage.parameters],
                self.place, stage.reader,
            )
            for k, stage in self.stages.items()
        }  # fmt: skip
        for k, stage in self.stages.items():
            stage.program.ready = self.refreshes[k].wait
        self.reads = {k: stage.reads for k, stage in self.stages.items()}
        self.stream = self._stream()
        # the micro-batch of each stage's last backward
        self.last = {
            i.stage: i.microbatch for i in self.stream if i.action is Action.REDUCE_GRADIENTS
        }
        self.loaded = not any(p.is_meta for p in model.parameters())
        self.saved = frozenset(model.state_dict())  # holds no buffer registered persistent=False
        self.unset = frozenset(fqn for fqn, b in model.named_buffers() if b.is_meta)
        used = {*graph.parameters.values(), *graph.aliases, *graph.buffers.values()}
        self.unused = {n: x.detach() for n, x in model.state_dict().items() if n not in used}
        self.guard = StepGuard(
            place=self.place, scale=LossScale() if plan.precision == "fp16" else None
        )
        self.steps = 0
        self.seed = _shared_seed(self.place)
        self.batches = Batches(plan, graph, self.place)

    def _stream(self) -> tuple[Any, ...]:
        """This rank's instructions."""
        counts = {"num_stages": len(self.plan.stages), "num_devices": len(self.plan.devices)}
        placed = stages_of_devices(self.plan.schedule, **counts)
        streams = build_schedule(
            self.plan.schedule,
            num_microbatches=self.plan.num_microbatches,
            edges=crossings(self.plan, self.graph).keys(),
            **counts,
        )
        return streams[placed.index(self.place.stages)]

    # --- a step ---

    @progress.during("preparing the step", waits=True, is_step=True)
    def train_step(self, batch: Any, observe: Observer | None = None) -> torch.Tensor:
        """Forward and backward of one global batch; the mean loss on every rank. Gradients are
        added to `.grad` if all of them are finite, on every rank, and dropped otherwise. `observe`
        runs each instruction and phase in the runtime's stead."""
        self._check_ready()
        if not torch.is_grad_enabled():
            raise ValueError(
                "train_step under no_grad or inference_mode makes no gradients; use eval_step for "
                "the loss alone"
            )
        inputs = self.batches.checked(batch)
        for reducer in (*self.reducers.values(), self.common):
            reducer.begin()
        watched = observe or _unobserved
        watched(Phase.REFRESH, self._refresh)
        seed = self._step_seed()
        run = PipelineRun(
            {k: self._run_stage(k, inputs) for k in self.stages},
            self.stream,
            rng=lambda k: (seed, k * self.plan.microbatch_rows),
            scale=self.guard.seed / self.plan.num_microbatches,
            later=self.later,
            observe=observe,
        )
        losses = run.run()
        progress.enter("reducing gradients", waits=True)
        with torch.no_grad():
            watched(Phase.REDUCE, self._reduce)
            watched(Phase.DELIVER, self._deliver)
            self.steps += 1
            return self._mean_loss(losses)

    @progress.during("evaluating a batch", waits=True)
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The mean loss of one global batch on every rank, without dropout; nothing is changed."""
        self._check_ready()
        check_evaluable(self.graph)
        inputs = self.batches.checked(batch)
        forward = (Action.FORWARD, Action.SEND_ACTIVATION, Action.RECV_ACTIVATION)
        with torch.no_grad(), self._evaluating():
            self._refresh()
            run = PipelineRun(
                {k: self._run_stage(k, inputs) for k in self.stages},
                [i for i in self.stream if i.action in forward],
                rng=lambda k: (0, 0),
                scale=1.0,
                later=self.later,
            )
            return self._mean_loss(run.run())

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

    def _check_ready(self) -> None:
        """Raise ValueError where there are no weights, or others are trained than planned."""
        if not self.loaded:
            raise ValueError(
                "the model is on the meta device: it has no weights to train; call init_weights, "
                "load_weights, load_state_dict or load_checkpoint first"
            )
        changed = [p.fqn for p in self.held if p.api.requires_grad != p.trainable]
        if changed:
            raise ValueError(
                f"requires_grad of {changed[:3]} (of {len(changed)}) was changed after planning: "
                "freeze or thaw the model's parameters before auto_parallelize, which plans with it"
            )

    @property
    def model(self) -> nn.Module:
        """The user's model. ValueError where it had weights and was freed: they are here."""
        model = self._model()
        if model is None:
            raise ValueError(
                "the model had weights, which were handed over, and was freed: nothing of it is on "
                "the meta device, to be initialised; build it under `with torch.device('meta'):` "
                "for that, or use load_weights, load_state_dict or load_checkpoint"
            )
        return model

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of fp16's backward; None in other precisions."""
        return self.guard.scale

    def _run_stage(self, k: int, inputs: Mapping[str, torch.Tensor]) -> RunStage:
        stage = self.stages[k]
        rows = self.batches.rows(inputs, stage.data, self.reads[k])
        return RunStage(
            program=stage.program,
            channels=stage.channels,
            beside=stage.beside,
            reducer=self.reducers[k],
            inputs=rows.__getitem__,
            counts=self._count(stage, rows),
            last=self.last[k],
        )

    def _refresh(self) -> None:
        """Weights as the optimizer left them."""
        for refresh in self.refreshes.values():
            refresh.begin()

    def _deliver(self) -> None:
        """Gradients to the optimizer, if they are numbers."""
        if self.guard.admit(self.held):
            deliver(self.held)

    def _reduce(self) -> None:
        """Gradients whole on every axis and over all stages."""
        self.common.close()
        for reducer in (*self.reducers.values(), self.common):
            reducer.finish()
        collect(self.held, self.place)
        exchange_tied(self.held, self.place, self.tied)
        lay_out(self.held, self.place)

    def _count(self, stage: BuiltStage, inputs: Rows) -> dict[str, torch.Tensor]:
        """Per loss, its rows over the whole global batch, divided by the number of micro-batches:
        the denominator that makes Σ over micro-batches and ranks the mean over the batch."""
        if stage.counts is None:
            return {}
        device = self.place.device
        totals = {n: torch.zeros((), dtype=torch.int64, device=device) for n in stage.losses}
        with torch.no_grad():
            for part in inputs:
                values = {**stage.program.tensors, **part}
                made = stage.counts.module(*[values[n] for n in stage.counts.arguments])
                targets = dict(zip(stage.counts.outputs, made, strict=True))
                for name, (target, ignored) in stage.losses.items():
                    totals[name] += (targets[target] != ignored).sum()
        for name, (target, _) in stage.losses.items():
            if self.place.data.size > 1 and stage.data.states[target].sharded:
                dist.all_reduce(totals[name], group=self.place.data.group)
        return {name: total / self.plan.num_microbatches for name, total in totals.items()}

    def _mean_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
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

    # --- parameters and state ---

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the user's FQNs, as DTensors on its mesh."""
        for p in self.held:
            yield p.fqn, p.api

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under the user's FQNs, tied names included."""
        found: dict[str, torch.Tensor] = {}
        aliases: dict[str, list[str]] = {}
        for alias, fqn in self.graph.aliases.items():
            aliases.setdefault(fqn, []).append(alias)
        for p in self.held:
            for name in (p.fqn, *aliases.get(p.fqn, [])):
                found[name] = p.api.detach()
        for stage in self.stages.values():
            for value, (fqn, state) in stage.buffers.items():
                if fqn not in self.saved:
                    continue
                local = stage.program.tensors[value]
                if state.sharded:
                    size = self.graph.values[value].shape[state.dim]
                    local = all_gather(local, state, self.place.tensor, size)
                found[fqn] = local
        return found | (self.unused if 0 in self.stages else {})

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for _, p in self.named_parameters())

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """All stages' state as whole CPU tensors, on every rank. Collective; for models that fit
        one host. Waits for a checkpoint that is saved in the background."""
        return self._merged({name: _whole(x) for name, x in self.state_dict().items()})

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """All stages' gradients as whole CPU tensors by FQN, on every rank. Collective."""
        named = dict(self.named_parameters())
        return self._merged(
            {name: _whole(p.grad) for name, p in named.items() if p.grad is not None}
        )

    def _merged(self, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What all device groups have, each told by its first rank."""
        leaders = [ranks[0] for ranks in self.plan.devices]
        if len(leaders) == 1:
            return mine
        background.finish_all()  # a save there talks over the same group
        group = gloo_group()
        parts = [told_by(group, rank, mine if rank == self.place.rank else {}) for rank in leaders]
        return {name: x for part in parts for name, x in part.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's parts from whole tensors (or DTensors of the same layout) by FQN.

        Names of other stages are ignored; a missing or misshapen one raises ValueError, and so does
        a buffer of a model on meta that the state does not hold. What the graph doesn't read may be
        missing where it has a value.
        """
        buffers = {fqn for stage in self.stages.values() for fqn, _ in stage.buffers.values()}
        if valueless := sorted(buffers & self.unset - set(state)):
            raise ValueError(
                f"state dict: buffers {valueless} have no value: the model is on the meta device "
                f"and they are not in the state (registered with persistent=False); call "
                f"init_weights first, which gives them theirs, read a file by load_weights, or add "
                f"them to the state"
            )
        unread = {
            name: _source(state, [name], x.shape)
            for name, x in (self.unused if 0 in self.stages else {}).items()
            if name in state or x.is_meta
        }
        for p in self.held:
            names = [p.fqn, *(a for a, fqn in self.graph.aliases.items() if fqn == p.fqn)]
            source = _source(state, names, p.shape)
            if isinstance(source, DTensor) and _alike(source, p.api):
                with torch.no_grad():
                    p.stored.copy_(source.to_local())
                continue
            whole = source.full_tensor() if isinstance(source, DTensor) else source
            load(p, whole.to(self.place.device), self.place)
        settle(self.held)
        axis = self.place.tensor
        for stage in self.stages.values():
            for value, (fqn, placement) in stage.buffers.items():
                if fqn in state:
                    whole = _source(state, [fqn], self.graph.values[value].shape)
                    whole = whole.to(self.place.device)
                    if placement.sharded:
                        whole = local_part(whole, placement, axis.size, axis.rank)
                    stage.program.tensors[value].copy_(whole)
        for name, source in unread.items():  # what was there may be the user's own
            self.unused[name] = _whole(source).to(self.unused[name].dtype)
        self.loaded, self.unset = True, frozenset()


def _unobserved(what: Instruction | Phase, run: Callable[[], None]) -> None:
    run()


def _kept(model: nn.Module) -> Callable[[], nn.Module | None]:
    """A model that has no weights yet is kept, to be initialised; one that has is the user's."""
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return lambda: model
    return weakref.ref(model)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A whole copy on the CPU."""
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.detach().to("cpu", copy=True)


def _source(
    state: Mapping[str, torch.Tensor], names: Sequence[str], shape: Sequence[int]
) -> torch.Tensor:
    """What a state dict holds under one of a tensor's names; ValueError where it doesn't fit."""
    name = next((n for n in names if n in state), None)
    if name is None:
        raise ValueError(
            f"state dict: missing {names[0]!r}; it has {len(state)} names, e.g. {sorted(state)[:3]}"
        )
    if tuple(state[name].shape) != tuple(shape):
        raise ValueError(
            f"state dict: {names[0]!r} has shape {tuple(state[name].shape)}, the model "
            f"{tuple(shape)}"
        )
    return state[name]


def _alike(x: DTensor, y: torch.Tensor) -> bool:
    """Whether two tensors are laid out alike."""
    return (
        isinstance(y, DTensor) and x.device_mesh == y.device_mesh and x.placements == y.placements
    )


def _shared_seed(place: Place) -> int:
    """Rank 0's torch seed, on every rank: the root of all dropout masks."""
    seed = torch.tensor(torch.initial_seed() & 0x7FFFFFFF, device=place.device)
    if place.mesh is not None:
        dist.broadcast(seed, src=0)
    return int(seed)
