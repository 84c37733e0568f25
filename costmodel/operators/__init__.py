"""The price of an operator on one rank: forward, backward, host, communication."""

from meshwright.costmodel.operators.communication import context_exchange
from meshwright.costmodel.operators.cost import (
    COST_FIELDS,
    DTYPE_BYTES,
    NOTHING,
    Cost,
    Setting,
    total,
)
from meshwright.costmodel.operators.flops import ModelFlops, is_per_row, model_flops, op_flops
from meshwright.costmodel.operators.fusion import Fusion, fuse
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.operators.problem import Problem

__all__ = [
    "COST_FIELDS", "DTYPE_BYTES", "NOTHING", "Cost", "Fusion", "ModelFlops", "Pricer", "Problem",
    "Setting", "context_exchange", "fuse", "is_per_row", "model_flops", "op_flops", "total",
]  # fmt: skip
