"""ParallelModel: the plan executed. Global batch in, mean loss out, gradients in `.grad`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from costmodel.factors import FactorTable
from costmodel.graph import Graph
from costmodel.schedule import EXECUTABLE, build_schedule
from executor.build import BuiltStage, build_stage
from executor.gradients import collect, deliver, exchange_tied, reduce_gradients
from executor.launch import device_here, world_size
from executor.meshes import Place, StageMesh, alone, join
from executor.parameters import load, refresh
from executor.pipeline import PipelineRun
from executor.reshard import all_gather, local_part
from planner.data_axis import loss_is_summed
from planner.layouts import Assignment
from planner.plan import Plan, PlanError
from planner.trace import input_leaves


class Runtime:
    """One rank of a running plan. Built collectively: every rank of the plan constructs it at the
    same time."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        table: FactorTable,
        assignments: list[dict[str, Assignment]],
        model: nn.Module,
    ) -> None:
        if plan.precision == "fp16":
            raise PlanError(
                "plan: precision='fp16' is planned but not run: it needs loss scaling; use bf16"
            )
        if plan.schedule not in EXECUTABLE:
            raise PlanError(
                f"plan: schedule={plan.schedule!r} is priced but not run: use one of "
                f"{', '.join(EXECUTABLE)}"
            )
        self.plan, self.graph = plan, graph
        self.place = _place(plan)
        self.stage: BuiltStage = build_stage(plan, graph, table, assignments, model, self.place)
        streams = build_schedule(
            plan.schedule,
            num_stages=len(plan.stages),
            num_microbatches=plan.num_microbatches,
            edges=self.stage.edges,
        )
        self.stream = streams[self.place.stage]
        self.loaded = not any(p.is_meta for p in model.parameters())
        self.saved = frozenset(model.state_dict())  # holds no buffer registered persistent=False
        self.unset = frozenset(fqn for fqn, b in model.named_buffers() if b.is_meta)
        used = {*graph.parameters.values(), *graph.aliases, *graph.buffers.values()}
        self.unused = {n: x.detach() for n, x in model.state_dict().items() if n not in used}
        self.steps = 0
        self.seed = _shared_seed(self.place)
        self.dtypes = {path: graph.values[name].dtype for name, path in graph.inputs.items()}

    # --- a step ---

    def train_step(self, batch: Any) -> torch.Tensor:
        """Forward and backward of one global batch; the mean loss on every rank. Gradients are
        added to `.grad`."""
        if not self.loaded:
            raise ValueError(
                "the model is on the meta device: it has no weights to train; call load_state_dict "
                "or load_checkpoint first"
            )
        inputs = self._split(batch)
        refresh(self.stage.parameters, self.place)
        seed = self._step_seed()
        run = PipelineRun(
            self.stage.program,
            self.stream,
            self.stage.channels,
            inputs.__getitem__,
            self._count(inputs),
            lambda k: (seed, k * self.plan.microbatch_rows),
        )
        losses = run.run()
        collect(self.stage.parameters)
        reduce_gradients(self.stage.parameters, self.place)
        exchange_tied(self.stage.parameters, self.place, self.stage.tied)
        deliver(self.stage.parameters, self.place)
        self.steps += 1
        return self._mean_loss(losses)

    def _split(self, batch: Any) -> list[dict[str, torch.Tensor]]:
        """This rank's rows of every micro-batch, by value name."""
        leaves = {path: x for path, x in input_leaves(batch)[0] if isinstance(x, torch.Tensor)}
        missing = sorted(set(self.graph.inputs.values()) - set(leaves))
        if missing:
            raise ValueError(
                f"batch: missing {missing}; the model was planned with inputs "
                f"{sorted(self.graph.inputs.values())}"
            )
        rows, size, rank = self.plan.microbatch_rows, self.place.data.size, self.place.data.rank
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(self.plan.num_microbatches)]
        for name, path in self.graph.inputs.items():
            tensor = self._checked(path, leaves[path], name)
            split = self.stage.data.states[name].sharded
            for k, part in enumerate(parts):
                if name in self.graph.batched:
                    chunk = tensor[k * rows : (k + 1) * rows]
                    part[name] = chunk.tensor_split(size)[rank] if split else chunk
                else:
                    part[name] = tensor
        return parts

    def _checked(self, path: str, tensor: torch.Tensor, name: str) -> torch.Tensor:
        expected = list(self.graph.values[name].shape)
        if name in self.graph.batched:
            expected[0] = self.plan.global_batch_size
        if list(tensor.shape) != expected:
            raise ValueError(
                f"batch: {path!r} has shape {tuple(tensor.shape)}; the plan expects "
                f"{tuple(expected)} "
                f"(global_batch_size={self.plan.global_batch_size}); pad or drop rows, or plan for "
                f"this batch"
            )
        dtype = self.dtypes[path] if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.place.device, dtype=dtype, non_blocking=True)

    def _count(self, inputs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Per loss, its rows over the whole global batch, divided by the number of micro-batches:
        the denominator that makes Σ over micro-batches and ranks the mean over the batch."""
        if self.stage.counts is None:
            return {}
        totals = {name: torch.zeros((), device=self.place.device) for name in self.stage.losses}
        with torch.no_grad():
            for part in inputs:
                values = {**self.stage.program.tensors, **part}
                made = self.stage.counts.module(*[values[n] for n in self.stage.counts.arguments])
                targets = dict(zip(self.stage.counts.outputs, made, strict=True))
                for name, (target, ignored) in self.stage.losses.items():
                    totals[name] += (targets[target] != ignored).sum()
        for name, (target, _) in self.stage.losses.items():
            if self.place.data.size > 1 and self.stage.data.states[target].sharded:
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
            if place.data.size > 1 and loss_is_summed(self.stage.data, self.graph):
                dist.all_reduce(total, group=place.data.group)
        if place.mesh is not None and last > 0:
            dist.broadcast(total, src=place.meshes[last].ranks[0])
        return total

    def _step_seed(self) -> int:
        return random.Random(self.seed * 1_000_003 + self.steps).getrandbits(31)

    # --- parameters and state ---

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters under the user's FQNs, as DTensors on the stage's mesh."""
        for p in self.stage.parameters:
            yield p.fqn, p.api

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This stage's parameters and buffers under the user's FQNs, tied names included."""
        found: dict[str, torch.Tensor] = {}
        aliases: dict[str, list[str]] = {}
        for alias, fqn in self.graph.aliases.items():
            aliases.setdefault(fqn, []).append(alias)
        for p in self.stage.parameters:
            for name in (p.fqn, *aliases.get(p.fqn, [])):
                found[name] = p.api.detach()
        for value, (fqn, state) in self.stage.buffers.items():
            if fqn not in self.saved:
                continue
            if not state.sharded:
                found[fqn] = self.stage.program.tensors[value]
            else:
                local = self.stage.program.tensors[value]
                found[fqn] = all_gather(local, state, self.place.tensor)
        return found | (self.unused if self.place.stage == 0 else {})

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for _, p in self.named_parameters())

    def plain_state_dict(self) -> dict[str, torch.Tensor]:
        """As `state_dict`, with fused projections' strided shards re-laid as plain ones, as
        checkpoints need."""
        return {name: self.plain(x) for name, x in self.state_dict().items()}

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """A DTensor with plain `Shard` placements only; other tensors as they are. Collective on
        the stage."""
        if not isinstance(x, DTensor) or not any(
            isinstance(p, _StridedShard) for p in x.placements
        ):
            return x.detach()
        wanted = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in x.placements]
        whole = DTensor.from_local(
            x.full_tensor(), x.device_mesh, [Replicate()] * len(wanted), run_check=False
        )
        return whole.redistribute(placements=wanted).detach()

    def restore(self, held: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor read from a checkpoint into one of the optimizer's, whatever their
        layouts."""
        if isinstance(held, DTensor) and isinstance(source, DTensor):
            whole = DTensor.from_local(
                source.full_tensor(),
                held.device_mesh,
                [Replicate()] * len(held.placements),
                run_check=False,
            )
            source = whole.redistribute(placements=held.placements)
        with torch.no_grad():
            held.copy_(source)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """All stages' state as whole CPU tensors, on every rank. Collective; for models that fit
        one host."""
        mine = {
            name: (x.full_tensor() if isinstance(x, DTensor) else x).cpu()
            for name, x in self.state_dict().items()
        }
        return self._merged(mine)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """All stages' gradients as whole CPU tensors by FQN, on every rank. Collective."""
        mine = {}
        for name, p in self.named_parameters():
            if p.grad is not None:
                mine[name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).cpu()
        return self._merged(mine)

    def _merged(self, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.place.mesh is None:
            return mine
        leader = self.place.rank == self.place.meshes[self.place.stage].ranks[0]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine if leader else {})
        return {name: x for part in gathered for name, x in part.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's parts from whole tensors (or DTensors of the same layout) by FQN.

        Names of other stages are ignored; a missing or misshapen one raises ValueError, and so does
        a buffer of a model on meta that the state does not hold.
        """
        buffers = {fqn for fqn, _ in self.stage.buffers.values()}
        if valueless := sorted(buffers & self.unset - set(state)):
            raise ValueError(
                f"state dict: buffers {valueless} have no value: the model is on the meta device "
                f"and they are not "
                "in the state (registered with persistent=False); add them to it, or build the "
                "model so that only its "
                "parameters are on meta"
            )
        for p in self.stage.parameters:
            names = [p.fqn, *(a for a, fqn in self.graph.aliases.items() if fqn == p.fqn)]
            source = next((state[n] for n in names if n in state), None)
            if source is None:
                raise ValueError(
                    f"state dict: missing {p.fqn!r}; it has {len(state)} names, e.g. "
                    f"{sorted(state)[:3]}"
                )
            if tuple(source.shape) != p.shape:
                raise ValueError(
                    f"state dict: {p.fqn!r} has shape {tuple(source.shape)}, the model {p.shape}"
                )
            whole = source.full_tensor() if isinstance(source, DTensor) else source
            load(p, whole.to(self.place.device), self.place)
            with torch.no_grad():
                if not p.aliased and not p.trainable:
                    p.leaf.copy_(p.stored)
        for value, (fqn, placement) in self.stage.buffers.items():
            if fqn in state:
                whole = state[fqn].to(self.place.device)
                if placement.sharded:
                    whole = local_part(
                        whole, placement, self.place.tensor.size, self.place.tensor.rank
                    )
                self.stage.program.tensors[value].copy_(whole)
        self.loaded, self.unset = True, frozenset()


def _place(plan: Plan) -> Place:
    meshes = [StageMesh(ranks=s.ranks, dp=s.dp, tp=s.tp) for s in plan.stages]
    device = device_here()
    if plan.num_ranks == 1 and world_size() == 1:
        return alone(device, meshes[0])
    if world_size() != plan.num_ranks:
        raise PlanError(
            f"plan: made for {plan.num_ranks} ranks, but {world_size()} are running; launch with "
            f"`torchrun --nproc-per-node {plan.num_ranks} ...` or plan again for Cluster of "
            f"{world_size()} devices"
        )
    return join(meshes, device)


def _shared_seed(place: Place) -> int:
    """Rank 0's torch seed, on every rank: the root of all dropout masks."""
    seed = torch.tensor(torch.initial_seed() & 0x7FFFFFFF, device=place.device)
    if place.mesh is not None:
        dist.broadcast(seed, src=0)
    return int(seed)
