"""Batches of an iterable that every rank has for itself: as many on all of them, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from meshwright.executor.errors import StateError
from meshwright.executor.ranks.object_collectives import all_gather_object


def together(what: str, batches: Iterable[Any], group: dist.ProcessGroup | None) -> Iterator[Any]:
    """The batches, as long as every rank of the group has one. Raises on all ranks where one fails
    or ends before others. Collective."""
    iterator, end = iter(batches), object()
    while True:
        batch, error = end, None
        try:
            batch = next(iterator, end)
        except Exception as raised:  # noqa: BLE001 - the others wait for this rank
            error = raised
        told = all_gather_object(group, (batch is end, error))
        if failure := next((error for _, error in told if error is not None), None):
            raise failure
        ended = [rank for rank, (done, _) in enumerate(told) if done]
        if len(ended) == len(told):
            return
        if ended:
            raise StateError(
                f": the batches ended on ranks {ended} before they did on others",
                place=what,
                legal="as many batches on every rank",
                way_out="give data_loader the whole dataset, or the same batches to all ranks; "
                "use no DistributedSampler",
            )
        yield batch
