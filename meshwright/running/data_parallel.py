"""Rows of a global batch that a rank feeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.executor.ranks import ReplicaWorld
from meshwright.executor.runtime import Runtime, ServedRuntime
from meshwright.planner.batch import batch_rows, input_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfReplica:
    """Rows of a global batch that a rank of replica `number` of `count` feeds, which has the
    `rows_of` it within its own."""

    number: int
    count: int
    rows_of: Callable[[int], Sequence[int]]

    def __call__(self, rows: int) -> Sequence[int]:
        share = rows // self.count
        return [self.number * share + row for row in self.rows_of(share)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """This rank's share of global batches: number `rank` of `size`. Ranks that differ in their
    tensor axis alone have the same; those of another pipeline stage their own stage's, which is the
    same where stages have as many data ranks.

    `rows` are the numbers in the global batch of the rows that `train_step(..., local=True)` takes,
    in their order: those of the first micro-batch, of the second, and so on; `rows_of` are those of
    a global batch of so many rows, which may be fewer. A rank that does not read data (`reads`: the
    stages between the first and the last mostly don't) may give None. `filling` says what makes
    rows count nothing, of which inputs (by path), where anything does.
    """

    rank: int
    size: int
    reads: bool
    rows: tuple[int, ...]
    filling: Mapping[str, int] | None
    rows_of: Callable[[int], Sequence[int]]

    @staticmethod
    def of(runtime: Runtime, world: ReplicaWorld | None = None) -> DataParallel:
        """Data parallelism of a runtime's rank, in the `world` of one replica of several."""
        step, data = runtime.planned, runtime.place.rows
        if isinstance(runtime, ServedRuntime):
            return DataParallel(
                rank=runtime.share[0],
                size=runtime.share[1],
                reads=not runtime.serves,
                rows=() if runtime.serves else runtime.rows_of(runtime.of_all.global_batch_size),
                filling=None,
                rows_of=runtime.rows_of,
            )
        number, count = (0, 1) if world is None else (world.number, world.count)
        rows_of: Callable[[int], Sequence[int]] = step.batches.share_of
        if count > 1:
            rows_of = RowsOfReplica(number=number, count=count, rows_of=rows_of)
        first = number * runtime.plan.global_batch_size
        return DataParallel(
            rank=number * data.size + data.rank,
            size=count * data.size,
            reads=step.reads_data,
            rows=tuple(first + row for row in step.batches.share),
            filling=step.batches.filling,
            rows_of=rows_of,
        )

    def filled(self, batch: Any, own: int, rows: int) -> Any:
        """The first `own` rows of a batch, filled up to `rows` with such that count nothing."""
        assert self.filling, "rows of this model's batches count, whatever is in them"
        filling, (leaves, spec) = self.filling, input_leaves(batch)
        batch_size = batch_rows(batch)

        def fill(path: str, x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.dim() or len(x) != batch_size:
                return x
            more = x[:1].expand(rows - own, *x.shape[1:])
            if path in filling:
                more = torch.full_like(more, filling[path])
            return torch.cat([x[:own], more])

        return pytree.tree_unflatten([fill(path, x) for path, x in leaves], spec)
