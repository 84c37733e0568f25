"""Bytes: model states, storages, and what autograd keeps of an operator."""

from meshwright.costmodel.memory.call import Call
from meshwright.costmodel.memory.kept import keep
from meshwright.costmodel.memory.states import (
    model_state_bytes,
    optimizer_bytes,
    optimizer_step_bytes,
    working_bytes,
)
from meshwright.costmodel.memory.storage import (
    Held,
    Local,
    Origin,
    Storage,
    compact,
    fresh,
    permuted,
    reshaped,
)

__all__ = [
    "Call", "Held", "Local", "Origin", "Storage", "compact", "fresh", "keep",
    "model_state_bytes", "optimizer_bytes", "optimizer_step_bytes", "permuted", "reshaped",
    "working_bytes",
]  # fmt: skip
