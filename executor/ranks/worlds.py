"""Worlds of replicas that train apart: inside its own, a rank sees the ranks of its replica alone.

All that builds and runs stages makes its groups by partitions of torch's default group, and counts
ranks in it. So a replica's own group is the default one while its plan runs, and of all ranks only
those that meet (`runtime/meetings.py`) know of each other: rank i of every replica.

They wait for each other as long as those that are late still go on: replicas may be a whole
round of steps apart, which no timeout of a collective may end. Who arrives says so in the store,

    at/<place>/<r>   what rank r says there
    phases/<r>       how many phases its main thread has begun, once a second (`watchdog.py`)

and looks there until all have; only then do they exchange tensors. The watchdog's timeout counts
from the last phase that any of those began: of a step, an evaluation, a save. A replica that dies
ends all ranks, as any rank does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from meshwright.executor.ranks import launch
from meshwright.executor.ranks.watchdog import PEERS, progress

POLL_S, SLOWEST_POLL_S = 0.002, 0.25
MEETING = "waiting for other replicas"


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaWorld:
    """The world of this rank's replica, `number` of `count`, each of `size` ranks; `rank` is this
    one's among all ranks. Its `peers` are the same rank of every replica."""

    number: int
    count: int
    size: int
    rank: int
    group: Any
    peers: Any
    store: Any
    arrivals: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context in which the default group is the replica's."""
        outside = dist.group.WORLD
        c10d._update_default_pg(self.group)
        progress.replica = f"replica {self.number}/"  # also between calls
        try:
            yield
        finally:
            c10d._update_default_pg(outside)

    def arrive(self, place: str, told: str = "") -> list[str]:
        """Wait until every replica's rank has come to a place as often as this one; returns what
        each told. Collective among peers."""
        visit = self.arrivals.get(place, 0)
        self.arrivals[place] = visit + 1
        keys = [f"at/{place}/{visit}/{rank}" for rank in self._peer_ranks]
        with progress.during(f"{MEETING} ({place})", waits=True):
            self.store.set(keys[self.number], told)
            self._await(keys)
            said = [self.store.get(key).decode() for key in keys]
        if visit > 1:  # all have read what they said the time before the last
            self.store.delete_key(f"at/{place}/{visit - 2}/{self.rank}")
        return said

    def _await(self, keys: list[str]) -> None:
        pause_s, seen = POLL_S, self._phases()
        while not self.store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, SLOWEST_POLL_S)
            if pause_s == SLOWEST_POLL_S and (phases := self._phases()) != seen:
                seen = phases
                progress.wait_anew()

    def _phases(self) -> Mapping[int, bytes]:
        """The phases that each peer has begun, as far as it has said."""
        keys = {rank: f"{PEERS}/{rank}" for rank in self._peer_ranks}
        return {r: self.store.get(key) for r, key in keys.items() if self.store.check([key])}

    @property
    def _peer_ranks(self) -> list[int]:
        return [self.rank % self.size + k * self.size for k in range(self.count)]

    # --- what peers exchange ---

    def sums(self, *numbers: float) -> list[float]:
        """Sums over replicas of a few numbers, added up in one order."""
        here = torch.tensor(numbers, dtype=torch.float64)
        return [float(x) for x in torch.stack(self.gathered(here)).sum(0)]

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """A host tensor of every replica."""
        parts = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(parts, x.contiguous(), group=self.peers)
        return parts

    def from_first(self, x: torch.Tensor) -> None:
        """Give a host tensor the first replica's values."""
        dist.broadcast(x, group=self.peers, group_src=0)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a host tensor over replicas, its elements each added up in the order of the
        replicas, so that it does not depend on where in `x` they are."""
        part = -(-x.numel() // self.count)
        sent = torch.zeros(self.count * part, dtype=x.dtype)
        sent[: x.numel()] = x
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.peers)
        part_sum = summed(received.view(self.count, part))
        dist.all_gather(list(sent.view(self.count, part).unbind()), part_sum, group=self.peers)
        return sent[: x.numel()]


def summed(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of [rows, n], added one after the other: as `sum` adds, an element's
    order depends on its column."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def replica_world(count: int) -> ReplicaWorld:
    """This rank's world among so many replicas, of consecutive ranks each; made once. Collective
    among all ranks the first time."""
    return _world(dist.group.WORLD, count)


@cache
def _world(all_ranks: Any, count: int) -> ReplicaWorld:
    rank, size = dist.get_rank(), dist.get_world_size() // count
    number = rank // size
    inner = dist.new_group(
        [number * size + i for i in range(size)],
        use_local_synchronization=True,
        group_desc="replica",
    )
    c10d._world.pg_group_ranks[inner] = {i: i for i in range(size)}  # as the default group's
    peers = dist.new_group(
        [rank % size + k * size for k in range(count)],
        backend="gloo",
        timeout=timedelta(seconds=launch.timeout_s()),
        use_local_synchronization=True,
        group_desc="peers",
    )
    world = ReplicaWorld(
        number=number,
        count=count,
        size=size,
        rank=rank,
        group=inner,
        peers=peers,
        store=launch.meeting_store(),
    )
    progress.tells_phases = True
    launch.before_leaving.append(lambda: world.arrive("the end"))
    return world
