"""Model FLOPs: of an operator, and of a model per row of its batch."""

from __future__ import annotations

import dataclasses
import math

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.rules import is_narrow
from meshwright.costmodel.sharding import FactorTable
from meshwright.profiles.cluster import Device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of a step: forward once, backward twice, less what frozen parameters spare; recompute
    is no work (MFU convention). Of them `in_8_bits`, 0 to 1, are of products that a precision in 8
    bits has so, at the traced sizes."""

    per_row: float
    fixed: float
    narrow: float

    def of(self, rows: float) -> float:
        """FLOPs of a step over `rows` rows."""
        return self.per_row * rows + self.fixed

    def peak(self, device: Device, precision: str) -> float:
        """FLOP/s of a device that does each part at the peak of its dtype."""
        record = PRECISIONS[precision]
        part = self.narrow if record.narrow else 0.0
        return 1 / (
            part / device.flops(record.narrow or record.wide)
            + (1 - part) / device.flops(record.wide)
        )


def model_flops(graph: Graph, table: FactorTable) -> ModelFlops:
    """FLOPs of a model's products, per row of the batch and once."""
    per_row = fixed = narrow = 0.0
    for op in graph.ops:
        if table.ops[op.name].flops:
            work = (1 + _backward_share(graph, op)) * op_flops(table, op)
            narrow += work * is_narrow(graph, op)
            if is_per_row(table, op):
                per_row += work / graph.batch_size
            else:
                fixed += work
    total = per_row * graph.batch_size + fixed
    return ModelFlops(per_row=per_row, fixed=fixed, narrow=narrow / total if total else 0.0)


def _backward_share(graph: Graph, op: Op) -> int:
    """Backward FLOPs of a product over forward ones: 1 for the input, 1 for a trained weight."""
    if not any(graph.values[v].requires_grad for v in op.results):
        return 0
    weights = [graph.values[v] for v in op.operands if v in graph.parameters]
    frozen = any(len(w.shape) > 1 and not w.requires_grad for w in weights)
    return 1 if frozen else 2


def is_per_row(table: FactorTable, op: Op) -> bool:
    """Whether an operator's FLOPs grow with the batch."""
    atoms = table.letters[op.name]
    return any(table.batch in atoms.get(f, ()) for f in table.ops[op.name].flop_factors)


def op_flops(table: FactorTable, op: Op) -> float:
    """Forward FLOPs of an operator at the traced sizes."""
    factors = table.ops[op.name]
    return factors.flops * math.prod(factors.sizes[f] for f in factors.flop_factors)
