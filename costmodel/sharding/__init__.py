"""Factors of a graph, the strategies and layouts they allow, and the moves between them."""

from meshwright.costmodel.sharding.context_axis import (
    BY_BLOCKS,
    BY_HALO,
    ContextLayout,
    attends_by_heads,
    context_layout,
    head_counts,
    token_dim,
)
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
from meshwright.costmodel.sharding.rows import (
    Meeting,
    RowUse,
    TotalKind,
    row_use,
    running_statistics,
    same_numbers,
    with_numbers_of,
    written_once,
)
from meshwright.costmodel.sharding.sequence import Shift, shift_of
from meshwright.costmodel.sharding.slices import slice_layout, why_not_sliced
from meshwright.costmodel.sharding.strategies import (
    COPY_DIMS,
    REPLICATE,
    RP,
    P,
    Placement,
    R,
    ShardingError,
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
