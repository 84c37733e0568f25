"""Weights in host memory: the leaves of these blocks have memory only while their block runs.

Before a block runs, forward or backward, its weights are there and those of the block after it are
on their way, on a stream of their own; those of all others are let go. Of the values that the
optimizer left, the first forward of a step makes what is computed with: sent and cast, or gathered
(`WeightGather`). Where that is not what is stored, or what is stored lies in a file, a copy of
it then stays in host memory, in the compute dtype, for the other passes of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.costmodel.target import ALONE_BYTES, BUCKET_BYTES
from meshwright.executor.devices import to_host
from meshwright.executor.host_memory import Aside, fill, on_device
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks import Place
from meshwright.executor.resharding import Axis, Waiting, all_gather_flat
from meshwright.executor.states_in_files import Staging


class BlockWeights:
    """The weights of a stage's blocks that lie in host memory."""

    def __init__(self, away: Mapping[str, Sequence[StageParameter]], device: torch.device) -> None:
        """`away` by block, in the order of the forward."""
        self.away = away
        self.order = list(away)
        self.device = device
        self.aside = Aside(device)
        self.staging = Staging()
        self.copies: dict[str, torch.Tensor] = {}  # by FQN, of what is not stored so
        self.stale = set(away)  # blocks whose copies are of another step
        self.here: dict[str, Any] = {}  # blocks with memory, and what they wait for
        self.leaving: dict[str, Any] = {}  # what the memory of a block waits for
        self.latest = 0  # the position of the block that a backward has come to

    def begin(self) -> None:
        """Before a step: the optimizer has written what is stored."""
        self.let_go()
        self.stale = set(self.order)

    def forward(self, block: str) -> None:
        """Before a block's forward."""
        if block in self.away:
            self._enter(at := self.order.index(block), at + 1)

    def gathered(self, block: str) -> None:
        """After ZeRO's gathers for a forward: keep what the step computes with."""
        if block not in self.stale:
            return
        self.stale.discard(block)
        with torch.no_grad(), self.aside.entered(waits=False):
            for p in self.away[block]:
                if p.shard_placement.sharded or p.leaf.dtype != p.stored.dtype or p.home == "file":
                    self.copies[p.fqn] = to_host(p.leaf.data)
            self.leaving[block] = self.aside.mark()

    def begin_backward(self) -> None:
        """Before a micro-batch's backward."""
        self.latest = len(self.order)

    def backward(self, block: str) -> None:
        """Before a block's backward, once and more; of blocks that came before, nothing is left."""
        at = self.order.index(block)
        if at < self.latest:
            self.latest = at
            self._enter(at, at - 1)

    def let_go(self) -> None:
        """Free what has memory."""
        for block in [*self.here]:
            self._free(block)

    def _enter(self, at: int, following: int) -> None:
        block = self.order[at]
        ahead = self.order[following] if 0 <= following < len(self.order) else block
        for other in self.here.keys() - {block, ahead}:
            self._free(other)
        self._fetch(block, waits=following > at)
        self.aside.wait(self.here[block])
        self._fetch(ahead, waits=following > at)

    def _fetch(self, block: str, *, waits: bool) -> None:
        """Start the way of a block's weights to the device, but for those that ZeRO gathers."""
        if block in self.here:
            return
        members, stale = self.away[block], block in self.stale
        for p in members:
            revive(p.leaf)
        copied = [] if stale else [p for p in members if p.fqn in self.copies]
        rest = [p for p in members if p not in copied and not p.shard_placement.sharded]
        with self.aside.entered(waits=waits), torch.no_grad():
            for p in copied:
                p.leaf.data.copy_(self.copies[p.fqn], non_blocking=True)
            stored = self.staging.bring([p.stored for p in rest], self.device)
            for p, x in zip(rest, stored, strict=True):
                fill(p.leaf.data, x)
            self.here[block] = self.aside.mark()
            if stale:
                self.staging.last = self.here[block]

    def _free(self, block: str) -> None:
        self.aside.wait(self.here.pop(block))
        self.aside.wait(self.leaving.pop(block, None))
        for p in self.away[block]:
            p.leaf.untyped_storage().resize_(0)


def revive(leaf: torch.Tensor) -> None:
    """Give a leaf its memory, if it has none."""
    if not leaf.untyped_storage().nbytes():
        leaf.untyped_storage().resize_(leaf.numel() * leaf.dtype.itemsize)


# --- all-gather after the step --------------------------------------------------------------------

# All-gather of ZeRO-1 and ZeRO-2 weights after the optimizer's step, and the cast of the others.
#
# The optimizer updates fp32 shards; the graphs read whole leaves in the compute dtype. Shards are
# gathered in buckets, in the order in which the first forward reads them: while a block computes,
# the next one's are under way, and it waits only for its own. In mixed precision they are cast
# before. What lies in host memory is copied to the device first, beside the forward
# (`host_memory.py`).


IN_FLIGHT = 2  # buckets being gathered, and more where the next block needs them


