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
from meshwright.planner.tracing.user_module.leaf import TRACE, Amount, Declaration, declared, leaf
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

__all__ = [
    "CALL_HOOKS", "MEMORY_ONLY", "PLAIN", "STATE", "TENSOR_HOOKS", "TRACE", "Amount",
    "Declaration", "Held", "Key", "Place", "SimilarLayers", "Watch", "calling_place", "check_hooks",
    "condition", "declared", "describe", "find_similar_layers", "held_state", "holders_of",
    "hooked", "hooks_in", "leaf", "refused", "refused_hooks", "snapshot", "taken_hooks",
    "user_frame",
]  # fmt: skip
