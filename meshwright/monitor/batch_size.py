"""Rows and tokens of a global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.planner.batch import input_leaves
from meshwright.planner.report import sequence_length


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Rows and tokens (None without a sequence) of a global batch."""

    rows: int
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Counts a batch's tokens: `length` of them a row as planned (None without a sequence), by the
    `inputs` that have a dim of that length, as (path, dim), where a batch is of another."""

    length: int | None
    inputs: Mapping[str, int]

    @staticmethod
    def of(problem: Problem) -> TokenCount:
        graph, factors, length = problem.graph, problem.factors, sequence_length(problem)
        counts: dict[str, int] = {}
        for value, path in graph.inputs.items():
            shape = graph.values[value].shape
            for dim, factor in enumerate(factors.dims.get(value, ())):
                if dim and shape[dim] == length and factor == (factors.sequence,):
                    counts.setdefault(path, dim)
            if len(shape) == 2 and shape[1] == length and factors.has_batch(value):
                counts.setdefault(path, 1)
        return TokenCount(length=length, inputs=counts)

    def size(self, batch: Any, rows: int) -> BatchSize:
        """The size of `rows` rows like those of a batch, which is None on ranks that read none."""
        if self.length is None:
            return BatchSize(rows, None)
        lengths = [self.length]
        if batch is not None:
            leaves = dict(input_leaves(batch)[0])
            shapes = [(leaves[path].shape, dim) for path, dim in self.inputs.items()]
            lengths = [shape[dim] for shape, dim in shapes] or lengths
        return BatchSize(rows, rows * max(lengths))
