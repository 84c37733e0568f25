"""The inter-op dynamic program: stages, their meshes, and the partition of the blocks."""

from meshwright.planner.inter_op.equal_meshes import cut_evenly
from meshwright.planner.inter_op.partition import (
    InterOpSolution,
    MemoryShortfall,
    StageChoice,
    minimal_shortfall,
    solve_inter_op,
)
from meshwright.planner.inter_op.table import Constraints, StageTable