class WeightGather:
    """Fills the leaves of one stage from the stored weights during a step's first forward."""

    def __init__(
        self, parameters: Sequence[StageParameter], place: Place, reader: Mapping[str, str]
    ) -> None:
        """`reader` names the first block that reads each parameter, in the order of the blocks."""
        order = {fqn: k for k, fqn in enumerate(reader)}
        trained = [p for p in parameters if p.trainable and not p.aliased]
        trained.sort(key=lambda p: order[p.fqn])
        self.place = place
        replicated = [p for p in trained if not p.shard_placement.sharded]
        self.cast = [p for p in replicated if not p.hosted]
        self.hosted: dict[str, list[StageParameter]] = {}  # by the block that waits for it
        away: dict[str, list[StageParameter]] = {}
        for p in trained:
            if p.away:
                away.setdefault(reader[p.fqn], []).append(p)
        self.away = BlockWeights(away, place.device) if away else None
        for p in replicated:
            if p.hosted and not p.away:
                self.hosted.setdefault(reader[p.fqn], []).append(p)
        self.aside = Aside(place.device)
        self.staging = Staging()
        self.arrived: dict[str, Any] = {}  # by block, until it has waited
        self.buckets = _by_size([p for p in trained if p.shard_placement.sharded])
        self.needed: dict[str, int] = {}  # block -> the number of buckets it waits for
        for k, bucket in enumerate(self.buckets, start=1):
            self.needed |= {reader[p.fqn]: k for p in bucket}
        self.started = 0
        self.finished = 0
        self.gathers: list[tuple[torch.Tensor, Waiting]] = []  # in flight

    def begin(self) -> None:
        """Before a step: cast what is whole, and start the first gathers."""
        if self.cast:
            with torch.no_grad():
                torch._foreach_copy_([p.leaf for p in self.cast], [p.stored for p in self.cast])
        if self.away is not None:
            self.away.begin()
        for block, members in self.hosted.items():
            with self.aside.entered(), torch.no_grad():
                stored = self.staging.bring([p.stored for p in members], self.place.device)
                for p, x in zip(members, stored, strict=True):
                    fill(p.leaf, x)
                self.staging.last = self.arrived[block] = self.aside.mark()
        self.started = self.finished = 0
        self._start()

    def finish(self) -> None:
        """Wait for what is under way, which no forward has waited for."""
        while self.finished < self.started:
            self._finish_next()

    def wait(self, block: str) -> None:
        """Before a block runs: wait until its weights are there."""
        if self.away is not None:
            self.away.forward(block)
        self.aside.wait(self.arrived.pop(block, None))
        while self.finished < self.needed.get(block, 0):
            self._finish_next()
        if self.away is not None:
            self.away.gathered(block)

    def _start(self) -> None:
        """Start the gathers of the next block that waits for some."""
        following = min((n for n in self.needed.values() if n > self.finished), default=0)
        while self.started < min(len(self.buckets), max(following, self.finished + IN_FLIGHT)):
            bucket = self.buckets[self.started]
            shard = self.place.holders(experts=bucket[0].experts).shard
            if bucket[0].hosted:
                self.gathers.append(self._sent(bucket, shard))
            elif _in_place(bucket[0]):
                full, part = (x.detach().view(-1) for x in (bucket[0].leaf, bucket[0].stored))
                self.gathers.append(all_gather_flat(part, shard, full))
            else:
                flat = torch.cat([p.stored.detach().to(p.leaf.dtype).reshape(-1) for p in bucket])
                self.gathers.append(all_gather_flat(flat, shard))
            self.started += 1

    def _sent(self, bucket: Sequence[StageParameter], shard: Axis) -> tuple[torch.Tensor, Waiting]:
        """Start the gather of shards that lie in host memory."""
        with self.aside.entered(), torch.no_grad():
            stored = self.staging.bring([p.stored for p in bucket], self.place.device)
            pairs = zip(stored, bucket, strict=True)
            flat = torch.cat([on_device(x, p.leaf).reshape(-1) for x, p in pairs])
            self.staging.last = self.aside.mark()
            return all_gather_flat(flat, shard)

    def _finish_next(self) -> None:
        gathered, work = self.gathers.pop(0)
        work.wait()
        bucket, start = self.buckets[self.finished], 0
        with torch.no_grad():
            for p in () if _in_place(bucket[0]) else bucket:
                stop = start + p.stored.numel()
                shards = gathered[:, start:stop].view(len(gathered), *p.stored.shape)
                if p.away:
                    revive(p.leaf)
                _shards(p, len(gathered)).copy_(shards)
                start = stop
        self.finished += 1
        self._start()


def _shards(p: StageParameter, n: int) -> torch.Tensor:
    """A view of a leaf as its n ZeRO shards, stacked: (n, *shard shape)."""
    dim, shape = p.shard_placement.dim, p.leaf.shape
    stacked = p.leaf.data.view(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])
    return stacked.movedim(dim, 0)


def _by_size(parameters: Sequence[StageParameter]) -> list[list[StageParameter]]:
    """Buckets of one dtype and one shard axis, in order: up to `BUCKET_BYTES` of leaves each, or
    one large parameter."""
    buckets: list[list[StageParameter]] = []
    filled = 0
    for p in parameters:
        nbytes = p.leaf.numel() * p.leaf.dtype.itemsize
        full = filled + nbytes > BUCKET_BYTES or _in_place(p)
        if not buckets or full or _bucket_key(buckets[-1][0]) != _bucket_key(p):
            buckets.append([])
            filled = 0
        buckets[-1].append(p)
        filled += nbytes
    return buckets


def _bucket_key(p: StageParameter) -> tuple[torch.dtype, bool, bool, bool]:
    """Equal for parameters that may share a bucket."""
    return p.leaf.dtype, p.experts, p.hosted, _in_place(p)


def _in_place(p: StageParameter) -> bool:
    """Whether a large parameter is gathered directly into its leaf, without a copy."""
    large = p.leaf.numel() * p.leaf.dtype.itemsize >= ALONE_BYTES
    alike = p.shard_placement.dim == 0 and p.leaf.dtype == p.stored.dtype
    return large and alike and not p.hosted
