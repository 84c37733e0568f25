"""Blocks lowered to fx graphs over local tensors with explicit collectives."""

from meshwright.executor.lowering.compile import backend_of
from meshwright.executor.lowering.context import Context, State, boundary_placement, local_view
from meshwright.executor.lowering.experts import legs
from meshwright.executor.lowering.implementations import row_weight
from meshwright.executor.lowering.lower import Lowered, Lowering, block_salt
from meshwright.executor.lowering.reshard import (
    Axis,
    Reshard,
    Waiting,
    all_gather,
    all_gather_flat,
    local_part,
    part_of,
    reduce_scatter_flat,
    split_parts,
)

__all__ = [
    "Axis", "Context", "Lowered", "Lowering", "Reshard", "State", "Waiting",
    "all_gather", "all_gather_flat", "backend_of", "block_salt",
    "boundary_placement", "legs", "local_part", "local_view", "part_of", "reduce_scatter_flat",
    "row_weight", "split_parts",
]  # fmt: skip
