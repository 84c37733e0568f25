"""One operator call on one rank, and the helpers of what it keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.costmodel.graph import Op
from meshwright.costmodel.memory.storage import Held, Local, Storage

SINGLE = 4  # bytes of what kernels accumulate in single precision at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator call on one rank. `saves` as in `OpFactors`; `implementation` names what the
    executor runs in its place; `counted`: a loss divided by a number of rows of its own;
    `counter_dropout` as in `Target`."""

    op: Op
    operands: tuple[Held, ...]
    results: tuple[Local, ...]
    saves: tuple[int, ...]
    device: str
    implementation: str = ""
    counted: bool = False
    counter_dropout: bool = True


Saver = Callable[
    [Call, Sequence[Held]], Iterator[Storage]
]  # the allocations kept, from the results


def listed(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """The operands and results that `saves` lists."""
    for i in call.saves:
        yield (call.operands[i] if i >= 0 else results[-1 - i]).storage


def new(numel: float, itemsize: int) -> Storage:
    """An allocation of elements × bytes."""
    return Storage(numel * itemsize)


def width(x: Local) -> int:
    """Bytes of an element in single precision at least."""
    return max(SINGLE, x.dtype.itemsize)
