"""The planner's own operators, shared with the executor: experts and leaves."""

from meshwright.planner.operators.leaf_program import (
    Applied,
    Operand,
    Program,
    UnseenWrite,
    state_of,
    to_meta,
)
from meshwright.planner.operators.moe import (
    combine,
    dispatch,
    expert_order,
    grouped_linear,
    grouped_rows,
    grouped_weights,
    inverse_of,
)
