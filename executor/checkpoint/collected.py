"""A rank's part of a checkpoint, and the other ranks': known before anything is written.

Of the replicas of a chunk, one rank writes: on one mesh `ReplicaWriters` chooses it; of tied copies
it is the first stage's. Buffers that several stages hold are written by each, and the same: one of
them is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.executor import files
from meshwright.executor.checkpoint import optimizer_state
from meshwright.executor.runtime import RankState, Runtime
from meshwright.executor.stages import follow
from meshwright.planner.plan import stages_of_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of a checkpoint, as one of the ranks that hold it sees it.

    `name` in the checkpoint, the whole's `shape` and `dtype`. It is written by ranks among
    `group`: `writers` of them, each its part (left open by a rank that is not among them); `boxes`
    are what this rank writes. `fault`: what the writers' parts do not make up. `merged`: every
    group that holds it writes it, and one of these is kept.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: tuple[int, ...]
    writers: tuple[int, ...] = ()
    boxes: tuple[files.Box, ...] = ()
    fault: str = ""
    merged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor that a rank holds, and the `replica` of it that is written by ranks of `group`, if
    this rank is among them; `merged` as in `SavedTensor`."""

    x: torch.Tensor
    group: tuple[int, ...]
    replica: files.Replica | None
    merged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A rank's tensors by name in the checkpoint, as `held`; the chunks of them that it writes, as
    `tensors`; its `notes` on the optimizer."""

    held: Mapping[str, Held]
    tensors: Mapping[str, files.LocalChunks]
    notes: optimizer_state.Notes | None


def collect(runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> Collected:
    """This rank's part of a save of the model and the optimizer, and the writers of the rest.
    Collective where a state is a sum that ranks hold parts of."""
    place, writing_ranks = runtime.place, _writing_ranks(runtime)
    parameters = dict(runtime.named_parameters())
    states: optimizer_state.States = {}
    notes = None
    if optimizer is not None:
        led = [fqn for fqn in parameters if writing_ranks[fqn][0] == place.rank]
        states, notes = optimizer_state.collect(optimizer, parameters, led)
    # in the order of the names, since buffers come in another order on every rank
    named = [(f"model.{fqn}", fqn, x) for fqn, x in sorted(model_tensors(runtime).items())]
    named += [(f"carried.{fqn}", fqn, x) for fqn, x in sorted(carried_tensors(runtime).items())]
    named += [
        (f"optimizer.{fqn}.{name}", fqn, x)
        for fqn, state in sorted(states.items())
        for name, x in sorted(state.items())
    ]
    writers, held = files.ReplicaWriters(), {}
    tensors: dict[str, files.LocalChunks] = {}
    for name, fqn, x in named:
        group = writing_ranks.get(fqn, place.here.ranks)
        replica = writers.choose(x, place.mesh) if place.rank in group else None
        merged = fqn not in writing_ranks
        held[name] = Held(x=x, group=group, replica=replica, merged=merged)
        if replica is not None and replica.mine:
            tensors[name] = files.LocalChunks.of(x)
    return Collected(held=held, tensors=tensors, notes=notes)


def planned_save(
    runtime: Runtime, optimizer: torch.optim.Optimizer | None
) -> tuple[SavedTensor, ...]:
    """The writers of a save of this rank's tensors, before the first file. Needs no values.
    Collective where `collect` is."""
    if optimizer is not None:
        follow(optimizer)
    collected, mesh = collect(runtime, optimizer), runtime.place.mesh
    boxes = {
        name: tuple((chunk.offset, chunk.sizes) for chunk in x.chunks)
        for name, x in collected.tensors.items()
    }
    saves, ranks = [], dict[files.Replica, tuple[int, ...]]()  # which thousands of tensors share
    for name, held in collected.held.items():
        saved = SavedTensor(
            name=name,
            shape=tuple(held.x.shape),
            dtype=str(held.x.dtype).removeprefix("torch."),
            group=held.group,
            boxes=boxes.get(name, ()),
            merged=held.merged,
        )
        if held.replica is not None:
            if held.replica not in ranks:
                ranks[held.replica] = held.group if mesh is None else held.replica.ranks(mesh)
            saved = replace(saved, writers=ranks[held.replica], fault=_fault(held.x, mesh))
        saves.append(saved)
    return tuple(saves)


def model_tensors(state: RankState) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers, each under its first name."""
    state_dict = state.state_dict()
    return {fqn: x for fqn, x in state_dict.items() if fqn not in state.graph.aliases}


def carried_tensors(state: RankState) -> dict[str, torch.Tensor]:
    """Tensors of this rank that steps write and the model's state dict has not: buffers that are
    not persistent, and tensors in plain attributes."""
    return {
        fqn: b.whole.detach()
        for fqn, b in state.held_buffers.items()
        if b.updated and fqn not in state.persistent
    }


def _writing_ranks(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    """FQN -> the ranks of the first stage that holds the parameter, which write it."""
    plan, graph = runtime.plan, runtime.graph
    return {
        graph.parameters[value]: plan.stages[stages[0]].ranks
        for value, stages in stages_of_parameters(plan, graph).items()
    }


def _fault(x: torch.Tensor, mesh: DeviceMesh | None) -> str:
    """Elements of a tensor, along its first faulty dim, that the parts on all ranks of its mesh
    miss or have twice."""
    if mesh is None or not isinstance(x, DTensor):
        return ""
    split = [
        (k, p)
        for k, p in enumerate(files.placements_on(x, mesh))
        if isinstance(p, (Shard, _StridedShard))
    ]
    for dim, size in enumerate(x.shape):
        axes = [(k, p) for k, p in split if p.dim == dim]
        placements = tuple(_of_first_dim(p) for _, p in axes)
        if fault := files.untiled(size, placements, tuple(mesh.shape[k] for k, _ in axes)):
            return f"of dim {dim} {fault}"
    return ""


def _of_first_dim(p: Shard | _StridedShard) -> Shard | _StridedShard:
    if isinstance(p, _StridedShard):
        return _StridedShard(0, split_factor=p.split_factor)
    return Shard(0)
