"""Leaves: modules and functions kept as one operator, probed and tried."""

from meshwright.planner.tracing.leaves.operators import LEAF_OPERATORS
from meshwright.planner.tracing.leaves.record import LeafRecorder

__all__ = ["LEAF_OPERATORS", "LeafRecorder"]
