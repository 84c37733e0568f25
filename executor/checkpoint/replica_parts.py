"""Parts of a checkpoint of replicas that train apart, in one folder.

    model.<FQN>, carried.<FQN>       the weights at the last meeting, as in any checkpoint, with the
                                     first replica's buffers at the save
    outer_momentum.<FQN>             the outer momentum
    replicas/<k>/<name>              what a checkpoint has of replica k: weights, optimizer states

and in the notes, beside those of the first replica, `replicas`: the notes of each, and the steps at
which fragments met. So a reader that knows of no replicas finds the weights of the last meeting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.executor.files import Manifest, StoredTensor

OF_REPLICAS = "replicas"  # of the notes
MOMENTUM = "outer_momentum."
IN_COMMON = ("model.", "carried.")


def prefix_of(replica: int) -> str:
    """The beginning of the names of a replica's tensors."""
    return f"{OF_REPLICAS}/{replica}/"


def replicas_in(manifest: Manifest) -> Mapping[str, Any] | None:
    """The notes on replicas: `notes` of each, `met_at`; None of a checkpoint without."""
    replicas = (manifest.training or {}).get(OF_REPLICAS)
    return replicas if isinstance(replicas, dict) else None


def of_replica(manifest: Manifest, replica: int | None) -> Manifest:
    """A replica's part of a checkpoint as one of its own; for None the first one's with the weights
    that all had in common. A checkpoint without replicas itself."""
    replicas = replicas_in(manifest)
    if replicas is None:
        return manifest
    number = replica or 0
    prefix = prefix_of(number)
    tensors: dict[str, StoredTensor] = {
        name.removeprefix(prefix): x
        for name, x in manifest.tensors.items()
        if name.startswith(prefix)
    }
    if replica is None:
        common = {n: x for n, x in manifest.tensors.items() if n.startswith(IN_COMMON)}
        tensors = common | {n: x for n, x in tensors.items() if not n.startswith(IN_COMMON)}
    return replace(manifest, tensors=tensors, training=replicas["notes"][number])
