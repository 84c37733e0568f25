"""Weights in host memory: the leaves of these blocks have memory only while their block runs.

Before a block runs, forward or backward, its weights are there and those of the block after it are
on their way, on a stream of their own; those of all others are let go. Of the values that the
optimizer left, the first forward of a step makes what is computed with: sent and cast, or gathered
(`weight_gather.py`). Where that is not what is stored, or what is stored lies in a file, a copy of
it then stays in host memory, in the compute dtype, for the other passes of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.executor.devices import to_host
from meshwright.executor.host_memory import Aside, fill
from meshwright.executor.parameters.parameters import StageParameter
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
