"""What transformers needs while it is traced, undone afterwards."""

from meshwright.planner.tracing.transformers.adapter import adapted
from meshwright.planner.tracing.transformers.packed_positions import check_positions
