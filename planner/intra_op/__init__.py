"""The intra-op integer program of a block, solved exactly."""

from meshwright.planner.intra_op.program import BlockProgram, BlockTable
from meshwright.planner.intra_op.solvers import Certificate
from meshwright.planner.intra_op.time_limit import CORE_S, SolverTime, TimeLimit
