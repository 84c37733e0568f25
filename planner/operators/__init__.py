"""The planner's own operators, shared with the executor: experts and leaves."""

from meshwright.planner.operators.leaf import (
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

__all__ = [
    "Applied", "Operand", "Program", "UnseenWrite", "combine", "dispatch", "expert_order",
    "grouped_linear", "grouped_rows", "grouped_weights", "inverse_of", "state_of", "to_meta",
]  # fmt: skip
