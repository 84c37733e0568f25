"""Leaves: modules and functions kept as one operator, probed and tried."""

from meshwright.planner.tracing.leaves.probe import check_backwards
from meshwright.planner.tracing.leaves.record import LEAF_OPERATORS, LeafRecorder
