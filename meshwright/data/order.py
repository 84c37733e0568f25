"""Which samples of a dataset make which global batch: a function of the seed, the epoch and the
number of the batch alone, the same on every rank and for every number of ranks.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.data.arguments import checked_buckets
from meshwright.profiles.inputs import MeshwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Numbers of the samples, of `rows` or less, and the length that they are padded to (None: as
    they are)."""

    samples: torch.Tensor
    rows: int
    length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Samples of similar lengths together: the length of every sample, and the lengths that batches
    are padded to, increasing; with `tokens`, a batch has as many rows, a power of two, as make up
    to so many tokens, and no more than planned."""

    lengths: Sequence[int]
    to: tuple[int, ...]
    tokens: int | None = None

    def __post_init__(self) -> None:
        place = "data_loader: buckets"
        checked_buckets(self.to)
        longer = sum(n > self.to[-1] for n in self.lengths)
        if longer:
            raise MeshwrightError(
                f": {longer} of {len(self.lengths)} samples are longer than {self.to[-1]}, the "
                f"longest {max(self.lengths)}",
                place=place,
                legal=f"a last bucket of {max(self.lengths)} or more",
                way_out="add one, or cut or leave out the longer samples",
            )
        if self.tokens is not None and self.tokens < self.to[-1]:
            raise MeshwrightError(
                f"={self.tokens!r:.40}: less than a row of {self.to[-1]}",
                place="data_loader: tokens_per_batch",
                legal=f"{self.to[-1]} or more",
            )

    def described(self) -> list[Any]:
        """What batches are made by: the same numbers make the same batches."""
        lengths = zlib.crc32(",".join(map(str, self.lengths)).encode())
        return [*self.to, self.tokens, lengths]

    def rows(self, length: int, planned: int) -> int:
        """Of a global batch padded to a length."""
        if self.tokens is None:
            return planned
        fit: int = 1 << (self.tokens // length).bit_length() - 1
        return min(planned, fit)


@dataclass(slots=True, kw_only=True)
class Order:
    """The order of `size` samples in batches of `rows`; shuffled, another in every epoch. `begun`:
    an epoch, and how many of its samples were in batches of other rows already."""

    size: int
    rows: int
    shuffle: bool
    seed: int
    drop_last: bool
    buckets: Buckets | None = None
    begun: tuple[int, int] = (0, 0)
    _epoch: int | None = None
    _batches: Any = field(default=())

    def behind(self, epoch: int) -> int:
        """Samples of an epoch that were in batches of other rows."""
        return self.begun[1] if epoch == self.begun[0] else 0

    def batches(self, epoch: int) -> Sequence[GlobalBatch]:
        """The global batches of an epoch, in order; of one that was begun in batches of other rows
        those that are left."""
        if self._epoch != epoch:
            self._batches = self._made(epoch)
            self._epoch = epoch
        found: Sequence[GlobalBatch] = self._batches
        return found

    def _made(self, epoch: int) -> Sequence[GlobalBatch]:
        generator = torch.Generator().manual_seed(hash_of(self.seed, epoch))
        samples = (
            torch.randperm(self.size, generator=generator)
            if self.shuffle
            else torch.arange(self.size)
        )
        if self.buckets is None:
            return self._cut(samples[self.behind(epoch) :], self.rows, None)
        to = self.buckets.to
        number = torch.tensor([bisect_left(to, n) for n in self.buckets.lengths])
        found: list[GlobalBatch] = []
        for k, length in enumerate(to):
            own = samples[number[samples] == k]
            found += self._cut(own, self.buckets.rows(length, self.rows), length)
        if self.shuffle:
            mixed = torch.randperm(len(found), generator=generator).tolist()
            found = [found[k] for k in mixed]
        return found

    def _cut(self, samples: torch.Tensor, rows: int, length: int | None) -> Sequence[GlobalBatch]:
        parts = samples.split(rows) if len(samples) else ()
        return [
            GlobalBatch(samples=part, rows=rows, length=length)
            for part in parts
            if len(part) == rows or not self.drop_last
        ]


def hash_of(seed: int, epoch: int) -> int:
    """A seed of an epoch: other epochs and seeds give others."""
    return (seed * 1_000_003 + epoch * 7_919) % 2**63
