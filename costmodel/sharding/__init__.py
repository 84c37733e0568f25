"""Factors of a graph, the strategies and layouts they allow, and the moves between them."""

from meshwright.costmodel.sharding.data_axis import DataLayout, data_layout, loss_is_summed
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.costmodel.sharding.layouts import (
    FOLLOW,
    Assignment,
    BlockLayouts,
    Entry,
    default_state,
    translate,
)
from meshwright.costmodel.sharding.local_call import signature
from meshwright.costmodel.sharding.moves import (
    Enter,
    Leave,
    Move,
    Role,
    Route,
    Run,
    Step,
    buffer_state,
    moves,
    replicated_steps,
    routes,
)
from meshwright.costmodel.sharding.numbers_of_rows import same_numbers, with_numbers_of
from meshwright.costmodel.sharding.rows import Meeting, RowUse, TotalKind, row_use
from meshwright.costmodel.sharding.strategies import (
    COPY_DIMS,
    REPLICATE,
    RP,
    P,
    Placement,
    R,
    Strategy,
    can_hold,
    divides,
    indivisible,
    largest_part,
    replicated,
    splitting_degrees,
    stays_with_experts,
    strategies,
    transition,
)

__all__ = [
    "COPY_DIMS", "FOLLOW", "REPLICATE", "RP", "Assignment", "BlockLayouts", "DataLayout",
    "Enter", "Entry", "FactorTable", "Leave", "Meeting", "Move", "P", "Placement", "R", "Role",
    "Route", "RowUse", "Run", "Step", "Strategy", "TotalKind", "analyse", "buffer_state",
    "can_hold", "data_layout", "default_state", "divides", "indivisible", "largest_part",
    "loss_is_summed", "moves", "replicated", "replicated_steps", "routes", "row_use",
    "same_numbers", "signature", "splitting_degrees", "stays_with_experts", "strategies",
    "transition", "translate", "with_numbers_of",
]  # fmt: skip
