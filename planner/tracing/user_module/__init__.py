"""The user's module before the trace: hooks, leaves, similar layers, what can't be traced."""

from meshwright.planner.tracing.user_module.attributes import (
    MEMORY_ONLY,
    Held,
    Key,
    Watch,
    holders_of,
)
from meshwright.planner.tracing.user_module.hooks import (
    CALL_HOOKS,
    TENSOR_HOOKS,
    check_hooks,
    hooked,
    hooks_in,
    refused,
    refused_hooks,
    taken_hooks,
)
from meshwright.planner.tracing.user_module.leaf import TRACE, Declaration, declared, leaf
from meshwright.planner.tracing.user_module.outside import (
    OUTSIDE,
    Outside,
    attributes_read,
    held,
    is_counter,
)
from meshwright.planner.tracing.user_module.similar_layers import (
    PLAIN,
    STATE,
    Place,
    SimilarLayers,
    describe,
    find_similar_layers,
    held_state,
    snapshot,
)
from meshwright.planner.tracing.user_module.sources import calling_place, condition, user_frame
