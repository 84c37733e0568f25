"""Blocks lowered to fx graphs over local tensors with explicit collectives."""

from meshwright.executor.lowering.compile import backend_of
from meshwright.executor.lowering.context import Context, State, boundary_placement, local_view
from meshwright.executor.lowering.implementations import row_weight
from meshwright.executor.lowering.lower import Lowered, Lowering, block_salt
