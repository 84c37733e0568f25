"""Whole tensors of a running model, one after the other, each on one rank.

The parts of a tensor (`files/chunks.py`) go from the ranks that hold them to its owner, over the
hosts' network, and nowhere else: of its replicas the owner's own where it has a part, so that data
parallel ranks gather at the same time. A tensor is whole on its owner alone, which lets go of it
before the next. All ranks walk through the tensors in one order, and each skips those it has no
part in: so none waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from meshwright.executor.checkpoint import check_loaded, model_tensors
from meshwright.executor.errors import StateError
from meshwright.executor.files import Chunk, LocalChunks, local_chunks, narrowed, placements_on
from meshwright.executor.host_values import with_values
from meshwright.executor.ranks import background, progress, run_on_all
from meshwright.executor.runtime import RankState, group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor of the running model, as every rank knows it: laid out by `placements` on a mesh of
    `mesh_shape`, of `ranks` in row-major order. `trained`: its parameter has gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    trained: bool


def held_tensors(state: RankState) -> dict[str, HeldTensor]:
    """The parameters and persistent buffers of the whole model by their first FQN, in the order of
    the model's state dict. Collective; of those that several stages hold, the first's."""
    mesh = state.place.mesh
    with with_values():
        ranks = (state.place.rank,) if mesh is None else tuple(mesh.mesh.flatten().tolist())
    trained = {p.fqn for p in state.stage_parameters if p.trainable}
    mine = {
        fqn: HeldTensor(
            shape=tuple(x.shape),
            dtype=x.dtype,
            placements=() if mesh is None else placements_on(x, mesh),
            mesh_shape=() if mesh is None else tuple(mesh.shape),
            ranks=ranks,
            trained=fqn in trained,
        )
        for fqn, x in model_tensors(state).items()
    }
    place = next(k for k, group in enumerate(state.plan.devices) if state.place.rank in group)
    by_group = state.merged({str(place): mine})
    held: dict[str, HeldTensor] = {}
    for group in range(len(state.plan.devices)):
        held = by_group.get(str(group), {}) | held
    return {fqn: held[fqn] for fqn in state.model.state_dict() if fqn in held}


def owner_of(tensors: Iterable[HeldTensor], bytes_before: dict[int, int]) -> int:
    """The rank that gets these tensors: of those that hold most of their elements, the one with the
    fewest before, to which theirs are added."""
    elements: dict[tuple[int, ...], int] = {}
    for x in tensors:
        elements[x.ranks] = elements.get(x.ranks, 0) + torch.Size(x.shape).numel()
    ranks = max(elements, key=lambda key: (elements[key], key))
    owner = min(ranks, key=lambda rank: (bytes_before.get(rank, 0), rank))
    bytes_before[owner] = bytes_before.get(owner, 0) + sum(elements.values())
    return owner


@lru_cache(maxsize=4096)  # layers of a model have the same
def _parts(held: HeldTensor, owner: int) -> tuple[tuple[int, tuple[Chunk, ...]], ...]:
    """The ranks of the replica of a tensor that its owner gets, with their chunks."""
    coordinates = list(product(*map(range, held.mesh_shape)))
    replica = coordinates[held.ranks.index(owner)] if owner in held.ranks else coordinates[0]
    replicated = [k for k, p in enumerate(held.placements) if isinstance(p, Replicate)]
    return tuple(
        (rank, local_chunks(held.shape, held.placements, held.mesh_shape, coordinate))
        for rank, coordinate in zip(held.ranks, coordinates, strict=True)
        if all(coordinate[k] == replica[k] for k in replicated)
    )


def streamed(
    state: RankState, held: dict[str, HeldTensor], wanted: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The tensors `wanted`, (FQN, owner), one after the other: whole on the host of its owner, None
    on the other ranks. Collective: every rank asks for the same, and goes through to the end."""
    tensors, rank, group = model_tensors(state), state.place.rank, group_of(state)
    for fqn, owner in wanted:
        progress.enter(f"gathering {fqn!r} to rank {owner}")
        yield fqn, _gathered(tensors.get(fqn), held[fqn], owner, rank, group)


def _gathered(
    x: torch.Tensor | None, held: HeldTensor, owner: int, rank: int, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    tensor = torch.empty(held.shape, dtype=held.dtype) if rank == owner else None
    for source, chunks in _parts(held, owner):
        if rank not in (source, owner):
            continue
        local = LocalChunks.of(x).local if rank == source and x is not None else None
        for chunk in chunks:
            part = None if local is None else narrowed(local, chunk.local_offset, chunk.sizes)
            into = None if tensor is None else narrowed(tensor, chunk.offset, chunk.sizes)
            _moved(part, into, source, owner, group)
    return tensor


def _moved(
    part: torch.Tensor | None,
    into: torch.Tensor | None,
    source: int,
    owner: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Copy a `part` on the rank `source` to where it belongs on the owner."""
    if part is not None and into is not None:
        into.copy_(part)
    elif part is not None and part.numel():
        dist.send(_as_bytes(part.to("cpu").contiguous()), owner, group=group)
    elif into is not None and into.numel():
        buffer = into if into.is_contiguous() else torch.empty(into.shape, dtype=into.dtype)
        dist.recv(_as_bytes(buffer), source, group=group)
        if buffer is not into:
            into.copy_(buffer)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: gloo sends any dtype so."""
    return x.reshape(-1).view(torch.uint8)


def full_state_dict(state: RankState, rank: int) -> dict[str, torch.Tensor]:
    """The whole model's state as CPU tensors on one rank, tied names included; an empty dict on the
    others, which never hold more than their parts. Collective."""
    background.finish_all()
    group = group_of(state)
    ranks = sorted({r for ranks in state.plan.devices for r in ranks})
    if rank not in ranks:
        raise StateError(
            f"rank {rank!r} is none of the plan's", place="full_state_dict", legal=f"{ranks}"
        )
    with progress.during("gathering a state dict"):
        run_on_all(group, lambda: check_loaded(state, "full_state_dict"))
        held = held_tensors(state)
        tensors = {
            fqn: x
            for fqn, x in streamed(state, held, [(fqn, rank) for fqn in held])
            if x is not None
        }
        run_on_all(group, lambda: None)  # no rank goes on while another still sends
    aliases = state.graph.aliases
    return tensors | {alias: tensors[fqn] for alias, fqn in aliases.items() if fqn in tensors}
