"""Totals: values of the whole batch that raw inputs decide (the number of labels, of a mask's
flags), put together from those of micro-batches before the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch

from meshwright.costmodel.sharding import TotalKind
from meshwright.executor.lowering import Lowered
from meshwright.executor.stages.batches import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """One total: `program` makes that of a micro-batch from raw inputs and from totals before it,
    on the data axis in the state in which the stage reads it."""

    value: str
    kind: TotalKind
    program: Lowered


TOGETHER: Mapping[TotalKind, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = MappingProxyType({
    "sum": lambda parts: reduce(torch.add, parts),
    "mean": lambda parts: reduce(torch.add, parts) / len(parts),
    "max": lambda parts: reduce(torch.maximum, parts),
    "min": lambda parts: reduce(torch.minimum, parts),
})  # fmt: skip


def add_totals(totals: Sequence[Total], tensors: Mapping[str, torch.Tensor], rows: Rows) -> None:
    """Add the totals to the inputs of every micro-batch; `tensors` are the stage's."""
    with torch.no_grad():
        for total in totals:
            parts = []
            for inputs in rows:
                values = {**tensors, **inputs}
                parts += total.program.module(*[values[n] for n in total.program.arguments])
            summed = TOGETHER[total.kind](parts)
            for inputs in rows:
                inputs[total.value] = summed
