"""Weights of a step: from what the optimizer updated to what the graphs read.

Under ZeRO-1 and 2 the parts are gathered in buckets, in the order in which the first forward reads
them, two in flight: a block waits only for its own. In mixed precision they are cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.costmodel.target import BUCKET_BYTES
from meshwright.executor.lowering.reshard import all_gather_flat
from meshwright.executor.parameters.gradients import LARGE_BYTES
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks.meshes import Place

IN_FLIGHT = 2


class Refresh:
    """Brings the leaves of one stage up to date during the first forward of a step."""

    def __init__(
        self, parameters: Sequence[StageParameter], place: Place, reader: Mapping[str, str]
    ) -> None:
        """`reader` names the first block that reads each parameter, in the order of the blocks."""
        order = {fqn: k for k, fqn in enumerate(reader)}
        trained = [p for p in parameters if p.trainable and not p.aliased]
        trained.sort(key=lambda p: order[p.fqn])
        self.place = place
        self.cast = [p for p in trained if not p.zero.sharded]
        self.buckets = _by_size([p for p in trained if p.zero.sharded])
        self.upto = {reader[p.fqn]: k + 1 for k, bucket in enumerate(self.buckets) for p in bucket}
        self.started = self.finished = 0
        self.works: list[tuple[torch.Tensor, Any]] = []

    def begin(self) -> None:
        """Before a step."""
        if self.cast:
            with torch.no_grad():
                torch._foreach_copy_([p.leaf for p in self.cast], [p.stored for p in self.cast])
        self.started = self.finished = 0
        self._start()

    def wait(self, block: str) -> None:
        """Before a block first runs: its weights must be there."""
        while self.finished < self.upto.get(block, 0):
            self._finish()

    def _start(self) -> None:
        while self.started < min(len(self.buckets), self.finished + IN_FLIGHT):
            bucket = self.buckets[self.started]
            shard = self.place.holders(experts=bucket[0].experts).shard
            if _in_place(bucket[0]):
                whole, part = (x.detach().view(-1) for x in (bucket[0].leaf, bucket[0].stored))
                self.works.append(all_gather_flat(part, shard, whole))
            else:
                flat = torch.cat([p.stored.detach().to(p.leaf.dtype).reshape(-1) for p in bucket])
                self.works.append(all_gather_flat(flat, shard))
            self.started += 1

    def _finish(self) -> None:
        gathered, work = self.works.pop(0)
        work.wait()
        at, bucket = 0, self.buckets[self.finished]
        with torch.no_grad():
            for p in () if _in_place(bucket[0]) else bucket:
                stop = at + p.stored.numel()
                parts = gathered[:, at:stop].unflatten(1, p.stored.shape)
                _parts_of(p, len(gathered)).copy_(parts)
                at = stop
        self.finished += 1
        self._start()


def _parts_of(p: StageParameter, n: int) -> torch.Tensor:
    """A leaf as its n parts, [n, ..]: a view."""
    dim = p.zero.dim
    return p.leaf.unflatten(dim, (n, -1)).movedim(dim, 0)


def _by_size(parameters: Sequence[StageParameter]) -> list[list[StageParameter]]:
    """Buckets of one dtype and one axis, in order, each gathering up to `BUCKET_BYTES`, or one
    large parameter."""
    buckets: list[list[StageParameter]] = []
    filled = 0
    for p in parameters:
        nbytes = p.leaf.numel() * p.leaf.dtype.itemsize
        full = filled + nbytes > BUCKET_BYTES or _in_place(p)
        if not buckets or full or _kind(buckets[-1][0]) != _kind(p):
            buckets.append([])
            filled = 0
        buckets[-1].append(p)
        filled += nbytes
    return buckets


def _kind(p: StageParameter) -> tuple[torch.dtype, bool, bool]:
    """What parameters gathered together have in common."""
    return p.leaf.dtype, p.experts, _in_place(p)


def _in_place(p: StageParameter) -> bool:
    """Whether a large parameter's parts are gathered to where they are read, without a copy."""
    large = p.leaf.numel() * p.leaf.dtype.itemsize >= LARGE_BYTES
    return large and p.zero.dim == 0 and p.leaf.dtype == p.stored.dtype
