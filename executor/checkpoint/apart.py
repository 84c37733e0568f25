"""Checkpoints of replicas that train apart: saved at any step, loaded by as many or others.

All ranks of all replicas write one folder (`replica_parts.py`), which is published when all have:
so replicas are never of different saves. A run with as many replicas goes on as if it had not
stopped; any other starts from the trained weights of the last meeting, with the first replica's
buffers and optimizer states as they were at the save, and the outer momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.checkpoint.checkpoint import (
    gathered,
    load,
    prepared_folder,
    saved_folder,
    write,
)
from meshwright.executor.checkpoint.collected import collect, model_tensors
from meshwright.executor.checkpoint.replica_parts import (
    IN_COMMON,
    MOMENTUM,
    OF_REPLICAS,
    prefix_of,
    replicas_in,
)
from meshwright.executor.files import (
    LocalChunks,
    Manifest,
    atomic_folder,
    read_checkpoint,
    read_tensors,
)
from meshwright.executor.ranks import (
    background,
    gather_object,
    gloo_group,
    progress,
    run_on_all,
    run_on_first,
)
from meshwright.executor.runtime import Meetings
from meshwright.executor.stages import follow


def save_apart(
    meetings: Meetings,
    path: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of all replicas, or replace the one at `path`. Collective among all ranks,
    outside of the replica's world. Raises as `save` does, on all alike."""
    background.finish_all()
    world, runtime = meetings.world, meetings.runtime
    if optimizer is not None:
        follow(optimizer)
    meetings.arrive_alike("saving a checkpoint", f"step {runtime.steps}")
    everybody = gloo_group()
    with progress.during("saving a checkpoint"):
        folder, saving = run_on_first(everybody, lambda: prepared_folder(path))

        def of_rank() -> tuple[dict[str, LocalChunks], dict[str, Any]]:
            with world.inside():
                chunks, notes = gathered(runtime, optimizer, extra or {}, saving)
                prefix = prefix_of(world.number)
                tensors = {f"{prefix}{name}": x for name, x in chunks.items()}
                return tensors | _in_common(meetings), notes

        with atomic_folder.discarded_on_error(saving, first=world.rank == 0):
            tensors, notes = run_on_all(everybody, of_rank)
            of_ranks = gather_object(everybody, notes)
        training: dict[str, Any] = {}
        if world.rank == 0:
            of_each = [of_ranks[k * world.size] for k in range(world.count)]
            training = {
                **of_each[0],
                OF_REPLICAS: {"notes": of_each, "met_at": list(meetings.met_at)},
            }
        write(tensors, training, saving, folder, group=everybody)


def _in_common(meetings: Meetings) -> dict[str, LocalChunks]:
    """The first replica's copies of the outer weights and momentum. Collective within a replica."""
    tensors: dict[str, LocalChunks] = {}
    with meetings.holding("weights"):
        named = collect(meetings.runtime, None).tensors
        if meetings.world.number == 0:
            tensors |= {n: x.copied() for n, x in named.items() if n.startswith(IN_COMMON)}
    trained = {p.fqn for share in meetings.shares for p in share.parameters}
    with meetings.holding("momentum"):
        named = collect(meetings.runtime, None).tensors
        for name, x in named.items():
            fqn = name.removeprefix("model.")
            if fqn in trained and meetings.world.number == 0:
                tensors[f"{MOMENTUM}{fqn}"] = x.copied()
    return tensors


def load_apart(
    meetings: Meetings,
    path: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Read a checkpoint of any number of replicas, or of none. Collective among all ranks, outside
    of the replica's world. Raises as `load` does, on all alike."""
    background.finish_all()
    world, runtime = meetings.world, meetings.runtime
    world.arrive("loading a checkpoint")
    everybody, place = gloo_group(), f"checkpoint {str(path)!r}"
    with progress.during("loading a checkpoint"):
        manifest = run_on_first(
            everybody, lambda: read_checkpoint(saved_folder(path, place), place)
        )
    replicas = replicas_in(manifest)
    alike = replicas is not None and len(replicas["notes"]) == world.count
    replica = world.number if alike else None

    def read() -> None:
        with world.inside():
            if replicas is not None:
                _take(meetings, manifest)
            load(runtime, path, optimizer, extra=extra, replica=replica)

    run_on_all(everybody, read)
    if replicas is not None:
        met_at = [int(at) for at in replicas["met_at"]] if alike else []
        meetings.went_on(met_at)


def _take(meetings: Meetings, manifest: Manifest) -> None:
    """Read the outer momentum and weights, through the parameters. Collective within a replica."""
    runtime = meetings.runtime
    for name, prefix in (("momentum", MOMENTUM), ("weights", "model.")):
        named = {f"{prefix}{fqn}": x for fqn, x in model_tensors(runtime).items()}
        reads = [
            read
            for key, x in named.items()
            if key in manifest.tensors and x.numel()
            for read in LocalChunks.of(x).reads(key)
        ]
        with progress.during("reading the outer state"):
            read_tensors(reads, manifest.tensors)
        meetings.take(name)
