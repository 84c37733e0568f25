"""Compressed sums of gradients over the data axis: what is sent, computed and remembered.

A gradient of two dims and more is a matrix M of n rows and m columns, its first dim and the rest;
under tensor parallelism that of a rank's own part. N ranks sum theirs. Each rank adds the error e
that it remembers, sends less than the sum D = M + e of both, and remembers what was not sent:

    powersgd-r   P = Σ D Q, orthonormal columns of it, Q = Σ Dᵀ P, S = P Qᵀ, e = D - S/N: two
                 all-reduces, of r·n and r·m numbers, for one of n·m. Q is the next step's start
    topk-x       the k = x % of the elements of D that are largest, values and places, in one
                 all-gather of N k; e is the rest

so that Σ e is what S lacks of Σ D (PowerSGD, arXiv 1905.13727; error feedback, 1901.09847; Deep
Gradient Compression, 1712.01887, without its changes to the optimizer). Vectors, and matrices that
would not shrink by it, are summed as they are: with gradients of g bytes an element where
4 r (n + m) ≥ g n·m, 4 N k ≥ g n·m; and of top-k those of 2³¹ elements, whose places are int32.

In fp32 whatever the gradient's dtype. Three products read or write n·m each; beside them the error
is added and taken away. Top-k selects in several passes, on a CPU in many, one thread for a matrix
(torch 2.13, 4M elements, one core at 25 GB/s: 56 ms for 0.1 % of them, 119 for 10 %), and adds
elements at places that no cache has (15 to 22 ns each there); both take as long as so many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

NONE = "none"
RANKS = (1, 2, 4, 8, 16, 32)
PERCENTS = (0.1, 1.0, 10.0)
COMPRESSED = (
    NONE,
    *(f"powersgd-{rank}" for rank in RANKS),
    *(f"topk-{percent:g}" for percent in PERCENTS),
)
# what the search may choose: a price sees the seconds of a loss that it does not see, so that it
# would take the coarsest of each. The settings of the papers' language models
OFFERED = (NONE, "powersgd-4", "topk-0.1")
NUMBER = 4  # bytes of fp32, and of a place
PLACES = 2**31  # that a place tells apart
# of an element, beside what products read: to add the gradient to the error, and to take the sum
# away from it
ERROR_BYTES = 24.0
# by kind of device, of an element to be selected from (on a GPU to add it, its absolute value, four
# passes of a radix selection, the zeros), and of one that is added at its place (two sectors of 32
# bytes, itself and its place)
SELECT_BYTES = {"cuda": 12.0 + 8.0 + 4 * 4.0 + 4.0, "cpu": 400.0}
SCATTER_BYTES = {"cuda": 80.0, "cpu": 450.0}
# operators that a rank issues for a matrix, and for a column of its factor (Householder, twice)
OPERATORS, COLUMN_OPERATORS = 10, 4


@dataclass(frozen=True, slots=True)
class Compression:
    """The compression that a name of `COMPRESSED` says, but for "none": of so many columns (`rank`,
    0 for top-k), or the `part` of the elements that is sent."""

    rank: int = 0
    part: float = 0.0

    def kept(self, rows: int, columns: int) -> int:
        """Elements of a matrix that top-k sends."""
        return max(1, math.floor(self.part * rows * columns))

    def shrinks(self, rows: int, columns: int, ranks: int, nbytes: int) -> bool:
        """Whether less travels of a matrix that so many ranks sum than without, of elements of so
        many bytes: twice a part of it, as an all-gather has of top-k's values and places once."""
        numel = rows * columns
        if self.rank:
            return NUMBER * self.rank * (rows + columns) < nbytes * numel
        return NUMBER * ranks * self.kept(rows, columns) < nbytes * numel < nbytes * PLACES

    def under_way_bytes(self, rows: int, columns: int, ranks: int) -> float:
        """Bytes of a matrix from the start of its sum to its end, as the next bucket starts:
        products, an orthonormal base and the factor, or what a rank sends, and receives of all."""
        if self.rank:
            return NUMBER * self.rank * (2 * rows + columns)
        return 2 * NUMBER * (ranks + 1) * self.kept(rows, columns)

    def moment_bytes(self, rows: int, columns: int, nbytes: int) -> tuple[float, float]:
        """Bytes made for a matrix alone and let go of, as its sum starts and as it ends: absolute
        values and what is selected of them, with int64 places; a sum that is rounded to `nbytes`,
        or a product of factors."""
        whole = float(NUMBER * rows * columns)
        if self.rank:
            return 0.0, whole
        kept = NUMBER * self.kept(rows, columns)
        return whole + 3 * kept, kept + whole * (nbytes < NUMBER)

    def memory_bytes(self, rows: int, columns: int) -> float:
        """Bytes that a rank remembers of a matrix: its error, and PowerSGD's Q."""
        return NUMBER * (rows * columns + self.rank * columns)

    def moved_bytes(self, rows: int, columns: int, ranks: int, kind: str) -> float:
        """Bytes of memory traffic beside products, on a kind of device."""
        numel = rows * columns
        if self.rank:
            return numel * ERROR_BYTES
        scattered = ranks * self.kept(rows, columns) * SCATTER_BYTES[kind]
        return numel * SELECT_BYTES[kind] + scattered

    def operators(self, ranks: int) -> int:
        """Operators of a matrix."""
        return OPERATORS + (COLUMN_OPERATORS * self.rank if self.rank else ranks)


@cache
def compression(name: str) -> Compression | None:
    """The compression of this name; None for "none"."""
    kind, _, number = name.partition("-")
    if kind == "powersgd":
        return Compression(rank=int(number))
    return Compression(part=float(number) / 100) if kind == "topk" else None


def as_matrix(shape: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns of a tensor of this shape; None for vectors."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else None
