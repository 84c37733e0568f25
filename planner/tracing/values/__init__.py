"""Values of a traced program: fx nodes, functionalization, traced state."""

from meshwright.planner.tracing.values.functional import (
    RESHAPES,
    GraphBuilder,
    Origin,
    Slots,
    TracedState,
    functional_call,
    infer_metas,
    split_derived,
)
from meshwright.planner.tracing.values.fx_nodes import (
    TensorLike,
    Unknown,
    canonical_target,
    check_dense,
    is_dynamic,
    meta_of,
    mixed_operands,
    module_of,
    results_of,
    share_memory,
    source_of,
    thawed,
    where,
)
